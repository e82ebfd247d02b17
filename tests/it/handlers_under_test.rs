//! An application's handlers, tried inside a test transaction on a pool of one.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::r2d2::{Pool, TestCustomizer};
use diesel_interlock::{AdvisoryLock, Attempt, Error, PgPool, migrations};
use workbench::Database;

use crate::support::{Expect, Observer, backend_pid, foreign_session_holding, setting};

static LOCK: AdvisoryLock = AdvisoryLock::named("handler");

fn pool_of_one(database: &Database) -> PgPool {
    Pool::builder()
        .max_size(1)
        .connection_customizer(Box::new(TestCustomizer))
        .build(database.manager())
        .unwrap()
}

/// As it would be in an application: a session lock around work that has transactions of its own.
fn nightly(pool: &PgPool) -> Result<bool, Error> {
    let Attempt::Acquired(mut guard) = LOCK.try_acquire(pool)? else {
        return Ok(false);
    };
    guard.conn().transaction(|conn| {
        conn.batch_execute(
            "CREATE TABLE IF NOT EXISTS report (id int); INSERT INTO report VALUES (1)",
        )
    })?;
    guard.release()?;
    Ok(true)
}

fn book(conn: &mut PgConnection) -> QueryResult<()> {
    LOCK.transaction(conn, |conn| {
        conn.batch_execute("CREATE TABLE booking (id int)")
    })
}

#[test]
fn session_locks_work_inside_a_test_transaction() {
    let database = Database::new();
    let pool = pool_of_one(&database);
    let pid = backend_pid(&mut pool.get().unwrap());
    for _ in 0..3 {
        assert!(nightly(&pool).unwrap());
    }
    assert_eq!(
        backend_pid(&mut pool.get().unwrap()),
        pid,
        "nothing was discarded"
    );
    let mut observer = Observer::of(&database);
    assert_eq!(observer.all_held(), 0);

    let holder = foreign_session_holding(&database, LOCK.key().id().unwrap());
    assert!(!nightly(&pool).unwrap());
    drop(holder);
    observer.assert_free(LOCK.key());
    assert!(nightly(&pool).unwrap());
    assert_eq!(
        observer.in_transaction(),
        1,
        "the test transaction is still open"
    );
}

#[test]
fn a_timed_out_wait_does_not_abort_the_test() {
    let database = Database::new();
    let pool = pool_of_one(&database);
    let conn = &mut pool.get().unwrap();
    conn.batch_execute("CREATE TABLE t (id int); SET LOCAL lock_timeout = '3s'")
        .unwrap();
    let holder = foreign_session_holding(&database, LOCK.key().id().unwrap());
    let timeout = Duration::from_millis(20);
    assert!(LOCK.acquire_timeout_on(conn, timeout).unwrap().is_busy());
    assert!(
        LOCK.transaction_timeout(conn, timeout, |_| Ok::<_, Error>(()))
            .unwrap()
            .is_busy()
    );
    conn.batch_execute("INSERT INTO t VALUES (1)").unwrap();
    assert_eq!(setting(conn, "lock_timeout"), "3s");

    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire_on(conn).unwrap().release().unwrap());
        while observer.waiters(LOCK.key()) == 0 {}
        drop(holder);
        waiter.join().unwrap();
    });
    assert_eq!(setting(conn, "lock_timeout"), "3s");
    assert_eq!(setting(conn, "statement_timeout"), "0");
    conn.batch_execute("INSERT INTO t VALUES (2)").unwrap();
}

#[test]
fn lock_transaction_is_a_savepoint_there() {
    let database = Database::new();
    let pool = pool_of_one(&database);
    let conn = &mut pool.get().unwrap();
    book(conn).unwrap();
    book(conn).unwrap_err(); // the table exists: only the savepoint is rolled back
    conn.batch_execute("INSERT INTO booking VALUES (1)")
        .unwrap();
    let tried = LOCK.try_transaction(conn, |_| Ok::<_, Error>(7)).unwrap();
    assert_eq!(tried, Attempt::Acquired(7));
    assert_eq!(Observer::of(&database).in_transaction(), 1);
}

#[test]
fn what_would_be_refused_in_production_is_refused_there_too() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    conn.transaction(|conn| {
        assert!(matches!(LOCK.acquire_on(conn), Err(Error::InTransaction)));
        let nested = LOCK.transaction(conn, |_| Ok::<_, Error>(()));
        assert!(matches!(nested, Err(Error::AlreadyInTransaction)));
        LOCK.acquire_xact(conn)
    })
    .unwrap();
}

#[test]
fn migrations_are_refused_there() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    let source = crate::migrations::directory("refused", &[]);
    let refused = migrations::run_pending(&mut conn, source.migrations());
    assert!(
        matches!(refused, Err(Error::CommitsInTransaction)),
        "{refused:?}"
    );
}

#[test]
fn a_lost_lock_is_noticed_there_too() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    let mut guard = LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired();
    guard
        .conn()
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    assert!(matches!(guard.release(), Err(Error::LockLost { .. })));
    conn.batch_execute("SELECT 1").unwrap();
}
