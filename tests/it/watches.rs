//! Watching over a session lock.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel_interlock::{AdvisoryLock, LockKey};
use workbench::{Database, RoundTrips};

use crate::support::{Expect, Observer, eventually, foreign_session_holding, silent_pool};

const OFTEN: Duration = Duration::from_millis(10);
const LONG: Duration = Duration::from_secs(600);

fn lock() -> AdvisoryLock {
    AdvisoryLock::new(LockKey::pair(7, -7))
}

#[test]
fn a_killed_session_is_noticed_without_asking() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    assert!(watch.is_held_within(LONG) && !watch.is_lost());
    Observer::of(&database).kill(guard.backend_pid());
    eventually("the loss is noticed", || watch.is_lost());
    assert!(!watch.is_held_within(LONG));
}

#[test]
fn a_lock_that_another_session_has_got_since_is_lost_all_the_same() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    guard
        .conn()
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    let _other = foreign_session_holding(&database, lock().key().id().unwrap());
    eventually("the loss is noticed", || watch.is_lost());
}

#[test]
fn a_lock_that_is_held_is_confirmed_again_and_again() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock()
        .shared()
        .try_acquire(&pool)
        .unwrap()
        .expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    for _ in 0..3 {
        let mut before = watch.last_confirmed();
        eventually("the last word is younger than it was", || {
            let now = watch.last_confirmed();
            std::mem::replace(&mut before, now) > now
        });
    }
    assert!(!watch.is_lost());
}

#[test]
fn it_is_asked_no_more_often_than_was_said() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = diesel::r2d2::Pool::builder()
        .max_size(2)
        .build_unchecked(diesel::r2d2::ConnectionManager::new(proxy.url()));
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let other_pool = database.pool(2);
    let other = AdvisoryLock::new(LockKey::pair(7, -8));
    let mut other = other.try_acquire(&other_pool).unwrap().expect_acquired();
    // While the thread asks about another lock again and again, it asks about this one once.
    let asked = proxy.count(|| {
        let watch = guard.watch(&pool, LONG).unwrap();
        let often = other.watch(&other_pool, OFTEN).unwrap();
        for _ in 0..30 {
            let mut before = often.last_confirmed();
            eventually("it is asked again", || {
                let now = often.last_confirmed();
                std::mem::replace(&mut before, now) > now
            });
        }
        assert!(watch.is_held_within(LONG));
    });
    assert!(asked < 20, "{asked} questions");
    guard.release().unwrap();
}

#[test]
fn while_the_pool_is_exhausted_nothing_is_confirmed_and_nothing_lost() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    eventually("the last word is old", || {
        watch.last_confirmed() > 10 * OFTEN
    });
    assert!(!watch.is_lost());
    assert!(!watch.is_held_within(OFTEN));
    guard.release().unwrap();
    eventually("released, it is not held any more", || watch.is_lost());
}

#[test]
fn when_nobody_watches_any_more_nothing_is_asked() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    let clone = watch.clone();
    drop(watch);
    let mut asked = 0;
    eventually("a clone keeps it going", || {
        asked += proxy.count(|| std::thread::sleep(OFTEN));
        asked > 3
    });
    drop(clone);
    eventually("no more questions", || {
        proxy.count(|| std::thread::sleep(10 * OFTEN)) == 0
    });
    guard.release().unwrap();
}
