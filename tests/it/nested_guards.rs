//! Nested guards on one session.

use diesel::connection::{SimpleConnection, TransactionManager};

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, AnsiTransactionManager, Database, Error, IS_ASYNCHRONOUS, roll_back,
};
use crate::support::{
    Observer, assert_after_drop, assert_matches, assert_pool_whole, foreign_holder,
};

static OUTER: AdvisoryLock = AdvisoryLock::named("outer");
static INNER: AdvisoryLock = AdvisoryLock::named("inner");

#[test]
fn the_same_lock_is_held_until_it_was_released_as_often() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);

    let mut outer = OUTER.acquire(&pool).unwrap();
    let mut again = OUTER.acquire_on(outer.conn()).unwrap();
    let third = OUTER.try_acquire_on(again.conn()).unwrap().acquired();
    third.unwrap().release().unwrap();
    assert_eq!(observer.holders(OUTER.key()), 1);
    again.release().unwrap();
    assert_eq!(observer.holders(OUTER.key()), 1);
    outer.release().unwrap();
    assert_eq!(observer.holders(OUTER.key()), 0);
    assert_pool_whole(&pool, &database);
}

#[test]
fn different_locks_nest_on_one_session() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut outer = OUTER.acquire(&pool).unwrap();
    let inner = INNER.acquire_on(outer.conn()).unwrap();
    assert_eq!(Observer::of(&database).all_held(), 2);
    drop(inner);
    let mut observer = Observer::of(&database);
    assert_after_drop("the inner lock is free", || observer.all_held() == 1);
    outer.release().unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn an_inner_guard_in_an_aborted_raw_transaction_rolls_it_back_and_the_outer_holds_on() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);
    let mut outer = OUTER.acquire(&pool).unwrap();
    {
        let mut inner = OUTER.acquire_on(outer.conn()).unwrap();
        inner.conn().batch_execute("BEGIN").unwrap();
        inner.conn().batch_execute("SELECT 1/0").unwrap_err();
        assert_matches!(inner.release(), Err(Error::TransactionLeftOpen { .. }));
    }
    assert!(outer.is_held().unwrap());
    assert_eq!(observer.holders(OUTER.key()), 1);
    outer.release().unwrap();
    assert_eq!(observer.holders(OUTER.key()), 0);
    assert_pool_whole(&pool, &database);
}

/// The inner guard cannot unlock, and must not roll back the caller's transaction. Its lock stays with the session, so the
/// session must not go back to the pool, even if other statements ran on it since.
#[test]
fn what_an_inner_guard_could_not_release_does_not_get_into_the_pool() {
    for same_lock in [false, true] {
        let database = Database::new();
        let pool = database.pool(1);
        let mut outer = OUTER.acquire(&pool).unwrap();
        let pid = outer.backend_pid();
        {
            let lock = if same_lock { &OUTER } else { &INNER };
            let mut inner = lock.acquire_on(outer.conn()).unwrap();
            AnsiTransactionManager::begin_transaction(inner.conn()).unwrap();
            inner.conn().batch_execute("SELECT 1/0").unwrap_err();
            assert_matches!(inner.release(), Err(Error::ReleaseFailed { .. }));
        }
        // With this statement a blocking connection loses its mark.
        roll_back(outer.conn());
        diesel::sql_query("SELECT 1").execute(outer.conn()).unwrap();
        outer.release().unwrap();

        // The asynchronous half may release everything on the session instead.
        if !IS_ASYNCHRONOUS {
            Observer::of(&database).assert_ended(pid);
        }
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn an_inner_guard_whose_backend_was_killed_tells_the_outer() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);
    let mut outer = OUTER.acquire(&pool).unwrap();
    let inner = INNER.acquire_on(outer.conn()).unwrap();
    observer.kill(inner.backend_pid());
    assert_matches!(inner.release(), Err(Error::LockLost { .. }));
    assert_matches!(outer.release(), Err(Error::LockLost { .. }));
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_refused_inner_guard_leaves_the_outer_alone() {
    let database = Database::new();
    let pool = database.pool(1);
    let foreign = foreign_holder(&database, &INNER);
    let mut outer = OUTER.acquire(&pool).unwrap();
    assert!(INNER.try_acquire_on(outer.conn()).unwrap().is_busy());
    let timeout = std::time::Duration::from_millis(5);
    assert!(
        INNER
            .acquire_timeout_on(outer.conn(), timeout)
            .unwrap()
            .is_busy()
    );
    drop(foreign);
    assert!(outer.is_held().unwrap());
    outer.release().unwrap();
    assert_pool_whole(&pool, &database);
}

/// The inner guard sets the mark again at its release, and the next statement clears it.
#[test]
fn what_was_marked_under_an_inner_guard_does_not_get_into_the_pool() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut outer = OUTER.acquire(&pool).unwrap();
    let pid = outer.backend_pid();
    let mut inner = INNER.acquire_on(outer.conn()).unwrap();
    AnsiTransactionManager::transaction_manager_status_mut(inner.conn()).set_in_error();
    inner.release().unwrap();
    outer.conn().batch_execute("SELECT 1").unwrap();
    outer.release().unwrap();

    let mut observer = Observer::of(&database);
    observer.assert_ended(pid);
    assert_pool_whole(&pool, &database);
}
