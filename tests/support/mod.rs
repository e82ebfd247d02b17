//! Shared by the tests: an observing session, waits and assertions.
#![allow(dead_code, unused_imports)] // each crate uses a part

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Integer, Text};
use diesel_interlock::{LockId, LockKey};
use workbench::Database;

#[cfg(feature = "metrics")]
pub(crate) mod exporter;
mod hourly;
#[cfg(feature = "tracing")]
pub(crate) mod log;
mod own;
mod pauses;
mod process;
mod role;
mod wanted;

pub(crate) use self::hourly::hourly;
pub(crate) use self::own::{Own, Step};
pub(crate) use self::pauses::{LEASE, fresh, in_a_quick_round, once_at_least, patiently};
pub(crate) use self::process::{Process, alone};
pub(crate) use self::role::Role;
pub(crate) use self::wanted::Wanted;
use crate::half::{Error, IS_ASYNC, PgPool, Semaphore, make_pool, on_all, wait};

/// Asserts that a value matches a pattern, and shows the value if it does not.
#[macro_export]
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(if $guard:expr)?) => {
        match &$value {
            $pattern $(if $guard)? => {}
            other => panic!("{other:?} is not {}", stringify!($pattern)),
        }
    };
}

/// A session that only observes, over a plain Diesel connection.
pub(crate) struct Observer(PgConnection);

const THIS_DATABASE: &str = "(SELECT oid FROM pg_database WHERE datname = current_database())";

impl Observer {
    /// The settings of a database under test do not cancel what it does.
    pub(crate) fn of(database: &Database) -> Self {
        let url = database.url_with("options", "-c statement_timeout=0");
        Self(PgConnection::establish(&url).unwrap())
    }

    pub(crate) fn conn(&mut self) -> &mut PgConnection {
        &mut self.0
    }

    fn rows_of(key: &LockKey) -> String {
        let (classid, objid, objsubid) = match key.id().unwrap() {
            LockId::BigInt(number) => ((number >> 32) as u32, number as u32, 1),
            LockId::Pair(first, second) => (first as u32, second as u32, 2),
        };
        format!(
            "pg_locks WHERE locktype = 'advisory' AND database = {THIS_DATABASE} \
             AND classid = {classid} AND objid = {objid} AND objsubid = {objsubid}"
        )
    }

    fn count(&mut self, from_where: &str) -> i64 {
        number(&mut self.0, &format!("(SELECT count(*) FROM {from_where})"))
    }

    /// How many sessions hold the lock, in any mode.
    pub(crate) fn holders(&mut self, key: &LockKey) -> i64 {
        self.count(&format!("{} AND granted", Self::rows_of(key)))
    }

    /// How many sessions wait for the lock on the server.
    pub(crate) fn waiters(&mut self, key: &LockKey) -> i64 {
        self.count(&format!("{} AND NOT granted", Self::rows_of(key)))
    }

    /// How many sessions are idle after a try of a lock, which means that they poll.
    pub(crate) fn have_tried(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND state = 'idle' AND query LIKE 'SELECT %pg_try_advisory_lock%'",
        )
    }

    /// How many advisory locks are held in the database.
    pub(crate) fn all_held(&mut self) -> i64 {
        self.count(&format!(
            "pg_locks WHERE locktype = 'advisory' AND granted AND database = {THIS_DATABASE}"
        ))
    }

    /// How many sessions of the database wait for a lock of any kind.
    pub(crate) fn all_waiting(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
    }

    /// How many sessions of the database are inside `pg_sleep`.
    pub(crate) fn sleeping(&mut self) -> i64 {
        self.count("pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'")
    }

    /// The other sessions of the database.
    pub(crate) fn sessions(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND backend_type = 'client backend'",
        )
    }

    /// The other sessions of the database that are idle inside a transaction.
    pub(crate) fn in_transaction(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND state LIKE 'idle in transaction%'",
        )
    }

    pub(crate) fn is_alive(&mut self, pid: i32) -> bool {
        self.count(&format!("pg_stat_activity WHERE pid = {pid}")) == 1
    }

    /// Terminates a session, and waits until it is gone.
    pub(crate) fn kill(&mut self, pid: i32) {
        run(&mut self.0, &format!("SELECT pg_terminate_backend({pid})"));
        eventually("the session has ended", || !self.is_alive(pid));
    }

    /// Terminates all other sessions of the database.
    pub(crate) fn kill_all(&mut self) {
        run(
            &mut self.0,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        );
    }

    /// Asserts that the lock becomes free: PostgreSQL frees it a moment after its session has
    /// ended.
    #[track_caller]
    pub(crate) fn assert_free(&mut self, key: &LockKey) {
        eventually("the lock is free", || self.holders(key) == 0);
    }
}

/// SQL: the number of permits in flight.
pub(crate) const IN_FLIGHT: &str = "(SELECT count(*) FROM resource_control.slot_in_flight)";

/// A database with the schema, installed without the crate.
pub(crate) fn installed() -> Database {
    let database = Database::new();
    install(&mut database.connect());
    database
}

/// Runs the files of the schema, as psql would.
pub(crate) fn install(conn: &mut PgConnection) {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
    let mut files: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .map(|path| path.join("up.sql"))
        .collect();
    files.sort();
    for file in files {
        run(conn, &std::fs::read_to_string(file).unwrap());
    }
}

/// Runs SQL, and panics if it fails.
#[track_caller]
pub(crate) fn run(conn: &mut PgConnection, sql: &str) {
    conn.batch_execute(sql).unwrap();
}

/// SQL that fails if the transaction has written something, or locked a row.
pub(crate) const HAS_WRITTEN_NOTHING: &str =
    "DO $$ BEGIN ASSERT pg_current_xact_id_if_assigned() IS NULL; END $$";

/// The value of an SQL expression: a number.
#[track_caller]
pub(crate) fn number(conn: &mut PgConnection, expression: &str) -> i64 {
    diesel::select(sql::<BigInt>(&format!("({expression})::bigint")))
        .get_result(conn)
        .unwrap()
}

/// The value of an SQL expression: true or false.
#[track_caller]
pub(crate) fn truth(conn: &mut PgConnection, expression: &str) -> bool {
    diesel::select(sql::<Bool>(&format!("({expression})")))
        .get_result(conn)
        .unwrap()
}

/// The value of an SQL expression, as text.
#[track_caller]
pub(crate) fn text(conn: &mut PgConnection, expression: &str) -> String {
    diesel::select(sql::<Text>(&format!("({expression})::text")))
        .get_result(conn)
        .unwrap()
}

pub(crate) fn backend_pid(conn: &mut PgConnection) -> i32 {
    diesel::select(sql::<Integer>("pg_backend_pid()"))
        .get_result(conn)
        .unwrap()
}

/// Takes the lock on another session, as a client in any other language would.
pub(crate) fn foreign_holder(database: &Database, key: &LockKey) -> PgConnection {
    let mut conn = database.connect();
    assert!(foreign_try(&mut conn, key), "the lock was taken");
    conn
}

/// `pg_try_advisory_lock`, as a client in any other language would send it.
pub(crate) fn foreign_try(conn: &mut PgConnection, key: &LockKey) -> bool {
    truth(
        conn,
        &format!("pg_try_advisory_lock({})", key.id().unwrap()),
    )
}

/// Asserts that the pool opens all its connections, and that none holds a lock or is in a
/// transaction.
#[track_caller]
pub(crate) fn assert_pool_whole(pool: &PgPool, database: &Database) {
    wait(on_all(pool, "SELECT 1")).unwrap();
    // A savepoint is an error only outside a transaction.
    assert!(wait(on_all(pool, "SAVEPOINT outside")).is_err());
    let mut observer = Observer::of(database);
    eventually("no connection holds a lock", || observer.all_held() == 0);
    eventually("no connection is in a transaction", || {
        observer.in_transaction() == 0
    });
}

/// Asserts that no session of the pool has prepared more statements than the crate has.
#[track_caller]
pub(crate) fn assert_few_are_prepared(pool: &PgPool) {
    let few = "DO $$ DECLARE of_all CONSTANT text[] := ARRAY(SELECT statement FROM pg_prepared_statements); \
               BEGIN ASSERT cardinality(of_all) < 60, array_to_string(of_all, E'\\n'); END $$";
    wait(on_all(pool, few)).unwrap();
}

/// Polls until the condition holds, for at most a minute.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A pool of one connection and a short timeout. The connection is open already, because opening it
/// may take longer.
pub(crate) fn impatient_pool(database: &Database, patience: Duration) -> PgPool {
    let pool = make_pool(&database.url(), 1, patience);
    let none = Semaphore::named("none", 1, Duration::from_secs(60));
    patiently(|| match wait(none.complete(&pool, 0)) {
        Err(error @ Error::Pool(_)) => Err(error),
        _ => Ok(()),
    });
    pool
}

/// Asserts a condition after a drop: at once in the blocking half, and soon in the other, where a
/// drop leaves work to a task.
#[track_caller]
pub(crate) fn assert_after_drop(what: &str, mut is_so: impl FnMut() -> bool) {
    if IS_ASYNC {
        eventually(what, is_so);
    } else {
        assert!(is_so(), "not at once: {what}");
    }
}
