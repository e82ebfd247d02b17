//! Every way in which a guard can end frees the lock and leaves the pool complete.

use std::panic::{AssertUnwindSafe, catch_unwind};

use diesel::connection::{SimpleConnection, TransactionManager};

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, AnsiTransactionManager, Cluster, Database, Error, IS_ASYNCHRONOUS, PgPool,
    PooledGuard, StopMode,
};
use crate::support::{
    Observer, assert_after_drop, assert_matches, assert_pool_whole, eventually,
    panic_after_every_statement,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("ways out");

/// Takes the lock, and lets `release` end the guard, which must report an error.
fn leave(release: impl Fn(PooledGuard) -> Result<(), Error>, expected: impl Fn(&Error) -> bool) {
    leave_by(|guard, _| match release(guard) {
        Err(error) if expected(&error) => {}
        other => panic!("{other:?}"),
    });
}

fn leave_by(way: impl FnOnce(PooledGuard, &mut Observer)) {
    let database = Database::new();
    leave_on(&database, way);
}

fn leave_on(database: &Database, way: impl FnOnce(PooledGuard, &mut Observer)) {
    let pool = database.pool(2);
    let mut observer = Observer::of(database);
    let guard = LOCK.try_acquire(&pool).unwrap().acquired().unwrap();
    assert_eq!(observer.holders(LOCK.key()), 1);
    way(guard, &mut observer);
    observer.assert_free(LOCK.key());
    assert_pool_whole(&pool, database);
}

fn fail(conn: &mut PgConnection) {
    diesel::sql_query("SELECT 1/0").execute(conn).unwrap_err();
}

fn begin(conn: &mut PgConnection) {
    AnsiTransactionManager::begin_transaction(conn).unwrap();
}

#[test]
fn releasing_frees_the_lock_and_keeps_the_session() {
    leave_by(|guard, observer| {
        let pid = guard.backend_pid();
        guard.release().unwrap();
        assert_eq!(observer.holders(LOCK.key()), 0, "at once");
        assert!(observer.is_alive(pid));
    });
}

#[test]
fn dropping_frees_the_lock_and_keeps_the_session() {
    leave_by(|guard, observer| {
        let pid = guard.backend_pid();
        drop(guard);
        assert_after_drop("the lock is free", || observer.holders(LOCK.key()) == 0);
        // The asynchronous half gives up a session that does not reply within 20 milliseconds.
        assert!(observer.is_alive(pid) || IS_ASYNCHRONOUS);
    });
}

#[test]
fn a_panic_frees_the_lock() {
    leave_by(|guard, observer| {
        let caught = catch_unwind(AssertUnwindSafe(move || {
            let _guard = guard;
            panic!("in the protected work");
        }));
        assert!(caught.is_err());
        assert_after_drop("the lock is free", || observer.holders(LOCK.key()) == 0);
    });
}

#[test]
fn a_panic_inside_a_transaction_closure_frees_the_lock() {
    leave_by(|mut guard, _| {
        let caught = catch_unwind(AssertUnwindSafe(move || {
            guard.conn().transaction(|_| -> QueryResult<()> {
                panic!("in a transaction");
            })
        }));
        assert!(caught.is_err());
    });
}

#[test]
fn a_panic_in_an_aborted_transaction_frees_the_lock() {
    leave_by(|mut guard, _| {
        let caught = catch_unwind(AssertUnwindSafe(move || {
            guard.conn().transaction(|conn| -> QueryResult<()> {
                fail(conn);
                panic!("in an aborted transaction");
            })
        }));
        assert!(caught.is_err());
    });
}

#[test]
fn failed_transaction_closures_are_no_reason_to_give_the_session_up() {
    leave_by(|mut guard, observer| {
        let pid = guard.backend_pid();
        let failed = guard.conn().transaction(|conn| {
            conn.transaction(|conn| diesel::sql_query("SELECT 1/0").execute(conn))
        });
        assert!(failed.is_err());
        guard.release().unwrap();
        assert!(observer.is_alive(pid));
    });
}

#[test]
fn dropping_the_guard_inside_an_aborted_transaction_frees_the_lock() {
    leave_by(|mut guard, _| {
        begin(guard.conn());
        fail(guard.conn());
    });
}

#[test]
fn releasing_inside_an_aborted_transaction_reports_it() {
    leave(
        |mut guard| {
            begin(guard.conn());
            begin(guard.conn());
            fail(guard.conn());
            guard.release()
        },
        |error| matches!(error, Error::ReleaseFailed { .. }),
    );
}

#[test]
fn dropping_the_guard_inside_an_open_transaction_frees_the_lock() {
    leave_by(|mut guard, _| begin(guard.conn()));
}

#[test]
fn releasing_inside_an_open_transaction_reports_it() {
    leave(
        |mut guard| {
            begin(guard.conn());
            guard.release()
        },
        |error| matches!(error, Error::TransactionLeftOpen { .. }),
    );
}

#[test]
fn a_raw_begin_left_open_does_not_reach_the_next_user_of_the_pool() {
    leave_by(|mut guard, _| guard.conn().batch_execute("BEGIN").unwrap());
}

#[test]
fn a_raw_begin_with_work_left_open_is_reported() {
    leave(
        |mut guard| {
            guard
                .conn()
                .batch_execute("BEGIN; CREATE TABLE t (id int)")
                .unwrap();
            diesel::sql_query("INSERT INTO t VALUES (1)")
                .execute(guard.conn())
                .unwrap();
            guard.release()
        },
        |error| matches!(error, Error::TransactionLeftOpen { .. }),
    );
}

#[test]
fn a_raw_begin_that_was_committed_is_nothing_special() {
    leave_by(|mut guard, observer| {
        let pid = guard.backend_pid();
        guard.conn().batch_execute("BEGIN").unwrap();
        guard.conn().batch_execute("COMMIT").unwrap();
        guard.release().unwrap();
        assert!(observer.is_alive(pid));
    });
}

#[test]
fn a_raw_begin_with_an_error_frees_the_lock() {
    leave(
        |mut guard| {
            guard.conn().batch_execute("BEGIN").unwrap();
            fail(guard.conn());
            guard.release()
        },
        |error| matches!(error, Error::ReleaseFailed { .. }),
    );
    leave_by(|mut guard, _| {
        guard.conn().batch_execute("BEGIN").unwrap();
        fail(guard.conn());
    });
}

#[test]
fn a_killed_backend_is_reported_and_replaced() {
    leave_by(|guard, observer| {
        observer.kill(guard.backend_pid());
        let released = guard.release();
        assert_matches!(released, Err(Error::LockLost { .. }));
    });
    leave_by(|guard, observer| observer.kill(guard.backend_pid()));
}

#[test]
fn a_lock_that_other_code_unlocked_is_reported_and_its_session_discarded() {
    leave_by(|mut guard, observer| {
        let pid = guard.backend_pid();
        guard
            .conn()
            .batch_execute("SELECT pg_advisory_unlock_all()")
            .unwrap();
        let released = guard.release();
        assert_matches!(released, Err(Error::LockLost { .. }));
        observer.assert_ended(pid);
    });
}

#[test]
fn the_observer_sees_a_lock_that_stays_behind_in_the_pool() {
    // Taken by plain SQL, which the caller must undo. This shows that the other tests could fail.
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = LOCK.acquire(&pool).unwrap();
    let by_hand = format!("SELECT pg_advisory_lock({})", LOCK.key().id().unwrap());
    guard.conn().batch_execute(&by_hand).unwrap();
    guard.release().unwrap();
    assert_eq!(Observer::of(&database).holders(LOCK.key()), 1);
}

#[test]
fn a_restarted_server_finds_nothing_held_and_the_pool_recovers() {
    let cluster = Cluster::start();
    for mode in [StopMode::Immediate, StopMode::Fast] {
        let database = cluster.database();
        let pool = database.pool(2);
        let dropped = LOCK.try_acquire(&pool).unwrap().acquired().unwrap();
        let other = AdvisoryLock::named("released");
        let released = other.try_acquire(&pool).unwrap().acquired().unwrap();
        cluster.restart(mode);
        assert!(released.release().is_err());
        drop(dropped);
        Observer::of(&database).assert_free(LOCK.key());
        wait_for_pool(&pool);
        assert_pool_whole(&pool, &database);
        LOCK.acquire(&pool).unwrap().release().unwrap();
    }
}

/// r2d2 detects dead connections at their check-out.
fn wait_for_pool(pool: &PgPool) {
    eventually("the pool has a connection", || pool.get().is_ok());
}

#[test]
fn a_panicking_instrumentation_cannot_abort_the_process_nor_keep_the_lock() {
    leave_by(|mut guard, _| {
        panic_after_every_statement(guard.conn());
        let caught = catch_unwind(AssertUnwindSafe(move || {
            let _guard = guard;
            panic!("in the protected work");
        }));
        assert!(caught.is_err());
    });
}
