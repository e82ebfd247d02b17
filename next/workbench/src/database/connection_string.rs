//! Connection strings: `postgresql://` URLs, as libpq reads them.

use std::fmt;
use std::path::PathBuf;

use url::Url;

/// The URL of a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionString(Url);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// A host name or a number, and a port.
    Tcp(String, u16),
    /// The path of a socket.
    Unix(PathBuf),
}

impl ConnectionString {
    /// Parses a URL of PostgreSQL.
    ///
    /// libpq also takes keywords and values, several hosts, and a user without a host. These forms are
    /// errors, because a URL parser does not know them.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match Url::parse(text) {
            Ok(url) if matches!(url.scheme(), "postgresql" | "postgres") => Ok(Self(url)),
            other => Err(format!(
                "{text:?} is not a URL such as postgresql://user@host/database or \
                 postgresql:///database?host=/run/postgresql{}",
                other
                    .err()
                    .map(|error| format!(": {error}"))
                    .unwrap_or_default()
            )),
        }
    }

    /// The same, for a text that this crate has made.
    ///
    /// # Panics
    ///
    /// If the text is no URL.
    pub(crate) fn new(text: &str) -> Self {
        Self::parse(text).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The same for another database.
    pub(crate) fn with_database(&self, name: &str) -> Self {
        let mut url = self.without(&["dbname"]);
        url.path_segments_mut()
            .expect("a URL with an authority has a path")
            .clear()
            .push(name);
        Self(url)
    }

    /// The same with a parameter set.
    pub(crate) fn with(&self, key: &str, value: &str) -> Self {
        let mut url = self.without(&[key]);
        url.set_query(Some(&match url.query() {
            Some(query) => format!("{query}&{key}={}", percent_encoded(value)),
            None => format!("{key}={}", percent_encoded(value)),
        }));
        Self(url)
    }

    /// The same for a server at another TCP address.
    pub(crate) fn with_address(&self, host: &str, port: u16) -> Self {
        let mut url = self.without(&["host", "hostaddr", "port"]);
        url.set_host(Some(host))
            .expect("the host is a name or a number");
        url.set_port(Some(port))
            .expect("a URL with a host has a port");
        Self(url)
    }

    /// The address of the server. libpq's environment variables and defaults supply what the URL
    /// omits.
    pub(crate) fn address(&self) -> Address {
        let environment = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let port = self
            .parameter("port")
            .or_else(|| self.0.port().map(|port| port.to_string()))
            .or_else(|| environment("PGPORT"))
            .map_or(5432, |port| {
                port.parse()
                    .unwrap_or_else(|_| panic!("the connection string has the port `{port}`"))
            });
        let host = self
            .parameter("hostaddr")
            .or_else(|| self.parameter("host"))
            .or_else(|| self.0.host_str().map(percent_decoded))
            .filter(|host| !host.is_empty())
            .or_else(|| environment("PGHOSTADDR"))
            .or_else(|| environment("PGHOST"));
        match host {
            None => ["/run/postgresql", "/var/run/postgresql", "/tmp"]
                .map(|directory| socket_path(directory, port))
                .into_iter()
                .find(|path| path.exists())
                .map_or_else(|| Address::Tcp("localhost".to_owned(), port), Address::Unix),
            Some(directory) if directory.starts_with('/') => {
                Address::Unix(socket_path(&directory, port))
            }
            Some(host) => Address::Tcp(host.trim_matches(['[', ']']).to_owned(), port),
        }
    }

    /// The value of a parameter; `None` if it is absent or empty.
    fn parameter(&self, key: &str) -> Option<String> {
        self.0
            .query_pairs()
            .filter(|(other, _)| other == key)
            .last()
            .map(|(_, value)| value.into_owned())
            .filter(|value| !value.is_empty())
    }

    /// The URL without some parameters; the others stay as they are written.
    fn without(&self, keys: &[&str]) -> Url {
        let kept: Vec<&str> = self
            .0
            .query()
            .unwrap_or_default()
            .split('&')
            .filter(|parameter| {
                let key = parameter.split('=').next().unwrap_or_default();
                !key.is_empty() && !keys.contains(&percent_decoded(key).as_str())
            })
            .collect();
        let mut url = self.0.clone();
        url.set_query((!kept.is_empty()).then(|| kept.join("&")).as_deref());
        url
    }
}

impl fmt::Display for ConnectionString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

fn socket_path(directory: &str, port: u16) -> PathBuf {
    PathBuf::from(directory).join(format!(".s.PGSQL.{port}"))
}

/// Encodes a text for any place in a URL, as libpq decodes it: a space is `%20`, because libpq reads
/// `+` as a plus sign.
pub(crate) fn percent_encoded(text: &str) -> String {
    const RESERVED: &percent_encoding::AsciiSet = &percent_encoding::NON_ALPHANUMERIC
        .remove(b'-')
        .remove(b'.')
        .remove(b'_')
        .remove(b'~');
    percent_encoding::utf8_percent_encode(text, RESERVED).to_string()
}

fn percent_decoded(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::{Address, ConnectionString};

    fn address(text: &str) -> Address {
        ConnectionString::new(text).address()
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp(host.to_owned(), port)
    }

    #[test]
    fn the_database_is_replaced() {
        for (text, expected) in [
            ("postgresql://h/a", "postgresql://h/o'b%20d"),
            (
                "postgres://u:p%2Fw@h:5433/a%20b?sslmode=require",
                "postgres://u:p%2Fw@h:5433/o'b%20d?sslmode=require",
            ),
            ("postgresql://", "postgresql:///o'b%20d"),
            ("postgresql://h", "postgresql://h/o'b%20d"),
            (
                "postgresql://h?a=b&c=d%26",
                "postgresql://h/o'b%20d?a=b&c=d%26",
            ),
            (
                "postgresql:///a?host=/tmp&dbname=x&%64bname=y",
                "postgresql:///o'b%20d?host=/tmp",
            ),
            (
                "postgresql://u@%2Ftmp:5/a",
                "postgresql://u@%2Ftmp:5/o'b%20d",
            ),
            (
                "postgresql://h/a?options=-c%20search_path%3Da@b",
                "postgresql://h/o'b%20d?options=-c%20search_path%3Da@b",
            ),
        ] {
            let replaced = ConnectionString::new(text).with_database("o'b d");
            assert_eq!(replaced.to_string(), expected);
        }
    }

    #[test]
    fn a_parameter_is_replaced() {
        let url = ConnectionString::new("postgresql:///a?x=1&y=2");
        assert_eq!(
            url.with("x", "a b+&").to_string(),
            "postgresql:///a?y=2&x=a%20b%2B%26"
        );
        let url = ConnectionString::new("postgresql:///a");
        assert_eq!(url.with("x", "1").to_string(), "postgresql:///a?x=1");
    }

    #[test]
    fn the_address_is_replaced() {
        for (text, expected) in [
            (
                "postgresql://u:p@h:5/a?hostaddr=1.2.3.4&x=y",
                "postgresql://u:p@127.0.0.1:1/a?x=y",
            ),
            ("postgresql:///a?host=/tmp", "postgresql://127.0.0.1:1/a"),
        ] {
            let replaced = ConnectionString::new(text).with_address("127.0.0.1", 1);
            assert_eq!(replaced.to_string(), expected);
        }
    }

    #[test]
    fn the_address_is_read() {
        assert_eq!(address("postgresql://u:p@h:5/a"), tcp("h", 5));
        assert_eq!(address("postgresql://[::1]:6/a"), tcp("::1", 6));
        assert_eq!(address("postgresql://h:5/a?port=7"), tcp("h", 7));
        assert_eq!(
            address("postgresql://h:5/a?hostaddr=1.2.3.4"),
            tcp("1.2.3.4", 5)
        );
        let socket = || Address::Unix("/a b/.s.PGSQL.5".into());
        assert_eq!(address("postgresql://%2Fa%20b:5/a"), socket());
        assert_eq!(address("postgresql:///a?host=/a%20b&port=5"), socket());
    }

    #[test]
    fn what_is_no_url_is_an_error() {
        for text in [
            "host=localhost dbname=app",
            "mysql://h/a",
            "postgresql://h:5,i:6/a",
        ] {
            assert!(
                ConnectionString::parse(text)
                    .unwrap_err()
                    .contains("is not a URL such as")
            );
        }
    }
}
