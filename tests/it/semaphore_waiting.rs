//! Waiting for a slot.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::half::prelude::*;
use crate::half::{
    Admission, Error, Permit, PgPool, RoundTrips, Semaphore, pool_with_patience, silent_pool,
    unchecked_pool, unchecked_pool_and_timeouts,
};
use crate::semaphores::{database, expire, fill, log};
use crate::support::{Expect, Observer, assert_matches, eventually, number};

const ONE: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
const LONG: Duration = Duration::from_secs(60);

/// One of the waiting operations.
type Wait = fn(&PgPool) -> Permit;

const WAITS: [Wait; 2] = [
    |pool| ONE.acquire_timeout(pool, LONG).unwrap().expect_acquired(),
    |pool| ONE.acquire(pool).unwrap(),
];

/// Runs `end` once the waiter has polled several times without success. The waiter must then get its slot.
fn waits_until(end: impl Fn(&mut PgConnection)) {
    for wait in WAITS {
        one_waits_until(wait, &end);
    }
}

fn one_waits_until(wait: Wait, end: impl Fn(&mut PgConnection)) {
    let database = database();
    let conn = &mut database.connect();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    fill(&ONE, conn);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(&pool));
        let connected = proxy.round_trips();
        eventually("it asks again and again", || {
            proxy.round_trips() >= connected + 5
        });
        end(conn);
        let start = Instant::now();
        waiter.join().unwrap().release().unwrap();
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn a_waiter_gets_the_slot_that_is_released() {
    waits_until(|conn| {
        let id = log(conn)[0].id;
        assert!(ONE.complete_on(conn, id).unwrap());
    });
}

#[test]
fn a_waiter_gets_the_slot_that_expires() {
    waits_until(|conn| expire(conn, "geocoder"));
}

#[test]
fn a_wait_ends_with_its_time_and_zero_is_one_attempt() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let held = ONE.try_acquire(&pool).unwrap().expect_acquired();
    let start = Instant::now();
    let timeout = Duration::from_millis(80);
    assert!(ONE.acquire_timeout(&pool, timeout).unwrap().is_full());
    assert!(start.elapsed() >= timeout);
    assert!(start.elapsed() < Duration::from_secs(10));
    let once = || {
        assert!(
            ONE.acquire_timeout(&pool, Duration::ZERO)
                .unwrap()
                .is_full()
        );
    };
    assert_eq!(proxy.count(once), 1);
    held.release().unwrap();
    for timeout in [Duration::ZERO, Duration::MAX] {
        let waited = ONE.acquire_timeout(&pool, timeout).unwrap();
        waited.expect_acquired().release().unwrap();
    }
}

#[test]
fn a_pool_without_a_connection_is_an_error() {
    let database = database();
    let pool = database.pool(1);
    let _only = pool.get().unwrap();
    let start = Instant::now();
    for timeout in [Duration::from_millis(50), Duration::ZERO] {
        let waited = ONE.acquire_timeout(&pool, timeout);
        assert_matches!(waited, Err(Error::Pool(_)));
    }
    let impatient = pool_with_patience(&database, 1, Duration::from_millis(100));
    let _only = impatient.get_timeout(LONG).unwrap();
    let waited = ONE.acquire(&impatient);
    assert_matches!(waited, Err(Error::Pool(_)));
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// The deadline includes the check-out, even with a long timeout of the pool.
#[test]
fn a_wait_ends_in_time_though_the_pool_has_nothing_more_to_give() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = unchecked_pool(&proxy.url(), 1, LONG);
    let _held = ONE.try_acquire(&pool).unwrap().expect_acquired();
    std::thread::scope(|scope| {
        let start = Instant::now();
        let asked = proxy.round_trips();
        let waiter = scope.spawn(|| ONE.acquire_timeout(&pool, Duration::from_secs(1)));
        eventually("it has asked", || proxy.round_trips() > asked);
        let _only = pool.get().unwrap();
        assert!(waiter.join().unwrap().unwrap().is_full());
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

/// The timeout of the pool is much shorter than that of the wait.
#[test]
fn a_wait_goes_on_though_the_pool_has_no_connection_meanwhile() {
    for wait in WAITS {
        goes_on_though_the_pool_has_no_connection(wait);
    }
}

fn goes_on_though_the_pool_has_no_connection(wait: Wait) {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let (pool, timeouts) = unchecked_pool_and_timeouts(&proxy.url(), 1, Duration::from_millis(100));
    let mut only = pool.get_timeout(LONG).unwrap();
    fill(&ONE, &mut only);
    drop(only);
    std::thread::scope(|scope| {
        let asked = proxy.round_trips();
        let waiter = scope.spawn(|| wait(&pool));
        eventually("it has asked", || proxy.round_trips() > asked);
        let mut only = pool.get_timeout(LONG).unwrap();
        let before = timeouts();
        eventually("it got no connection three times", || {
            timeouts() >= before + 3
        });
        expire(&mut only, ONE.service());
        drop(only);
        drop(waiter.join().unwrap());
    });
}

#[test]
fn a_holder_and_its_waiters_share_one_connection() {
    let database = database();
    let pool = database.pool(1);
    let first = ONE.try_acquire(&pool).unwrap().expect_acquired();
    let start = Barrier::new(9);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                let waited = ONE.acquire_timeout(&pool, LONG);
                waited.unwrap().expect_acquired().release().unwrap();
            });
        }
        start.wait();
        first.release().unwrap();
    });
    let log = log(&mut database.connect());
    assert_eq!(log.len(), 9);
    assert!(log.iter().all(|request| request.completed_at.is_some()));
}

/// A snapshot would delay `CREATE INDEX CONCURRENTLY` and VACUUM.
#[test]
fn a_waiter_holds_neither_connection_nor_snapshot() {
    let database = database();
    let pool = database.pool(1);
    let held = ONE.try_acquire(&pool).unwrap().expect_acquired();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| ONE.acquire_timeout(&pool, LONG));
        let mut observer = Observer::of(&database);
        for _ in 0..10 {
            // Between two polls the only connection is available.
            let _only = pool.get().unwrap();
            let busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                AND pid <> pg_backend_pid() AND backend_type = 'client backend' \
                AND (state <> 'idle' OR backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)";
            eventually("the session is idle", || number(observer.conn(), busy) == 0);
            assert!(!waiter.is_finished());
        }
        held.release().unwrap();
        waiter
            .join()
            .unwrap()
            .unwrap()
            .expect_acquired()
            .release()
            .unwrap();
    });
}

/// The number of polls per second by this many waiters. A waiter that gets a slot leaves it to its timeout, and waits for
/// the next.
fn questions_per_second(crowd: usize, semaphore: &Semaphore) -> f64 {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 4);
    let claimed = AtomicU32::new(0);
    let all_wait = Barrier::new(crowd + 1);
    std::thread::scope(|scope| {
        for _ in 0..crowd {
            scope.spawn(|| {
                all_wait.wait();
                let end = Instant::now() + Duration::from_secs(3);
                while let Some(left) = end.checked_duration_since(Instant::now()) {
                    // The pool may be exhausted until the end.
                    let waited = semaphore.acquire_timeout(&pool, left);
                    if let Some(permit) = waited.ok().and_then(Admission::admitted) {
                        let _forgotten = permit.into_claim();
                        claimed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        all_wait.wait();
        let start = Instant::now();
        // Each waiter has polled once. The first polls are not spread.
        eventually("all have asked", || proxy.round_trips() > crowd as u64);
        let asked = proxy.round_trips();
        while start.elapsed() < Duration::from_secs(2) {
            std::thread::yield_now();
        }
        let questions = proxy.round_trips() - asked - u64::from(claimed.load(Ordering::Relaxed));
        questions as f64 / start.elapsed().as_secs_f64()
    })
}

#[test]
fn a_crowd_of_waiters_polls_a_bounded_number_of_times() {
    let asked = questions_per_second(64, &ONE);
    assert!(asked < 500.0, "{asked} per second");
}

#[test]
fn a_crowd_polls_no_more_often_where_requests_expire_all_the_time() {
    let brief = Semaphore::named("geocoder", 1, Duration::from_millis(5));
    let asked = questions_per_second(64, &brief);
    assert!(asked < 500.0, "{asked} per second");
}
