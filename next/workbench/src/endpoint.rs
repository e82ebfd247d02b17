//! Where clients connect.

use std::fmt::Display;
use std::time::Duration;

use diesel::connection::Connection;
use diesel::pg::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool};
#[cfg(feature = "async")]
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod, bb8, deadpool,
};
#[cfg(feature = "async")]
use diesel_async::{AsyncConnection, AsyncPgConnection};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use url::Url;

/// What is escaped in a part of a URL.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_');

/// Where clients connect: the URL of a database, whether straight or through a proxy or a pooler.
///
/// [`Database`](crate::Database), [`PgBouncer`](crate::PgBouncer) and [`RoundTrips`](crate::RoundTrips) dereference to
/// theirs.
///
/// ```
/// let database = workbench::Database::new();
/// let pool = database.pool(2);
/// let mut conn = pool.get().unwrap();
/// # use diesel::prelude::*;
/// diesel::sql_query("CREATE TABLE users ()").execute(&mut conn).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Endpoint(Url);

impl Endpoint {
    /// The endpoint of a URL such as `postgresql://user@host:port/database` or
    /// `postgresql:///database?host=/run/postgresql&user=postgres`. libpq's keywords and values, and several hosts, are
    /// not accepted.
    pub fn new(url: &str) -> Self {
        let parsed = Url::parse(url).ok();
        let parsed = parsed.filter(|url| matches!(url.scheme(), "postgresql" | "postgres"));
        Self(parsed.expect("the URL of a database is like postgresql://user@host/database"))
    }

    /// The URL, which both libpq and tokio-postgres accept.
    pub fn url(&self) -> String {
        self.0.to_string()
    }

    /// The URL with a parameter set, such as `("application_name", "web-3")`.
    pub fn url_with(&self, parameter: &str, value: &str) -> String {
        self.with(parameter, value).url()
    }

    /// Opens a connection.
    pub fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url()).unwrap_or_else(cannot("connect"))
    }

    /// A pool of r2d2 with at most `size` connections.
    ///
    /// They are opened when they are first needed, and checked by a round trip at every checkout, which is r2d2's
    /// default. A checkout from an exhausted pool fails after ten seconds.
    pub fn pool(&self, size: u32) -> Pool<ConnectionManager<PgConnection>> {
        Pool::builder()
            .max_size(size)
            .min_idle(Some(0))
            .connection_timeout(Duration::from_secs(10))
            .build(self.manager())
            .unwrap_or_else(cannot("make a pool"))
    }

    /// What opens the connections of a pool of r2d2 with settings of its own.
    pub fn manager(&self) -> ConnectionManager<PgConnection> {
        ConnectionManager::new(self.url())
    }

    /// Opens an asynchronous connection.
    #[cfg(feature = "async")]
    pub async fn connect_async(&self) -> AsyncPgConnection {
        let connected = AsyncPgConnection::establish(&self.url()).await;
        connected.unwrap_or_else(cannot("connect"))
    }

    /// A pool of deadpool with at most `size` connections, which are not checked at a checkout.
    #[cfg(feature = "async")]
    pub fn deadpool(&self, size: u32) -> deadpool::Pool<AsyncPgConnection> {
        deadpool::Pool::builder(self.async_manager(RecyclingMethod::Fast))
            .max_size(size as usize)
            .build()
            .unwrap_or_else(cannot("make a pool"))
    }

    /// A pool of bb8 with at most `size` connections, which are not checked at a checkout. A checkout from an exhausted
    /// pool fails after ten seconds.
    #[cfg(feature = "async")]
    pub fn bb8(&self, size: u32) -> bb8::Pool<AsyncPgConnection> {
        let _entered = crate::runtime().enter();
        bb8::Pool::builder()
            .max_size(size)
            .test_on_check_out(false)
            .connection_timeout(Duration::from_secs(10))
            .build_unchecked(self.async_manager(RecyclingMethod::Fast))
    }

    /// What opens the connections of an asynchronous pool with settings of its own.
    #[cfg(feature = "async")]
    pub fn async_manager(
        &self,
        recycling_method: RecyclingMethod<AsyncPgConnection>,
    ) -> AsyncDieselConnectionManager<AsyncPgConnection> {
        let mut config = ManagerConfig::default();
        config.recycling_method = recycling_method;
        AsyncDieselConnectionManager::new_with_config(self.url(), config)
    }

    /// The same with a parameter set.
    pub(crate) fn with(&self, parameter: &str, value: &str) -> Self {
        let mut url = self.without(&[parameter]);
        let value = utf8_percent_encode(value, ESCAPED);
        url.set_query(Some(&match url.query() {
            Some(query) => format!("{query}&{parameter}={value}"),
            None => format!("{parameter}={value}"),
        }));
        Self(url)
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

    /// The same for a server at another address, which is a host or the directory of a Unix socket.
    pub(crate) fn with_address(&self, host: &str, port: u16) -> Self {
        let mut url = self.without(&["host", "hostaddr", "port"]);
        let host = utf8_percent_encode(host, ESCAPED).to_string();
        url.set_host(Some(&host)).expect("the scheme has hosts");
        url.set_port(Some(port))
            .expect("a URL with a host has a port");
        Self(url)
    }

    /// The host, or the directory of the Unix socket, and the port.
    pub(crate) fn address(&self) -> (String, u16) {
        let host = ["hostaddr", "host"]
            .iter()
            .find_map(|name| self.parameter(name))
            .or_else(|| self.0.host_str().map(decoded))
            .filter(|host| !host.is_empty())
            .expect("the URL of the database names its host");
        let port = match self.parameter("port") {
            Some(port) => port.parse().unwrap_or_else(cannot("read the port")),
            None => self.0.port().unwrap_or(5432),
        };
        (host.trim_matches(['[', ']']).to_owned(), port)
    }

    /// The user, empty where the URL names none.
    pub(crate) fn user(&self) -> String {
        let user = self.parameter("user");
        user.unwrap_or_else(|| decoded(self.0.username()))
    }

    fn parameter(&self, name: &str) -> Option<String> {
        self.parameters()
            .filter_map(|parameter| parameter.split_once('='))
            .find(|(other, _)| *other == name)
            .map(|(_, value)| decoded(value))
    }

    /// The URL without some parameters. The others stay as they are written.
    fn without(&self, names: &[&str]) -> Url {
        let kept: Vec<_> = self
            .parameters()
            .filter(|parameter| !names.contains(&parameter.split('=').next().unwrap_or_default()))
            .collect();
        let mut url = self.0.clone();
        url.set_query((!kept.is_empty()).then(|| kept.join("&")).as_deref());
        url
    }

    fn parameters(&self) -> impl Iterator<Item = &str> {
        let query = self.0.query().unwrap_or_default();
        query.split('&').filter(|parameter| !parameter.is_empty())
    }
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

fn cannot<T, E: Display>(what: &str) -> impl FnOnce(E) -> T {
    move |error| panic!("cannot {what}: {error}")
}
