//! When `drain` returns true, what was dropped is released. Each test runs in a process of its own,
//! because `drain` waits for all drops of the process.

use std::time::{Duration, Instant};

use crate::half::*;
use crate::support::{
    IN_FLIGHT, Observer, alone, in_a_quick_round, installed, number, once_at_least,
};

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn permits_that_were_dropped_while_their_pool_was_exhausted_are_drained_once_they_are_released() {
    let test = "permits_that_were_dropped_while_their_pool_was_exhausted_are_drained_once_they_are_released";
    alone(&format!("suite::draining::{test}"), || {
        let database = installed();
        let (pool, slots) = (
            pool(&database, 1),
            Semaphore::named("drained", 3, MINUTE * 60),
        );
        let admin = &mut database.connect();
        assert!(wait(drain(Duration::ZERO)), "nothing was dropped");
        let permits = [(); 3].map(|()| wait(slots.acquire(&pool)).unwrap());
        on_one(&pool, |_conn| {
            drop(permits);
            assert!(!wait(drain(Duration::from_millis(20))));
            assert_eq!(number(admin, IN_FLIGHT), 3);
        });
        assert!(wait(drain(MINUTE)));
        assert_eq!(number(admin, IN_FLIGHT), 0);
    });
}

#[test]
fn guards_that_were_dropped_are_drained_once_their_locks_are_free() {
    let test = "guards_that_were_dropped_are_drained_once_their_locks_are_free";
    alone(&format!("suite::draining::{test}"), || {
        let database = installed();
        let (pool, lock) = (pool(&database, 3), AdvisoryLock::named("drained"));
        let mut observer = Observer::of(&database);
        for _ in 0..20 {
            // After two seconds without a reply the connection is closed, and the server ends the
            // session later.
            let held = in_a_quick_round(Duration::from_secs(2), || {
                drop([1, 2, 3].map(|key| wait(lock.key(key).acquire(&pool)).unwrap()));
                assert!(wait(drain(MINUTE)));
                observer.all_held()
            });
            assert_eq!(held, 0);
        }
    });
}

/// `drain` returns true a second after the connection was closed. The server has ended the session
/// by then.
#[test]
fn a_lock_whose_session_was_closed_is_drained_once_it_is_free() {
    let test = "a_lock_whose_session_was_closed_is_drained_once_it_is_free";
    alone(&format!("suite::draining::{test}"), || {
        let database = installed();
        let (pool, lock) = (pool(&database, 1), AdvisoryLock::named("drained"));
        let mut observer = Observer::of(&database);
        // Not in a round in which the server pauses.
        once_at_least("the lock is free", || {
            let mut guard = wait(lock.acquire(&pool)).unwrap();
            begin(guard.conn());
            let closed = Instant::now();
            drop(guard);
            assert!(wait(drain(MINUTE)));
            assert!(closed.elapsed() > Duration::from_secs(1));
            observer.all_held() == 0
        });
    });
}

#[test]
fn permits_that_expire_before_they_could_be_released_are_drained_when_they_expire() {
    let test = "permits_that_expire_before_they_could_be_released_are_drained_when_they_expire";
    alone(&format!("suite::draining::{test}"), || {
        let database = installed();
        let pool = pool(&database, 1);
        let slot = Semaphore::named("drained", 1, Duration::from_millis(100));
        let permit = wait(slot.acquire(&pool)).unwrap();
        on_one(&pool, |_conn| {
            drop(permit);
            assert!(wait(drain(MINUTE)));
        });
    });
}
