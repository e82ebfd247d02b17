//! Connection strings of libpq, in both of their forms.

use std::fmt;
use std::path::PathBuf;

/// A libpq connection string: a URL, or keywords and values such as `host=localhost dbname=app`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionString(String);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// A host name or a number, and a port.
    Tcp(String, u16),
    /// The path of a socket.
    Unix(PathBuf),
}

impl ConnectionString {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The same for another database.
    pub(crate) fn with_database(&self, name: &str) -> Self {
        match Url::parse(&self.0) {
            Some(mut url) => {
                url.parameters.retain(|(key, _)| key != "dbname");
                url.path = percent_encoded(name);
                Self(url.to_string())
            }
            None => self.with("dbname", name),
        }
    }

    /// The same with a parameter set.
    pub(crate) fn with(&self, key: &str, value: &str) -> Self {
        match Url::parse(&self.0) {
            Some(mut url) => {
                url.parameters.retain(|(other, _)| other != key);
                url.parameters
                    .push((key.to_owned(), percent_encoded(value)));
                Self(url.to_string())
            }
            // Of two values the later wins.
            None => Self(format!(
                "{} {key}='{}'",
                self.0.trim_end(),
                value.replace('\\', r"\\").replace('\'', r"\'")
            )),
        }
    }

    /// The same for a server at another TCP address.
    pub(crate) fn with_address(&self, host: &str, port: u16) -> Self {
        match Url::parse(&self.0) {
            Some(mut url) => {
                url.parameters
                    .retain(|(key, _)| !matches!(key.as_str(), "host" | "hostaddr" | "port"));
                url.authority = format!("{host}:{port}");
                Self(url.to_string())
            }
            None => self
                .with("hostaddr", "")
                .with("host", host)
                .with("port", &port.to_string()),
        }
    }

    /// The address of the server, the first one if there are several. What the string does not say
    /// comes from libpq's environment variables and defaults.
    pub(crate) fn address(&self) -> Address {
        let environment = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let port = self.value("port").or_else(|| environment("PGPORT"));
        let port = port.as_deref().map_or("", first_of_list);
        let port = match port {
            "" => 5432,
            text => text
                .parse()
                .unwrap_or_else(|_| panic!("the connection string has the port `{text}`")),
        };
        let host = self
            .value("hostaddr")
            .or_else(|| self.value("host"))
            .or_else(|| environment("PGHOSTADDR"))
            .or_else(|| environment("PGHOST"));
        match host.as_deref().map_or("", first_of_list) {
            "" => {
                let socket = ["/run/postgresql", "/var/run/postgresql", "/tmp"]
                    .map(|directory| socket_path(directory, port))
                    .into_iter()
                    .find(|path| path.exists());
                socket.map_or_else(|| Address::Tcp("localhost".to_owned(), port), Address::Unix)
            }
            directory if directory.starts_with('/') => Address::Unix(socket_path(directory, port)),
            host => Address::Tcp(host.to_owned(), port),
        }
    }

    /// The value of a parameter; `None` if it is absent or empty.
    fn value(&self, key: &str) -> Option<String> {
        let value = match Url::parse(&self.0) {
            Some(url) => url.value(key),
            None => keyword_value(&self.0, key),
        };
        value.filter(|value| !value.is_empty())
    }
}

impl fmt::Display for ConnectionString {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn first_of_list(list: &str) -> &str {
    list.split(',').next().unwrap_or_default()
}

fn socket_path(directory: &str, port: u16) -> PathBuf {
    PathBuf::from(directory).join(format!(".s.PGSQL.{port}"))
}

/// The parts of a URL, as they are written: only the keys of the parameters are decoded.
struct Url {
    scheme: String,
    /// Name and password, with the `@` at their end, or nothing.
    user: String,
    /// Host and port, or several, or nothing.
    authority: String,
    path: String,
    parameters: Vec<(String, String)>,
}

impl Url {
    fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.split_once("://")?;
        if !matches!(scheme, "postgresql" | "postgres") {
            return None;
        }
        // As in libpq, a slash ends the search for the user, and a question mark does not.
        let user_end = rest
            .find(['@', '/'])
            .filter(|&at| rest.as_bytes()[at] == b'@')
            .map_or(0, |at| at + 1);
        let (user, rest) = rest.split_at(user_end);
        let (before_query, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = before_query.split_once('/').unwrap_or((before_query, ""));
        let parameters = query
            .split('&')
            .filter(|parameter| !parameter.is_empty())
            .map(|parameter| {
                let (key, value) = parameter.split_once('=').unwrap_or((parameter, ""));
                (percent_decoded(key), value.to_owned())
            });
        Some(Self {
            scheme: scheme.to_owned(),
            user: user.to_owned(),
            authority: authority.to_owned(),
            path: path.to_owned(),
            parameters: parameters.collect(),
        })
    }

    /// The decoded value of a parameter, or of the part of the authority that stands for it.
    fn value(&self, key: &str) -> Option<String> {
        let parameter = self
            .parameters
            .iter()
            .rev()
            .find(|(other, _)| other == key)
            .map(|(_, value)| value.as_str());
        let (host, port) = first_host_and_port(&self.authority);
        let part = match key {
            "host" => Some(host),
            "port" => Some(port),
            _ => None,
        };
        parameter.or(part).map(percent_decoded)
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}://{}{}/{}",
            self.scheme, self.user, self.authority, self.path
        )?;
        for (index, (key, value)) in self.parameters.iter().enumerate() {
            let separator = if index == 0 { '?' } else { '&' };
            write!(f, "{separator}{}={value}", percent_encoded(key))?;
        }
        Ok(())
    }
}

/// Splits `host:port,host:port`, where a host may be a number in brackets.
fn first_host_and_port(authority: &str) -> (&str, &str) {
    if let Some((host, rest)) = authority
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
    {
        return (host, first_of_list(rest).trim_start_matches(':'));
    }
    let first = first_of_list(authority);
    first.split_once(':').unwrap_or((first, ""))
}

/// The value of a keyword in `keyword = value`, where a value may be quoted.
fn keyword_value(text: &str, key: &str) -> Option<String> {
    let mut found = None;
    let mut rest = text.trim_start();
    while let Some((keyword, after)) = rest.split_once('=') {
        let mut chars = after.trim_start().chars();
        let mut value = String::new();
        let quoted = chars.as_str().starts_with('\'');
        if quoted {
            chars.next();
        }
        while let Some(char) = chars.next() {
            match char {
                '\\' => value.extend(chars.next()),
                '\'' if quoted => break,
                space if !quoted && space.is_whitespace() => break,
                other => value.push(other),
            }
        }
        if keyword.trim() == key {
            found = Some(value);
        }
        rest = chars.as_str().trim_start();
    }
    found
}

/// The text for any place in a URL.
pub(crate) fn percent_encoded(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                encoded.push(byte.into())
            }
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

fn percent_decoded(text: &str) -> String {
    let mut decoded = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let code = match after {
            [high, low, ..] if *first == b'%' => {
                hex(*high).zip(hex(*low)).map(|(high, low)| high * 16 + low)
            }
            _ => None,
        };
        decoded.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit)
        .to_digit(16)
        .and_then(|value| value.try_into().ok())
}

#[cfg(test)]
mod tests {
    use super::{Address, ConnectionString};

    fn with_database(text: &str) -> String {
        ConnectionString::new(text)
            .with_database("o'b d")
            .to_string()
    }

    fn with_address(text: &str) -> String {
        ConnectionString::new(text)
            .with_address("127.0.0.1", 1)
            .to_string()
    }

    fn address(text: &str) -> Address {
        ConnectionString::new(text).address()
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp(host.to_owned(), port)
    }

    #[test]
    fn the_database_is_replaced_in_a_url() {
        for (text, expected) in [
            ("postgresql://h/a", "postgresql://h/o%27b%20d"),
            (
                "postgres://u:p%2Fw@h:5433/a%20b?sslmode=require",
                "postgres://u:p%2Fw@h:5433/o%27b%20d?sslmode=require",
            ),
            ("postgresql://", "postgresql:///o%27b%20d"),
            ("postgresql://h", "postgresql://h/o%27b%20d"),
            (
                "postgresql://h?a=b&c=d%26",
                "postgresql://h/o%27b%20d?a=b&c=d%26",
            ),
            (
                "postgresql:///a?host=/tmp&dbname=x&%64bname=y",
                "postgresql:///o%27b%20d?host=/tmp",
            ),
            (
                "postgresql://u@%2Ftmp:5/a",
                "postgresql://u@%2Ftmp:5/o%27b%20d",
            ),
            (
                "postgresql://h/a?options=-c%20search_path%3Da@b",
                "postgresql://h/o%27b%20d?options=-c%20search_path%3Da@b",
            ),
        ] {
            assert_eq!(with_database(text), expected);
        }
    }

    #[test]
    fn the_database_is_replaced_among_keywords() {
        assert_eq!(
            with_database("host=h dbname=a "),
            r"host=h dbname=a dbname='o\'b d'"
        );
    }

    #[test]
    fn the_address_is_replaced_in_both_forms() {
        assert_eq!(
            with_address("postgresql://u:p@h:5,[::1]:6/a?hostaddr=1.2.3.4&x=y"),
            "postgresql://u:p@127.0.0.1:1/a?x=y"
        );
        assert_eq!(
            with_address("postgresql:///a?host=/tmp"),
            "postgresql://127.0.0.1:1/a"
        );
        assert_eq!(
            with_address("dbname=a"),
            "dbname=a hostaddr='' host='127.0.0.1' port='1'"
        );
    }

    #[test]
    fn the_address_is_read_from_both_forms() {
        assert_eq!(address("postgresql://u:p@h:5/a"), tcp("h", 5));
        assert_eq!(address("postgresql://[::1]:6,h/a"), tcp("::1", 6));
        assert_eq!(address("postgresql://h:5,i:6/a?port=7"), tcp("h", 7));
        assert_eq!(
            address("postgresql://h:5/a?hostaddr=1.2.3.4"),
            tcp("1.2.3.4", 5)
        );
        assert_eq!(
            address("postgresql://%2Fa%20b:5/a"),
            Address::Unix("/a b/.s.PGSQL.5".into())
        );
        assert_eq!(address("host = h,i port=5,6"), tcp("h", 5));
        assert_eq!(
            address(r"password='it\'s host=x' host='/a b' port=5"),
            Address::Unix("/a b/.s.PGSQL.5".into())
        );
        assert_eq!(address(r"host=a\ b port=5 host=c"), tcp("c", 5));
    }
}
