//! A database of its own for one test.

mod asynchronous;
mod connection_string;

use std::env;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::{BigInt, Bool, Text};

pub use self::asynchronous::block_on;
pub(crate) use self::connection_string::{Address, ConnectionString, percent_encoded};
use crate::cluster::Cluster;
use crate::cluster::directory::random;

/// What the names of our databases begin with. Nothing else is ever dropped.
const PREFIX: &str = "interlock_test_";

/// How old a database of a killed run is when it is dropped, in seconds.
const LEFT_OVER: i64 = 3600;

/// An empty database of its own, dropped with the value.
///
/// Advisory locks belong to a database, so tests with a database each cannot meet each other's
/// locks. The views `pg_locks` and `pg_stat_activity` show the whole server, though: restrict them
/// to `current_database()`.
///
/// ```
/// use diesel::prelude::*;
///
/// let database = workbench::Database::new();
/// let mut conn = database.connect();
/// diesel::sql_query("CREATE TABLE users ()").execute(&mut conn).unwrap();
/// ```
#[derive(Debug)]
pub struct Database {
    name: String,
    url: ConnectionString,
    /// Where the database is created and dropped from.
    maintenance: ConnectionString,
}

impl Database {
    /// Makes a database, on the server of the environment variable `DATABASE_URL` if that is set,
    /// else on a server that is started for this process at the first call.
    ///
    /// `DATABASE_URL` is a `postgresql://` URL. Its database must exist and is only connected to.
    /// Databases that killed runs left on that server are dropped when they are an hour old and
    /// nobody is connected to them.
    ///
    /// # Panics
    ///
    /// If the server cannot be started or reached, if `DATABASE_URL` is no URL, or if its role may not
    /// create databases.
    #[must_use = "the database is dropped when the value drops"]
    // Not a cheap constant, as `default` would suggest.
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        static SHARED: OnceLock<Cluster> = OnceLock::new();
        static CLEANING: Once = Once::new();

        match env::var("DATABASE_URL") {
            Ok(url) if !url.is_empty() => {
                let maintenance = ConnectionString::parse(&url)
                    .unwrap_or_else(|error| panic!("DATABASE_URL: {error}"));
                let mut conn = connect_to_maintain(&maintenance).unwrap_or_else(|error| {
                    panic!("cannot connect to the server of DATABASE_URL: {error}")
                });
                require_permission(&mut conn);
                CLEANING.call_once(|| drop_left_over(&mut conn));
                Self::create(maintenance, &mut conn)
            }
            _ => SHARED.get_or_init(Cluster::start).database(),
        }
    }

    pub(crate) fn on_cluster(cluster: &Cluster) -> Self {
        let maintenance = ConnectionString::new(&cluster.url("postgres"));
        let mut conn = connect_to_maintain(&maintenance).unwrap_or_else(|error| {
            panic!(
                "cannot connect to {maintenance}: {error}\n{}",
                cluster.end_of_log()
            )
        });
        Self::create(maintenance, &mut conn)
    }

    fn create(maintenance: ConnectionString, conn: &mut PgConnection) -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        static PROCESS: OnceLock<u64> = OnceLock::new();

        let now = diesel::select(sql::<BigInt>(
            "extract(epoch FROM clock_timestamp())::bigint",
        ))
        .get_result::<i64>(conn)
        .expect("the server tells the time");
        let process = PROCESS.get_or_init(random);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{now}_{process:016x}_{number}");
        // Unlike `template1`, `template0` has no sessions, which would prevent this, and nothing of
        // the user's.
        diesel::sql_query(format!("CREATE DATABASE {name} TEMPLATE template0"))
            .execute(conn)
            .unwrap_or_else(|error| panic!("cannot create the database {name}: {error}"));
        Self {
            url: maintenance.with_database(&name),
            name,
            maintenance,
        }
    }

    /// The name, which is an identifier that needs no quotes.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The URL of the database.
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    /// The same with a parameter of libpq set.
    ///
    /// ```
    /// let database = workbench::Database::new();
    /// assert!(database.url_with("application_name", "web-3").contains("application_name="));
    /// ```
    pub fn url_with(&self, parameter: &str, value: &str) -> String {
        self.url.with(parameter, value).to_string()
    }

    pub(crate) fn connection_string(&self) -> &ConnectionString {
        &self.url
    }

    /// Opens a connection, and panics if it cannot.
    pub fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url())
            .unwrap_or_else(|error| panic!("cannot connect to the database {}: {error}", self.name))
    }

    /// A pool of at most `size` connections.
    ///
    /// They are opened when they are first needed, and checked by a round trip at every checkout,
    /// which is r2d2's default. A checkout from an exhausted pool fails after ten seconds. For
    /// other settings build a pool of [`manager`](Self::manager).
    pub fn pool(&self, size: u32) -> Pool<ConnectionManager<PgConnection>> {
        Pool::builder()
            .max_size(size)
            .min_idle(Some(0))
            .connection_timeout(Duration::from_secs(10))
            .build(self.manager())
            .unwrap_or_else(|error| {
                panic!("cannot make a pool for the database {}: {error}", self.name)
            })
    }

    /// What opens the connections of a pool with settings of its own.
    ///
    /// ```
    /// use diesel::r2d2::Pool;
    ///
    /// let database = workbench::Database::new();
    /// let pool = Pool::builder().max_size(1).test_on_check_out(false).build(database.manager()).unwrap();
    /// ```
    pub fn manager(&self) -> ConnectionManager<PgConnection> {
        ConnectionManager::new(self.url())
    }
}

impl Drop for Database {
    /// Drops the database, and ends the sessions that are still connected to it. Gives up after half a minute, and
    /// ignores errors: the server may have been stopped.
    fn drop(&mut self) {
        if let Ok(mut conn) = connect_to_maintain(&self.maintenance) {
            let _ = diesel::sql_query(format!(
                "DROP DATABASE IF EXISTS {} WITH (FORCE)",
                self.name
            ))
            .execute(&mut conn);
        }
    }
}

/// Opens a connection that does not wait for ever, neither now nor later.
fn connect_to_maintain(maintenance: &ConnectionString) -> ConnectionResult<PgConnection> {
    let mut conn = PgConnection::establish(&maintenance.with("connect_timeout", "10").to_string())?;
    diesel::sql_query("SET statement_timeout = '30s'")
        .execute(&mut conn)
        .map_err(ConnectionError::CouldntSetupConfiguration)?;
    Ok(conn)
}

/// Panics if the role may not create databases.
fn require_permission(conn: &mut PgConnection) {
    let (role, may_create) = diesel::select((
        sql::<Text>("current_user::text"),
        sql::<Bool>("(SELECT rolcreatedb OR rolsuper FROM pg_roles WHERE rolname = current_user)"),
    ))
    .get_result::<(String, bool)>(conn)
    .expect("the server tells the role");
    assert!(
        may_create,
        "the role \"{role}\" of DATABASE_URL may not create databases, and every test needs one of its own: \
         `ALTER ROLE \"{role}\" CREATEDB`, or unset DATABASE_URL to use a throwaway server"
    );
}

/// Drops databases of runs that were killed. Ignores errors: somebody else may do the same at the
/// same time.
fn drop_left_over(conn: &mut PgConnection) {
    let names = diesel::sql_query(format!(
        "SELECT datname::text AS name FROM pg_database \
         WHERE datname ~ '^{PREFIX}[0-9]{{10}}_[0-9a-f]{{16}}_[0-9]+$' \
         AND split_part(substr(datname::text, {start}), '_', 1)::bigint \
         < extract(epoch FROM clock_timestamp()) - {LEFT_OVER} \
         AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE datid = pg_database.oid)",
        start = PREFIX.len() + 1,
    ))
    .load::<Named>(conn)
    .unwrap_or_default();
    for Named { name } in names {
        // Without FORCE, because a new run may have connected meanwhile.
        let _ = diesel::sql_query(format!("DROP DATABASE IF EXISTS {name}")).execute(conn);
    }
}

#[derive(QueryableByName)]
struct Named {
    #[diesel(sql_type = Text)]
    name: String,
}
