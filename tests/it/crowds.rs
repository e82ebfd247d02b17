//! Many threads that wait for one lock, or one slot, over one pool.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, Database, Error, PgPool, PooledGuard, RoundTrips, SMALL_STACK, Semaphore,
    pool_with_patience, silent_pool, unchecked_pool_and_timeouts,
};
use crate::semaphores::database;
use crate::support::{Expect, Observer, eventually, foreign_holder};

/// Much longer than every wait here.
const LONG: Duration = Duration::from_secs(300);

/// Starts `size` threads with small stacks.
fn spawn_many<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    size: usize,
    work: impl Fn() + Copy + Send + 'scope,
) {
    for _ in 0..size {
        let small = thread::Builder::new().stack_size(SMALL_STACK);
        small.spawn_scoped(scope, work).unwrap();
    }
}

/// A pool with a timeout long enough for many threads on a slow machine.
fn patient_pool(database: &Database, size: u32) -> PgPool {
    pool_with_patience(database, size, LONG)
}

#[test]
fn a_thousand_waiters_leave_connections_to_the_holder_and_to_other_work() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("wanted by a thousand");
    static OTHER: AdvisoryLock = AdvisoryLock::named("wanted by nobody else");
    const WAITERS: usize = 1000;
    let database = Database::new();
    let pool = patient_pool(&database, 6);
    let mut guard = LOCK.acquire(&pool).unwrap();
    let watch = guard.watch(&pool, Duration::from_millis(10)).unwrap();
    let start = Barrier::new(WAITERS + 1);
    let (inside, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        spawn_many(scope, WAITERS, || {
            start.wait();
            let guard = LOCK.acquire_timeout(&pool, LONG).unwrap().expect_acquired();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            inside.fetch_sub(1, Ordering::SeqCst);
            guard.release().unwrap();
            done.fetch_add(1, Ordering::SeqCst);
        });
        start.wait();
        for _ in 0..50 {
            guard.conn().batch_execute("SELECT 1").unwrap();
            // Every other user of the pool gets a connection, including the lock's watch.
            let mut conn = pool.get_timeout(LONG).unwrap();
            conn.batch_execute("SELECT 1").unwrap();
            drop(conn);
            drop(OTHER.acquire(&pool).unwrap());
        }
        let before = watch.last_confirmed();
        eventually("the watch asks", || watch.last_confirmed() < before);
        assert_eq!(done.load(Ordering::SeqCst), 0);
        guard.release().unwrap();
    });
    assert_eq!(done.into_inner(), WAITERS);
}

#[test]
fn a_thousand_waiters_for_a_slot_leave_the_holder_a_connection() {
    static SEMAPHORE: Semaphore = Semaphore::named("wanted by a thousand", 1, LONG);
    const WAITERS: usize = 1000;
    let database = database();
    let pool = patient_pool(&database, 4);
    let permit = SEMAPHORE.try_acquire(&pool).unwrap().expect_acquired();
    let start = Barrier::new(WAITERS + 1);
    let (inside, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        spawn_many(scope, WAITERS, || {
            start.wait();
            let permit = SEMAPHORE.acquire_timeout(&pool, LONG);
            let permit = permit.unwrap().expect_acquired();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            inside.fetch_sub(1, Ordering::SeqCst);
            permit.release().unwrap();
            done.fetch_add(1, Ordering::SeqCst);
        });
        start.wait();
        for _ in 0..50 {
            let mut conn = pool.get_timeout(LONG).unwrap();
            conn.batch_execute("SELECT 1").unwrap();
        }
        assert_eq!(done.load(Ordering::SeqCst), 0);
        permit.release().unwrap();
    });
    assert_eq!(done.into_inner(), WAITERS);
}

#[test]
fn many_waiters_that_wait_in_vain_end_in_time() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("never free");
    let database = Database::new();
    let pool = database.pool(4);
    let _holder = foreign_holder(&database, &LOCK);
    thread::scope(|scope| {
        spawn_many(scope, 100, || {
            let timeout = Duration::from_millis(300);
            match LOCK.acquire_timeout(&pool, timeout) {
                Ok(attempt) => assert!(attempt.is_busy()),
                // The pool had no connection in all that time.
                Err(error) => assert!(matches!(error, Error::Pool(_)), "{error}"),
            }
        });
    });
    assert_eq!(Observer::of(&database).waiters(LOCK.key()), 0);
}

#[test]
fn waiters_without_a_connection_poll_a_bounded_number_of_times() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("asked for now and then");
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let _holder = foreign_holder(&database, &LOCK);
    let (began, before) = (Instant::now(), proxy.round_trips());
    thread::scope(|scope| {
        spawn_many(scope, 32, || {
            // On a slow machine the pool may have no connection for it until the end.
            if let Ok(attempt) = LOCK.acquire_timeout(&pool, Duration::from_secs(2)) {
                assert!(attempt.is_busy());
            }
        });
    });
    let asked = (proxy.round_trips() - before) as f64 / began.elapsed().as_secs_f64();
    assert!(asked < 500.0, "{asked} per second");
}

#[test]
fn a_holder_and_its_waiter_share_a_pool_of_two() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("of two");
    let database = Database::new();
    let pool = database.pool(2);
    let mut observer = Observer::of(&database);
    let mut guard = LOCK.acquire(&pool).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire(&pool).and_then(PooledGuard::release));
        eventually("it waits", || {
            observer.waiters(LOCK.key()) == 1 || waiter.is_finished()
        });
        diesel::sql_query("SELECT 1").execute(guard.conn()).unwrap();
        guard.release().unwrap();
        waiter.join().unwrap().unwrap();
    });
}

/// The shortest of three waits, because a busy machine distorts it less than a single one.
fn best_of_three(mut wait: impl FnMut() -> Duration) -> Duration {
    (0..3).map(|_| wait()).min().unwrap()
}

#[test]
fn a_lone_waiter_for_a_key_does_not_wait_for_a_thousand_at_another() {
    static CROWDED: AdvisoryLock = AdvisoryLock::named("crowded");
    static ALONE: AdvisoryLock = AdvisoryLock::named("alone");
    const WAITERS: usize = 1000;
    let database = Database::new();
    let pool = patient_pool(&database, 8);
    let holder = foreign_holder(&database, &CROWDED);
    let start = Barrier::new(WAITERS + 1);
    let tried = AtomicUsize::new(0);
    thread::scope(|scope| {
        spawn_many(scope, WAITERS, || {
            start.wait();
            drop(pool.get_timeout(LONG).unwrap());
            tried.fetch_add(1, Ordering::SeqCst);
            let attempt = CROWDED.acquire_timeout(&pool, LONG).unwrap();
            attempt.expect_acquired().release().unwrap();
        });
        start.wait();
        eventually("all wait", || tried.load(Ordering::SeqCst) == WAITERS);
        let waited = best_of_three(|| {
            let mut other = foreign_holder(&database, &ALONE);
            let began = Instant::now();
            thread::scope(|scope| {
                scope.spawn(|| ALONE.acquire(&pool).unwrap().release().unwrap());
                other
                    .batch_execute("SELECT pg_sleep(0.05); SELECT pg_advisory_unlock_all()")
                    .unwrap();
            });
            began.elapsed()
        });
        drop(holder);
        // It took four seconds when all waiters were counted together.
        assert!(waited < Duration::from_secs(1), "{waited:?}");
    });
}

#[test]
fn a_lone_waiter_for_a_service_does_not_wait_for_a_thousand_at_another() {
    static CROWDED: Semaphore = Semaphore::named("crowded", 1, LONG);
    static ALONE: Semaphore = Semaphore::named("alone", 1, LONG);
    const WAITERS: usize = 1000;
    let database = database();
    let pool = patient_pool(&database, 8);
    let conn = &mut database.connect();
    let permit = CROWDED.try_acquire(&pool).unwrap().expect_acquired();
    let tried = AtomicUsize::new(0);
    thread::scope(|scope| {
        spawn_many(scope, WAITERS, || {
            assert!(CROWDED.try_acquire(&pool).unwrap().is_full());
            tried.fetch_add(1, Ordering::SeqCst);
            let attempt = CROWDED.acquire_timeout(&pool, LONG).unwrap();
            attempt.expect_acquired().release().unwrap();
        });
        eventually("all wait", || tried.load(Ordering::SeqCst) == WAITERS);
        let waited = best_of_three(|| {
            let claim = ALONE.try_acquire(&pool).unwrap().expect_acquired();
            let id = claim.into_claim().id;
            let began = Instant::now();
            thread::scope(|scope| {
                scope.spawn(|| {
                    let attempt = ALONE.acquire_timeout(&pool, LONG).unwrap();
                    attempt.expect_acquired().release().unwrap();
                });
                // As another process would release it: no thread of this process is woken.
                conn.batch_execute(&format!(
                    "SELECT pg_sleep(0.2); \
                     UPDATE resource_control.service_request \
                     SET completed_at = clock_timestamp() WHERE id = {id}"
                ))
                .unwrap();
            });
            began.elapsed()
        });
        permit.release().unwrap();
        assert!(waited < Duration::from_secs(2), "{waited:?}");
    });
}

#[test]
fn a_wait_goes_on_though_the_pool_has_no_connection_meanwhile() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("goes on");
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let (pool, timeouts) = unchecked_pool_and_timeouts(&proxy.url(), 3, Duration::from_millis(200));
    let filled = [(); 3].map(|()| pool.get_timeout(LONG).unwrap());
    drop(filled);
    let holder = foreign_holder(&database, &LOCK);
    let mut observer = Observer::of(&database);
    thread::scope(|scope| {
        let acquire = || LOCK.acquire(&pool).and_then(PooledGuard::release);
        let acquire_in_time = || {
            let attempt = LOCK.acquire_timeout(&pool, LONG)?;
            attempt.expect_acquired().release()
        };
        let first = scope.spawn(acquire);
        eventually("it waits", || observer.waiters(LOCK.key()) == 1);
        // The connection budget is used up for these.
        let tried = proxy.round_trips();
        let others = [scope.spawn(acquire), scope.spawn(acquire_in_time)];
        // Their tries and some later ones, beside the slices of the first.
        eventually("they have begun to wait", || {
            proxy.round_trips() >= tried + 20
        });
        let mut taken = Vec::new();
        eventually("the pool is exhausted", || {
            taken.extend(pool.get());
            taken.len() == 2
        });
        let before = timeouts();
        eventually("they got no connection several times", || {
            timeouts() >= before + 6
        });
        drop(taken);
        drop(holder);
        first.join().unwrap().unwrap();
        for waiter in others {
            waiter.join().unwrap().unwrap();
        }
    });
    assert_eq!(observer.all_held(), 0);
}
