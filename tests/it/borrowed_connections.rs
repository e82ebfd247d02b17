//! Guards on a connection that the caller lends, which cannot be discarded.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use diesel::connection::{SimpleConnection, TransactionManager};

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, AnsiTransactionManager, Cluster, Database, Error, IS_ASYNCHRONOUS,
    error::Misplaced, is_broken, roll_back,
};
use crate::support::{
    Expect, Observer, assert_matches, backend_pid, eventually, foreign_holder,
    panic_after_every_statement, panic_after_the_next_statement, panic_before_the_next_statement,
    setting,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("borrowed");

fn fail(conn: &mut PgConnection) {
    conn.batch_execute("SELECT 1/0").unwrap_err();
}

#[test]
fn releasing_gives_the_same_session_back() {
    let database = Database::new();
    let mut conn = database.connect();
    let pid = backend_pid(&mut conn);
    let guard = LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired();
    assert_eq!(guard.backend_pid(), pid);
    guard.release().unwrap();
    assert_eq!(backend_pid(&mut conn), pid);
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn dropping_in_an_aborted_raw_transaction_frees_the_lock_on_a_usable_connection() {
    let database = Database::new();
    let mut conn = database.connect();
    let pid = backend_pid(&mut conn);
    {
        let mut guard = LOCK.acquire_on(&mut conn).unwrap();
        guard.conn().batch_execute("BEGIN").unwrap();
        fail(guard.conn());
    }
    if IS_ASYNCHRONOUS {
        // The queued unlock fails, and nobody reads the reply.
        conn.batch_execute("ROLLBACK; SELECT pg_advisory_unlock_all()")
            .unwrap();
    }
    assert_eq!(Observer::of(&database).all_held(), 0);
    assert_eq!(backend_pid(&mut conn), pid);
    conn.transaction(|_| QueryResult::Ok(())).unwrap();
}

#[test]
fn a_repaired_unlock_gives_back_idle_session_timeout() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("SET lock_timeout = 0").unwrap();
    if conn
        .batch_execute("SET idle_session_timeout = '60s'")
        .is_err()
    {
        return; // before PostgreSQL 14
    }
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    guard.conn().batch_execute("BEGIN").unwrap();
    fail(guard.conn());
    assert_matches!(guard.release(), Err(Error::TransactionLeftOpen { .. }));
    assert_eq!(setting(&mut conn, "idle_session_timeout"), "1min");
}

#[test]
fn a_raw_transaction_left_open_is_reported_and_left_to_the_caller() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("CREATE TABLE t (id int)").unwrap();
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    guard
        .conn()
        .batch_execute("BEGIN; INSERT INTO t VALUES (1)")
        .unwrap();
    assert_matches!(guard.release(), Err(Error::TransactionLeftOpen { .. }));
    assert_eq!(Observer::of(&database).all_held(), 0);
    conn.batch_execute("COMMIT").unwrap();
    conn.transaction(|conn| conn.batch_execute("INSERT INTO t VALUES (2)"))
        .unwrap();
}

#[test]
fn a_callers_aborted_transaction_is_never_rolled_back_behind_its_back() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("CREATE TABLE t (id int)").unwrap();
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    AnsiTransactionManager::begin_transaction(guard.conn()).unwrap();
    guard
        .conn()
        .batch_execute("SAVEPOINT s; INSERT INTO t VALUES (1)")
        .unwrap();
    fail(guard.conn());
    let released = guard.release();
    assert_matches!(released, Err(Error::ReleaseFailed { .. }));
    // The transaction is still open and aborted, because only the caller ends it. What was queued last may still run.
    let mut observer = Observer::of(&database);
    eventually("it is idle in its transaction", || {
        observer.in_transaction() == 1
    });
    conn.batch_execute("ROLLBACK TO SAVEPOINT s; COMMIT")
        .unwrap();
}

#[test]
fn releasing_in_the_callers_open_transaction_is_reported() {
    let database = Database::new();
    let mut conn = database.connect();
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    AnsiTransactionManager::begin_transaction(guard.conn()).unwrap();
    assert_matches!(guard.release(), Err(Error::TransactionLeftOpen { .. }));
    assert_eq!(Observer::of(&database).all_held(), 0);
    AnsiTransactionManager::commit_transaction(&mut conn).unwrap();
}

#[test]
fn a_killed_backend_is_an_error_and_marks_the_connection() {
    let database = Database::new();
    let mut conn = database.connect();
    let guard = LOCK.acquire_on(&mut conn).unwrap();
    Observer::of(&database).kill(guard.backend_pid());
    assert_matches!(guard.release(), Err(Error::LockLost { .. }));
    assert!(AnsiTransactionManager::is_broken_transaction_manager(
        &mut conn
    ));
    let refused = LOCK.try_acquire_on(&mut conn);
    assert_matches!(refused, Err(Error::Database(_)));
}

#[test]
fn inside_an_open_transaction_a_session_lock_is_refused() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.transaction(|conn| {
        assert_matches!(
            LOCK.try_acquire_on(conn),
            Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
        );
        assert_matches!(
            LOCK.acquire_on(conn),
            Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
        );
        conn.transaction(|conn| {
            assert_matches!(
                LOCK.acquire_on(conn),
                Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
            );
            QueryResult::Ok(())
        })
    })
    .unwrap();
    conn.build_transaction()
        .serializable()
        .run(|conn| {
            assert_matches!(
                LOCK.acquire_on(conn),
                Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
            );
            QueryResult::Ok(())
        })
        .unwrap();
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn inside_a_raw_transaction_it_is_refused_and_the_transaction_goes_on() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("BEGIN; CREATE TABLE t (id int)")
        .unwrap();
    assert_matches!(
        LOCK.try_acquire_on(&mut conn),
        Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
    );
    let holder = foreign_holder(&database, &LOCK);
    assert_matches!(
        LOCK.acquire_on(&mut conn),
        Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
    );
    drop(holder);
    conn.batch_execute("INSERT INTO t VALUES (1); COMMIT")
        .unwrap();
    Observer::of(&database).assert_free(LOCK.key());
    LOCK.acquire_on(&mut conn).unwrap().release().unwrap();
}

#[test]
fn a_failed_attempt_leaves_a_live_connection_usable_and_holding_nothing() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("BEGIN").unwrap();
    fail(&mut conn);
    let failed = LOCK.try_acquire_on(&mut conn).map(drop);
    assert_matches!(failed, Err(Error::Database(_)));
    conn.batch_execute("ROLLBACK").unwrap();
    let guard = LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired();
    guard.release().unwrap();
}

#[test]
fn a_failed_attempt_leaves_an_aborted_transaction_to_its_savepoint() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("BEGIN; SAVEPOINT mine").unwrap();
    fail(&mut conn);
    let failed = LOCK.try_acquire_on(&mut conn).map(drop);
    assert_matches!(failed, Err(Error::Database(_)));
    conn.batch_execute("ROLLBACK TO SAVEPOINT mine; COMMIT")
        .unwrap();
    LOCK.acquire_on(&mut conn).unwrap().release().unwrap();
}

/// A try that is cancelled at its end has taken the lock, and PostgreSQL only aborts the transaction.
#[test]
fn a_try_that_is_cancelled_in_a_raw_transaction_holds_nothing() {
    const TURNS: u64 = 2000;
    // About one in a hundred is cancelled when it has taken the lock.
    let enough = if IS_ASYNCHRONOUS { 50 } else { 150 };
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut canceller = database.connect();
    let mut conn = database.connect();
    let mut cancelled = 0;
    for turn in 0..TURNS {
        eventually("there is a session", || {
            conn.batch_execute("ROLLBACK; BEGIN; SELECT 1").is_ok() || {
                conn = database.connect();
                false
            }
        });
        let pid = backend_pid(&mut conn);
        let begin = Barrier::new(2);
        let tried = std::thread::scope(|scope| {
            scope.spawn(|| {
                begin.wait();
                let (began, pause) = (Instant::now(), Duration::from_micros(turn * 7 % 100));
                while began.elapsed() < pause {}
                canceller
                    .batch_execute(&format!("SELECT pg_cancel_backend({pid})"))
                    .unwrap();
            });
            begin.wait();
            LOCK.try_acquire_on(&mut conn).map(drop)
        });
        match tried {
            Err(Error::Database(_)) => cancelled += 1,
            tried => assert_matches!(
                tried,
                Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
            ),
        }
        eventually("nobody holds it", || observer.holders(LOCK.key()) == 0);
        if cancelled == enough {
            break;
        }
    }
    assert!(cancelled > 0);
}

/// A wait that is cancelled may be granted the lock at the same moment.
#[test]
fn a_cancelled_wait_holds_nothing_and_keeps_the_session() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let _holder = foreign_holder(&database, &LOCK);
    let mut conn = database.connect();
    let pid = backend_pid(&mut conn);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire_on(&mut conn).map(drop));
        while observer.waiters(LOCK.key()) == 0 {}
        observer
            .conn()
            .batch_execute(&format!("SELECT pg_cancel_backend({pid})"))
            .unwrap();
        let cancelled = waiter.join().unwrap();
        assert_matches!(cancelled, Err(Error::Database(_)));
    });
    assert_eq!(observer.holders(LOCK.key()), 1);
    assert!(!AnsiTransactionManager::is_broken_transaction_manager(
        &mut conn
    ));
    assert_eq!(backend_pid(&mut conn), pid);
    conn.transaction(|_| QueryResult::Ok(())).unwrap();
}

/// The lock was granted, and no guard exists that would release it.
#[test]
fn a_panic_between_the_grant_and_the_guard_leaves_nothing_held() {
    panic_between_the_grant_and_the_guard(|_| {});
}

/// As outside of a transaction.
#[test]
fn a_panic_between_the_grant_and_the_guard_leaves_nothing_held_in_a_raw_transaction_either() {
    panic_between_the_grant_and_the_guard(|conn| conn.batch_execute("BEGIN").unwrap());
}

/// Asserts that the lock is free. The blocking half ends the session, and the asynchronous one queues the unlock.
fn panic_between_the_grant_and_the_guard(prepare: impl FnOnce(&mut PgConnection)) {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut conn = database.connect();
    let pid = backend_pid(&mut conn);
    prepare(&mut conn);
    panic_after_the_next_statement(&mut conn);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        LOCK.try_acquire_on(&mut conn).map(drop)
    }));
    assert!(caught.is_err());
    observer.assert_free(LOCK.key());
    assert_eq!(observer.is_alive(pid), IS_ASYNCHRONOUS);
}

/// The prepared statements were deallocated, and the lock is held. It must not stay held.
#[test]
fn a_release_whose_prepared_statement_is_gone_leaves_nothing_held() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut conn = database.connect();
    LOCK.acquire_on(&mut conn).unwrap().release().unwrap(); // prepares
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    guard.conn().batch_execute("DEALLOCATE ALL").unwrap();
    // The asynchronous half knows that the unlock did not run, and sends it again.
    if let Err(error) = guard.release() {
        assert_matches!(error, Error::ReleaseFailed { .. });
    }
    observer.assert_free(LOCK.key());
}

/// A connection that failed once and was repaired is as usable as any other.
#[test]
fn a_connection_that_the_caller_repaired_is_as_good_as_any() {
    let database = Database::new();
    let mut conn = database.connect();
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    AnsiTransactionManager::begin_transaction(guard.conn()).unwrap();
    fail(guard.conn());
    assert_matches!(guard.release(), Err(Error::ReleaseFailed { .. }));
    assert!(is_broken(&mut conn));
    if IS_ASYNCHRONOUS {
        return; // diesel-async has no way to repair it
    }
    roll_back(&mut conn);
    conn.batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    for _ in 0..2 {
        LOCK.acquire_on(&mut conn).unwrap().release().unwrap();
        conn.transaction(|_| QueryResult::Ok(())).unwrap();
    }
}

#[test]
fn an_attempt_in_an_aborted_test_transaction_does_not_poison_the_test() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    conn.batch_execute("SAVEPOINT s").unwrap();
    fail(&mut conn);
    assert!(LOCK.try_acquire_on(&mut conn).map(drop).is_err());
    conn.batch_execute("ROLLBACK TO SAVEPOINT s").unwrap();
    conn.transaction(|_| QueryResult::Ok(())).unwrap();
    LOCK.acquire_on(&mut conn).unwrap().release().unwrap();
}

/// A role that may not end its own session: its locks are released nevertheless.
#[test]
fn a_doubtful_grant_is_undone_where_the_session_cannot_be_ended() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let mut observer = Observer::of(&database);
    let mut conn = database.connect();
    conn.batch_execute("CREATE ROLE limited; SET ROLE limited")
        .unwrap();
    panic_after_the_next_statement(&mut conn);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        LOCK.try_acquire_on(&mut conn).map(drop)
    }));
    assert!(caught.is_err());
    observer.assert_free(LOCK.key());
}

/// Instrumentation that panics at every statement, while another panic unwinds.
#[test]
fn a_doubtful_grant_under_a_panicking_instrumentation_does_not_abort_the_process() {
    let database = Database::new();
    let mut conn = database.connect();
    panic_after_every_statement(&mut conn);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        LOCK.try_acquire_on(&mut conn).map(drop)
    }));
    assert!(caught.is_err());
    drop(conn);
    Observer::of(&database).assert_free(LOCK.key());
}

#[test]
fn a_panic_before_the_unlock_leaves_nothing_held() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut conn = database.connect();
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    panic_before_the_next_statement(guard.conn());
    drop(guard);
    observer.assert_free(LOCK.key());
}
