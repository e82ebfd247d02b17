//! Which connections go back to the pool, and which are discarded.

use std::time::Duration;

use diesel::connection::{SimpleConnection, TransactionManager};

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, AnsiTransactionManager, COMPARES_SESSIONS, Database, Error, PgPool, SMALL_STACK,
    Sessions, pool_that_runs, pool_with_patience, probe_sessions,
};
use crate::support::{
    Expect, Observer, assert_matches, assert_pool_whole, backend_pid, foreign_holder, number,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("pooled");

/// Article 003: the unlock must run on the connection that took the lock.
#[test]
fn the_lock_is_released_on_the_connection_that_took_it_though_others_are_in_use() {
    let database = Database::new();
    let pool = database.pool(5);
    let mut observer = Observer::of(&database);
    for _ in 0..20 {
        let guard = LOCK.acquire(&pool).unwrap();
        let pid = guard.backend_pid();
        let mut others: Vec<_> = (0..4).map(|_| pool.get().unwrap()).collect();
        assert!(others.iter_mut().all(|conn| backend_pid(conn) != pid));
        drop(others);
        guard.release().unwrap();
        assert_eq!(observer.holders(LOCK.key()), 0);
    }
    assert!(observer.sessions() <= 5);
}

#[test]
fn a_busy_lock_gives_the_connection_back() {
    let database = Database::new();
    let pool = database.pool(1);
    let _holder = foreign_holder(&database, &LOCK);
    let pid = backend_pid(&mut pool.get().unwrap());
    for _ in 0..3 {
        assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    }
    assert_eq!(backend_pid(&mut pool.get().unwrap()), pid);
}

#[test]
fn a_killed_waiter_is_an_error_and_leaves_the_pool_whole() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut observer = Observer::of(&database);
    let holder = foreign_holder(&database, &LOCK);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire(&pool).map(drop));
        while observer.waiters(LOCK.key()) == 0 {}
        observer.kill_waiters();
        let killed = waiter.join().unwrap();
        assert_matches!(killed, Err(Error::Database(_)));
    });
    drop(holder);
    observer.assert_free(LOCK.key());
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_cancelled_waiter_gives_its_session_up() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);
    let holder = foreign_holder(&database, &LOCK);
    let pid = backend_pid(&mut pool.get().unwrap());
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire(&pool).map(drop));
        while observer.waiters(LOCK.key()) == 0 {}
        observer
            .conn()
            .batch_execute(&format!("SELECT pg_cancel_backend({pid})"))
            .unwrap();
        waiter.join().unwrap().unwrap_err();
    });
    observer.assert_ended(pid);
    drop(holder);
    observer.assert_free(LOCK.key());
    assert_pool_whole(&pool, &database);
}

#[test]
fn an_exhausted_pool_is_an_error() {
    let database = Database::new();
    let pool = pool_with_patience(&database, 1, Duration::from_millis(50));
    let _all = pool.get_timeout(Duration::from_secs(10)).unwrap();
    assert_matches!(LOCK.try_acquire(&pool), Err(Error::Pool(_)));
    assert_matches!(LOCK.acquire(&pool), Err(Error::Pool(_)));
    let with = LOCK.with(&pool, |_| Ok::<_, Error>(()));
    assert_matches!(with, Err(Error::Pool(_)));
}

/// A pool whose connections have an open transaction that Diesel does not know of.
#[test]
fn a_pooled_connection_in_a_raw_transaction_is_refused_and_discarded() {
    let database = Database::new();
    let pool = pool_that_runs(&database, 1, "BEGIN");
    let pid = backend_pid(&mut pool.get().unwrap());
    assert_matches!(LOCK.acquire(&pool), Err(Error::TransactionInPool));
    let mut observer = Observer::of(&database);
    observer.assert_ended(pid);
    observer.assert_free(LOCK.key());
}

#[test]
fn a_guard_moves_between_threads() {
    let database = Database::new();
    let pool = database.pool(1);
    let guard = LOCK.try_acquire(&pool).unwrap().expect_acquired();
    std::thread::spawn(move || guard.release().unwrap())
        .join()
        .unwrap();
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn a_thousand_waiters_wait_for_the_pool_and_not_for_ever() {
    let database = Database::new();
    let pool = database.pool(4);
    let mut guard = LOCK.acquire(&pool).unwrap();
    let taken = std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..1000)
            .map(|_| {
                std::thread::Builder::new()
                    .stack_size(SMALL_STACK)
                    .spawn_scoped(scope, || {
                        let timeout = Duration::from_millis(300);
                        LOCK.acquire_timeout(&pool, timeout)
                            .is_ok_and(|it| !it.is_busy())
                    })
                    .unwrap()
            })
            .collect();
        diesel::sql_query("SELECT 1").execute(guard.conn()).unwrap();
        waiters
            .into_iter()
            .map(|waiter| waiter.join().unwrap())
            .filter(|it| *it)
            .count()
    });
    assert_eq!(taken, 0);
    guard.release().unwrap();
    assert_pool_whole(&pool, &database);
}

/// A caller that marks the connection under a guard wants it discarded.
#[test]
fn a_mark_that_was_made_under_the_guard_is_honoured() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = LOCK.acquire(&pool).unwrap();
    let pid = guard.backend_pid();
    AnsiTransactionManager::transaction_manager_status_mut(guard.conn()).set_in_error();
    guard.release().unwrap();
    let mut observer = Observer::of(&database);
    observer.assert_ended(pid);
    assert_pool_whole(&pool, &database);
}

/// Two connections of the pool, one of which was left in a transaction with uncommitted work. `dirty_first` decides which of
/// them the pool lends first.
fn pool_with_abandoned_work(database: &Database, dirty_first: bool) -> (PgPool, i32) {
    let pool = database.pool(2);
    let (mut clean, mut dirty) = (pool.get().unwrap(), pool.get().unwrap());
    clean
        .batch_execute("CREATE TABLE IF NOT EXISTS work (id int); TRUNCATE work")
        .unwrap();
    dirty
        .batch_execute("BEGIN; INSERT INTO work VALUES (1)")
        .unwrap();
    let pid = backend_pid(&mut dirty);
    // The pool lends the connection that came back last.
    if dirty_first {
        drop(clean);
        drop(dirty);
    } else {
        drop(dirty);
        drop(clean);
    }
    (pool, pid)
}

#[track_caller]
fn assert_given_up_and_not_committed(database: &Database, pid: i32) {
    let mut observer = Observer::of(database);
    observer.assert_ended(pid);
    let committed = number(observer.conn(), "SELECT count(*) FROM work");
    assert_eq!(committed, 0);
}

#[test]
fn abandoned_work_in_the_pool_is_never_committed_by_a_lock() {
    let database = Database::new();
    let (pool, pid) = pool_with_abandoned_work(&database, false);
    let guard = LOCK.acquire(&pool).unwrap();
    assert_ne!(guard.backend_pid(), pid);
    if COMPARES_SESSIONS {
        assert_given_up_and_not_committed(&database, pid);
        guard.release().unwrap();
        assert_pool_whole(&pool, &database);
    } else {
        guard.release().unwrap();
    }

    let database = Database::new();
    let (pool, pid) = pool_with_abandoned_work(&database, true);
    let refused = LOCK.acquire(&pool).map(drop);
    assert_matches!(refused, Err(Error::TransactionInPool));
    assert_given_up_and_not_committed(&database, pid);
    assert_pool_whole(&pool, &database);
}

#[test]
fn abandoned_work_in_the_pool_is_never_committed_by_the_probe() {
    for dirty_first in [false, true] {
        let database = Database::new();
        let (pool, pid) = pool_with_abandoned_work(&database, dirty_first);
        let probed = probe_sessions(&pool);
        assert_matches!(probed, Err(Error::TransactionInPool));
        assert_given_up_and_not_committed(&database, pid);
        assert_pool_whole(&pool, &database);
        assert_eq!(probe_sessions(&pool).unwrap(), Sessions::Own);
    }
}
