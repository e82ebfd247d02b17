//! A database of its own for one test.

use std::env;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};

use crate::cluster::Cluster;
use crate::endpoint::{Endpoint, cannot};
use crate::watcher::random;

/// The pattern of our databases' names, which contain the time of their creation. No other database is ever dropped.
const PATTERN: &str = "^interlock_test_([0-9]{10})_[0-9a-f]{16}_[0-9]+$";

/// The age in seconds from which on a database of a killed run is dropped.
const LEFT_BEHIND: u64 = 3600;

/// An empty database of its own, dropped with the value. Connections and pools are those of its [`Endpoint`].
///
/// Advisory locks belong to a database, so tests with a database each do not meet each other's locks. The views
/// `pg_locks` and `pg_stat_activity` show the whole server, though: restrict them to `current_database()`.
///
/// ```
/// use diesel::prelude::*;
///
/// let database = workbench::Database::new();
/// let mut conn = database.connect();
/// diesel::sql_query("CREATE TABLE users ()").execute(&mut conn).unwrap();
/// ```
#[derive(Debug)]
#[must_use = "the database is dropped when the value drops"]
pub struct Database {
    name: String,
    endpoint: Endpoint,
    /// Where the database is created and dropped from.
    maintenance: Endpoint,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<Endpoint>,
}

impl Database {
    /// Creates a database on the server of `DATABASE_URL`, whose role needs the right to create databases. If `DATABASE_URL`
    /// is not set, the first call starts a server for this process.
    // Not a cheap constant, as `default` would suggest.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self::create(server(), "")
    }

    /// As [`new`](Self::new), with an encoding other than the server's, such as `"LATIN1"`.
    pub fn with_encoding(encoding: &str) -> Self {
        Self::create(server(), &format!("ENCODING '{encoding}' LOCALE 'C'"))
    }

    pub(crate) fn create(maintenance: Endpoint, options: &str) -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        static PROCESS: OnceLock<u64> = OnceLock::new();

        let (now, process) = (now(), PROCESS.get_or_init(random));
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("interlock_test_{now:010}_{process:016x}_{number}");
        let mut conn = connect_to_maintain(&maintenance).unwrap_or_else(cannot("connect"));
        // `template0`, because sessions in `template1` would prevent this, and it may contain objects of the user.
        let create = format!("CREATE DATABASE {name} TEMPLATE template0 {options}");
        let created = diesel::sql_query(create).execute(&mut conn);
        created.unwrap_or_else(cannot("create a database, which every test needs"));
        Self {
            endpoint: maintenance.clone().with("dbname", &name),
            name,
            maintenance,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Fills the schema `public` with functions, types and relations that have the names and the
    /// arguments of PostgreSQL's own, on request also with operators, and puts it first in the
    /// search path of later sessions. A statement that finds one of them by the search path fails,
    /// and [`sprung_traps`](Self::sprung_traps) counts it.
    pub fn set_traps(&self, has_operators: bool) {
        let conn = &mut self.connect();
        // The operators first, because the functions are in the way afterwards.
        let traps = include_str!("traps.sql");
        let (helpers, all) = traps.split_once("DO $traps$").expect("the traps");
        let mut parts = vec![helpers.to_owned()];
        parts.extend(has_operators.then(|| include_str!("operator_traps.sql").to_owned()));
        parts.push(format!("DO $traps${all}"));
        for part in parts {
            let set = conn.batch_execute(&part);
            set.unwrap_or_else(cannot("set traps"));
        }
    }

    /// Creates in the schema `public` every operator that `pg_catalog` lacks for exactly these
    /// types, among them the types of `resource_control`, if that is installed. A statement that
    /// refers to one of them is an error, and [`Cluster::found_operators`] has it. Needs a superuser.
    pub fn set_operators(&self) {
        let conn = &mut self.connect();
        let set = conn
            .batch_execute("SET search_path = pg_catalog, pg_temp")
            .and_then(|()| conn.batch_execute(include_str!("missing_operators.sql")));
        set.unwrap_or_else(cannot("create operators"));
    }

    /// How many traps were sprung.
    pub fn sprung_traps(&self) -> i64 {
        let conn = &mut self.connect();
        let path = conn.batch_execute("SET search_path = pg_catalog, pg_temp");
        path.unwrap_or_else(cannot("set the search path"));
        let count =
            sql::<BigInt>("CASE WHEN is_called THEN last_value ELSE 0 END FROM public.sprung");
        diesel::select(count)
            .get_result(conn)
            .unwrap_or_else(cannot("count the sprung traps"))
    }

    /// The name, which is an identifier that needs no quotes.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Deref for Database {
    type Target = Endpoint;

    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl Cluster {
    /// Makes an empty database on this server. See [`Database::new`].
    pub fn database(&self) -> Database {
        let database = Database::create(self.endpoint("postgres"), "");
        #[cfg(feature = "tls")]
        let database = self.with_tls(database);
        database
    }
}

impl Drop for Database {
    /// Drops the database, and ends the sessions that are still connected to it. Ignores errors, because the server may
    /// have been stopped.
    fn drop(&mut self) {
        if let Ok(mut conn) = connect_to_maintain(&self.maintenance) {
            let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
            let _ = diesel::sql_query(drop).execute(&mut conn);
        }
    }
}

/// The server on which tests have their databases.
fn server() -> Endpoint {
    static SHARED: OnceLock<Cluster> = OnceLock::new();
    static CLEANING: Once = Once::new();

    match env::var("DATABASE_URL") {
        Ok(url) if !url.is_empty() => {
            let endpoint = Endpoint::new(&url);
            CLEANING.call_once(|| drop_left_behind(&endpoint));
            endpoint
        }
        _ => SHARED.get_or_init(Cluster::start).endpoint("postgres"),
    }
}

/// Drops databases of runs that were killed. Ignores errors, because somebody else may do the same at the same time.
fn drop_left_behind(server: &Endpoint) {
    let Ok(mut conn) = connect_to_maintain(server) else {
        return;
    };
    let names = sql::<Text>(&format!(
        "datname::text FROM pg_database WHERE substring(datname FROM '{PATTERN}')::bigint < {} \
         AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE datid = pg_database.oid)",
        now().saturating_sub(LEFT_BEHIND),
    ));
    let names = diesel::select(names).load::<String>(&mut conn);
    for name in names.unwrap_or_default() {
        // Without FORCE, because another process may have connected meanwhile.
        let _ = diesel::sql_query(format!("DROP DATABASE IF EXISTS {name}")).execute(&mut conn);
    }
}

/// Opens a connection, with a timeout.
fn connect_to_maintain(maintenance: &Endpoint) -> ConnectionResult<PgConnection> {
    PgConnection::establish(&maintenance.url_with("connect_timeout", "10"))
}

/// Seconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
