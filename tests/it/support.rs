//! What the tests share: an observing session, pools, and helpers that wait or fail.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use diesel::connection::{InstrumentationEvent, SimpleConnection};
use diesel::dsl::sql;
use diesel::sql_types::{BigInt, Bool, Integer, Text};

use crate::half::prelude::*;
use crate::half::{
    Admission, AdvisoryLock, Attempt, Database, Decision, DeclaredResources, IS_ASYNCHRONOUS,
    LockId, LockKey, PgPool, RoundTrips, Throttle, ThrottledResource,
};

/// Asserts that a value matches a pattern, and shows the value if it does not.
macro_rules! assert_matches {
    ($value:expr, $pattern:pat $(if $guard:expr)?) => {
        match &$value {
            $pattern $(if $guard)? => {}
            other => panic!("{other:?} is not {}", stringify!($pattern)),
        }
    };
}
pub(crate) use assert_matches;

/// A session that only looks.
pub(crate) struct Observer(PgConnection);

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

#[derive(QueryableByName)]
struct Pid {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

#[derive(QueryableByName)]
struct Value {
    #[diesel(sql_type = Text)]
    value: String,
}

/// A database with the schema and the declared resources.
pub(crate) fn database_with<R: DeclaredResources>() -> Database {
    let database = Database::new();
    let conn = &mut database.connect();
    crate::half::migrations::install(conn).unwrap();
    let _ = crate::half::sync::<R>(conn).unwrap();
    database
}

impl Observer {
    pub(crate) fn of(database: &Database) -> Self {
        Self(database.connect())
    }

    pub(crate) fn conn(&mut self) -> &mut PgConnection {
        &mut self.0
    }

    fn count(&mut self, from_where: &str) -> i64 {
        diesel::sql_query(format!("SELECT count(*) AS count FROM {from_where}"))
            .get_result::<Count>(&mut self.0)
            .unwrap()
            .count
    }

    fn rows_of(key: &LockKey) -> String {
        let (classid, objid, objsubid) = match key.id().unwrap() {
            LockId::BigInt(number) => ((number >> 32) as u32, number as u32, 1),
            LockId::Pair(first, second) => (first as u32, second as u32, 2),
        };
        format!(
            "pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database \
             WHERE datname = current_database()) AND classid = {classid} AND objid = {objid} \
             AND objsubid = {objsubid}"
        )
    }

    /// How many sessions hold the lock, in any mode.
    pub(crate) fn holders(&mut self, key: &LockKey) -> i64 {
        self.count(&format!("{} AND granted", Self::rows_of(key)))
    }

    /// How many sessions wait for the lock.
    pub(crate) fn waiters(&mut self, key: &LockKey) -> i64 {
        self.count(&format!("{} AND NOT granted", Self::rows_of(key)))
    }

    /// How many sessions wait for a lock on a table of the database.
    pub(crate) fn waiters_for_tables(&mut self) -> i64 {
        self.count(
            "pg_locks WHERE locktype = 'relation' AND NOT granted AND database = \
             (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
    }

    /// How many sessions of the database wait for a lock of any kind.
    pub(crate) fn all_waiting(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
        )
    }

    /// How many advisory locks are held in the database, with any key.
    pub(crate) fn all_held(&mut self) -> i64 {
        self.count(
            "pg_locks WHERE locktype = 'advisory' AND granted AND database = \
             (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
    }

    /// The other sessions of the database.
    pub(crate) fn sessions(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND backend_type = 'client backend'",
        )
    }

    /// The other sessions of the database that are inside a transaction.
    pub(crate) fn in_transaction(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND state LIKE 'idle in transaction%'",
        )
    }

    pub(crate) fn is_alive(&mut self, pid: i32) -> bool {
        self.count(&format!("pg_stat_activity WHERE pid = {pid}")) == 1
    }

    /// Waits until a session has ended.
    #[track_caller]
    pub(crate) fn assert_ended(&mut self, pid: i32) {
        eventually("the session has ended", || !self.is_alive(pid));
    }

    /// Ends a session, and waits until it has gone.
    pub(crate) fn kill(&mut self, pid: i32) {
        self.0
            .batch_execute(&format!("SELECT pg_terminate_backend({pid})"))
            .unwrap();
        self.assert_ended(pid);
    }

    /// Ends the sessions that wait for an advisory lock of this database.
    pub(crate) fn kill_waiters(&mut self) {
        self.0
            .batch_execute(
                "SELECT pg_terminate_backend(pid) FROM pg_locks \
                 WHERE locktype = 'advisory' AND NOT granted AND database = \
                 (SELECT oid FROM pg_database WHERE datname = current_database())",
            )
            .unwrap();
    }

    /// The lock is free: at once where it was unlocked, or within moments where its session ends.
    #[track_caller]
    pub(crate) fn assert_free(&mut self, key: &LockKey) {
        eventually("the lock is free", || self.holders(key) == 0);
    }
}

/// Takes the lock on a session of its own, as a client in any other language would.
pub(crate) fn foreign_session_holding(database: &Database, id: LockId) -> PgConnection {
    let mut conn = database.connect();
    assert!(foreign_try(&mut conn, id), "the lock was taken");
    conn
}

/// As [`foreign_session_holding`], for the lock of a handle.
pub(crate) fn foreign_holder(database: &Database, lock: &AdvisoryLock) -> PgConnection {
    foreign_session_holding(database, lock.key().id().unwrap())
}

/// `pg_try_advisory_lock`, as a client in any other language would send it.
pub(crate) fn foreign_try(conn: &mut PgConnection, id: LockId) -> bool {
    #[derive(QueryableByName)]
    struct Tried {
        #[diesel(sql_type = Bool)]
        granted: bool,
    }
    diesel::sql_query(format!("SELECT pg_try_advisory_lock({id}) AS granted"))
        .get_result::<Tried>(conn)
        .unwrap()
        .granted
}

/// Attempts the throttle with these details.
#[track_caller]
pub(crate) fn attempt<R: Clone + Sync + ThrottledResource>(
    conn: &mut PgConnection,
    throttle: &Throttle<R>,
    details: impl Into<Cow<'static, str>>,
) -> Decision {
    let throttle = throttle.details(details);
    throttle.attempt_on(conn).unwrap()
}

/// As [`attempt`], and returns whether it was granted.
#[track_caller]
pub(crate) fn is_granted<R: Clone + Sync + ThrottledResource>(
    conn: &mut PgConnection,
    throttle: &Throttle<R>,
    details: &'static str,
) -> bool {
    attempt(conn, throttle, details).granted().is_some()
}

/// The value of an SQL expression: a number.
pub(crate) fn number(conn: &mut PgConnection, expression: &str) -> i64 {
    diesel::select(sql::<BigInt>(&format!("({expression})::bigint")))
        .get_result(conn)
        .unwrap()
}

/// The value of an SQL expression: true or false.
pub(crate) fn truth(conn: &mut PgConnection, expression: &str) -> bool {
    diesel::select(sql::<Bool>(&format!("({expression})")))
        .get_result(conn)
        .unwrap()
}

pub(crate) fn backend_pid(conn: &mut PgConnection) -> i32 {
    diesel::sql_query("SELECT pg_backend_pid() AS pid")
        .get_result::<Pid>(conn)
        .unwrap()
        .pid
}

pub(crate) fn setting(conn: &mut PgConnection, name: &str) -> String {
    diesel::sql_query(format!("SELECT current_setting('{name}') AS value"))
        .get_result::<Value>(conn)
        .unwrap()
        .value
}

/// The pool gives out as many connections as it should; none of them holds a lock or is in a
/// transaction.
#[track_caller]
pub(crate) fn assert_pool_whole(pool: &PgPool, database: &Database) {
    let mut conns: Vec<_> = (0..pool.max_size()).map(|_| pool.get().unwrap()).collect();
    for conn in &mut conns {
        let conn: &mut PgConnection = conn;
        // Outside a transaction, a savepoint is an error.
        assert!(conn.batch_execute("SAVEPOINT outside").is_err());
        diesel::sql_query("SELECT 1").execute(conn).unwrap();
    }
    let mut observer = Observer::of(database);
    eventually("no connection holds a lock", || observer.all_held() == 0);
    eventually("no connection is in a transaction", || {
        observer.in_transaction() == 0
    });
}

/// Makes the connection's instrumentation panic once, as the next statement has finished.
pub(crate) fn panic_after_the_next_statement(conn: &mut PgConnection) {
    let mut panicked = false;
    conn.set_instrumentation(move |event: InstrumentationEvent<'_>| {
        let finished = matches!(event, InstrumentationEvent::FinishQuery { .. });
        if finished && !std::mem::replace(&mut panicked, true) {
            panic!("in the instrumentation");
        }
    });
}

/// Makes the connection's instrumentation panic once, before the next statement is sent.
pub(crate) fn panic_before_the_next_statement(conn: &mut PgConnection) {
    let mut panicked = false;
    conn.set_instrumentation(move |event: InstrumentationEvent<'_>| {
        let starts = matches!(event, InstrumentationEvent::StartQuery { .. });
        if starts && !std::mem::replace(&mut panicked, true) {
            panic!("in the instrumentation");
        }
    });
}

/// Makes the connection's instrumentation panic as each statement has finished.
pub(crate) fn panic_after_every_statement(conn: &mut PgConnection) {
    conn.set_instrumentation(|event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::FinishQuery { .. } = event {
            panic!("in the instrumentation");
        }
    });
}

/// Looks until it is so, for a minute.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not within a minute: {what}");
        std::thread::yield_now();
    }
}

/// Asserts a state after a drop: at once, or soon where a drop only orders the work.
#[track_caller]
pub(crate) fn assert_after_drop(what: &str, mut is_so: impl FnMut() -> bool) {
    if IS_ASYNCHRONOUS {
        eventually(what, is_so);
    } else {
        assert!(is_so(), "not at once: {what}");
    }
}

/// How many round trips the work takes. The asynchronous half prepares some statements in it that the blocking half prepared
/// before, so the work is repeated there.
pub(crate) fn round_trips_of(proxy: &RoundTrips, mut work: impl FnMut()) -> u64 {
    let repetitions = if IS_ASYNCHRONOUS { 12 } else { 1 };
    let counts = (0..repetitions).map(|_| proxy.count(&mut work));
    counts.min().unwrap()
}

/// What was acquired; a lock that is taken fails the test.
pub(crate) trait Expect<G> {
    fn expect_acquired(self) -> G;
}

impl<G> Expect<G> for Attempt<G> {
    #[track_caller]
    fn expect_acquired(self) -> G {
        self.acquired().expect("another session has the lock")
    }
}

impl<P> Expect<P> for Admission<P> {
    #[track_caller]
    fn expect_acquired(self) -> P {
        self.admitted().expect("every slot is taken")
    }
}
