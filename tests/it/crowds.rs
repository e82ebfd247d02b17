//! Many threads that wait for one lock, or one slot, over one pool.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::r2d2::Pool;
use diesel_interlock::{AdvisoryLock, Error, PgPool, PooledGuard, Semaphore};
use workbench::{Database, RoundTrips};

use crate::semaphores::database;
use crate::support::{Expect, Observer, eventually, foreign_session_holding, silent_pool};

/// Far above what anything here takes.
const LONG: Duration = Duration::from_secs(300);

/// Starts that many threads with small stacks.
fn crowd<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    size: usize,
    work: impl Fn() + Copy + Send + 'scope,
) {
    for _ in 0..size {
        let small = thread::Builder::new().stack_size(256 * 1024);
        small.spawn_scoped(scope, work).unwrap();
    }
}

/// A pool that a crowd may want a connection of at the same time, on a slow machine.
fn patient_pool(database: &Database, size: u32) -> PgPool {
    Pool::builder()
        .max_size(size)
        .connection_timeout(LONG)
        .build(database.manager())
        .unwrap()
}

#[test]
fn a_thousand_waiters_leave_connections_to_the_holder_and_to_everybody_else() {
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
        crowd(scope, WAITERS, || {
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
            // Whoever needs a connection gets one, the lock's watch among them.
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
        crowd(scope, WAITERS, || {
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
fn a_crowd_that_waits_in_vain_ends_in_time() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("never free");
    let database = Database::new();
    let pool = database.pool(4);
    let _holder = foreign_session_holding(&database, LOCK.key().id().unwrap());
    thread::scope(|scope| {
        crowd(scope, 100, || {
            let timeout = Duration::from_millis(300);
            match LOCK.acquire_timeout(&pool, timeout) {
                Ok(attempt) => assert!(attempt.is_busy()),
                // Not once, in all that time, was there a connection.
                Err(error) => assert!(matches!(error, Error::Pool(_)), "{error}"),
            }
        });
    });
    assert_eq!(Observer::of(&database).waiters(LOCK.key()), 0);
}

#[test]
fn those_who_wait_without_a_connection_ask_a_bounded_number_of_times() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("asked for now and then");
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let _holder = foreign_session_holding(&database, LOCK.key().id().unwrap());
    let (began, before) = (Instant::now(), proxy.round_trips());
    thread::scope(|scope| {
        crowd(scope, 32, || {
            // A slow machine may have no connection for it, to the end.
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
