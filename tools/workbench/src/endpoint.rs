//! Where clients connect.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use diesel::connection::Connection;
use diesel::pg::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use url::Url;

/// What is escaped in a part of a URL.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');

/// Where clients connect: libpq's parameters for a database, whether straight or through a proxy or a pooler.
///
/// [`Database`](crate::Database), [`PgBouncer`](crate::PgBouncer), [`Pgpool`](crate::Pgpool) and
/// [`RoundTrips`](crate::RoundTrips) dereference to theirs.
#[derive(Clone, Debug)]
pub struct Endpoint(BTreeMap<String, String>);

impl Endpoint {
    /// The endpoint of a URL such as `postgresql://user@host:port/database` or
    /// `postgresql:///database?host=/run/postgresql&user=postgres`. libpq's keywords and values, and several hosts, are
    /// not accepted.
    pub fn new(url: &str) -> Self {
        let parsed = Url::parse(url).ok();
        let parsed = parsed.filter(|url| matches!(url.scheme(), "postgresql" | "postgres"));
        let url = parsed.expect("the URL of a database is like postgresql://user@host/database");
        let port = url.port().map(|port| port.to_string());
        let host = url.host_str().unwrap_or_default();
        let parts = [
            ("user", url.username()),
            ("password", url.password().unwrap_or_default()),
            ("host", host.trim_matches(['[', ']'])),
            ("port", &port.unwrap_or_default()),
            ("dbname", url.path().trim_start_matches('/')),
        ];
        let parts = parts.into_iter().filter(|(_, value)| !value.is_empty());
        let parts = parts.map(|(name, value)| (name.to_owned(), decoded(value)));
        Self(parts.chain(url.query_pairs().into_owned()).collect())
    }

    /// The URL, which both libpq and tokio-postgres accept, except for the `sslrootcert` of a server with TLS, which
    /// tokio-postgres does not: the name of the database, and the rest as parameters.
    pub fn url(&self) -> String {
        let encoded = |value| utf8_percent_encode(value, ESCAPED);
        let (mut database, mut parameters) = (String::new(), Vec::new());
        for (name, value) in &self.0 {
            match name.as_str() {
                "dbname" => database = encoded(value).to_string(),
                _ => parameters.push(format!("{name}={}", encoded(value))),
            }
        }
        format!("postgresql:///{database}?{}", parameters.join("&"))
    }

    /// The URL with a parameter set, such as `("application_name", "web-3")` or `("user", "modest")`.
    pub fn url_with(&self, parameter: &str, value: &str) -> String {
        self.clone().with(parameter, value).url()
    }

    /// Opens a connection.
    pub fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url()).unwrap_or_else(cannot("connect"))
    }

    /// A pool of r2d2 with at most `size` connections.
    ///
    /// Connections are opened on demand, and tested by a round trip at every checkout, which is r2d2's default. A checkout
    /// from an exhausted pool fails after ten seconds.
    pub fn pool(&self, size: u32) -> Pool<ConnectionManager<PgConnection>> {
        Pool::builder()
            .max_size(size)
            .min_idle(Some(0))
            .connection_timeout(Duration::from_secs(10))
            .build(self.manager())
            .unwrap_or_else(cannot("make a pool"))
    }

    /// The manager for a pool of r2d2 with other settings.
    pub fn manager(&self) -> ConnectionManager<PgConnection> {
        ConnectionManager::new(self.url())
    }

    /// The same with a parameter set.
    pub(crate) fn with(mut self, parameter: &str, value: &str) -> Self {
        self.0.insert(parameter.to_owned(), value.to_owned());
        self
    }

    /// The same for a server at another address, which is a host or the directory of a Unix socket.
    pub(crate) fn with_address(mut self, host: &str, port: u16) -> Self {
        self.0.remove("hostaddr");
        self.with("host", host).with("port", &port.to_string())
    }

    /// The same without a parameter, and the value that it had.
    #[cfg(feature = "tls")]
    pub(crate) fn without(mut self, parameter: &str) -> (Self, Option<String>) {
        let value = self.0.remove(parameter);
        (self, value)
    }

    /// Whether clients must not connect without TLS.
    #[cfg(feature = "tls")]
    pub(crate) fn requires_tls(&self) -> bool {
        let mode = self.0.get("sslmode").map(String::as_str);
        matches!(mode, Some("require" | "verify-ca" | "verify-full"))
    }

    /// The host, or the directory of the Unix socket, and the port.
    pub(crate) fn address(&self) -> (String, u16) {
        let host = self.0.get("hostaddr").or(self.0.get("host"));
        let host = host.expect("the URL of the database names its host");
        let port = self.0.get("port").map_or(Ok(5432), |port| port.parse());
        (host.clone(), port.unwrap_or_else(cannot("read the port")))
    }

    /// The user, empty where the URL names none.
    pub(crate) fn user(&self) -> String {
        self.0.get("user").cloned().unwrap_or_default()
    }
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

pub(crate) fn cannot<T, E: Display>(what: &str) -> impl FnOnce(E) -> T {
    move |error| panic!("cannot {what}: {error}")
}
