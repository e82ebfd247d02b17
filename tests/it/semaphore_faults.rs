//! Permits whose connection, pool or server fails.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;

use crate::half::{
    Cluster, Database, Error, IS_ASYNCHRONOUS, IS_FAIR, PgPool, RoundTrips, Semaphore, StopMode,
    idle_connections, migrations, pool_with_patience, silent_pool, unchecked_pool,
};
use crate::semaphores::{database, request};
use crate::support::{
    Expect, Observer, assert_matches, backend_pid, eventually, panic_after_the_next_statement,
    panic_before_the_next_statement,
};

const GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(3600));

/// A pool of one connection, which is not tested at check-out.
fn trusting_pool(database: &Database) -> PgPool {
    unchecked_pool(&database.url(), 1, Duration::from_secs(10))
}

#[track_caller]
fn assert_released_in_the_background(database: &Database, id: i64) {
    let conn = &mut database.connect();
    eventually("it is released in the background", || {
        request(conn, id).completed_at.is_some()
    });
}

/// An asynchronous pool sees that the socket is closed, and may give another connection instead.
#[test]
fn a_release_on_a_killed_connection_says_so_and_follows() {
    let database = database();
    let pool = trusting_pool(&database);
    for dropped in [false, true] {
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let id = permit.claim().id;
        let pid = backend_pid(&mut pool.get().unwrap());
        Observer::of(&database).kill(pid);
        if dropped {
            drop(permit);
        } else {
            let released = permit.release();
            if !IS_ASYNCHRONOUS {
                assert_matches!(released, Err(Error::Database(_)));
            }
        }
        assert_released_in_the_background(&database, id);
    }
}

#[test]
fn a_killed_connection_that_the_pool_looks_at_is_replaced() {
    let database = database();
    let pool = database.pool(1);
    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let pid = backend_pid(&mut pool.get().unwrap());
    Observer::of(&database).kill(pid);
    permit.release().unwrap();
}

#[test]
fn a_release_that_finds_the_pool_exhausted_says_so_and_follows() {
    let database = database();
    let pool = pool_with_patience(&database, 1, Duration::from_secs(2));
    let mut permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let id = permit.claim().id;
    let only = pool.get().unwrap();
    let renewed = permit.renew();
    assert_matches!(renewed, Err(Error::Pool(_)));
    let released = permit.release();
    assert_matches!(released, Err(Error::Pool(_)));
    drop(only);
    assert_released_in_the_background(&database, id);
}

#[test]
fn a_server_that_is_down_is_waited_for_in_the_background() {
    let cluster = Cluster::start();
    let database = cluster.database();
    migrations::install(&mut database.connect()).unwrap();
    let pool = pool_with_patience(&database, 1, Duration::from_secs(2));
    let mut permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let id = permit.claim().id;
    cluster.stop(StopMode::Fast);
    permit.renew().unwrap_err();
    drop(permit);
    cluster.start_again();
    assert_released_in_the_background(&database, id);
    assert!(GEOCODER.try_acquire(&pool).unwrap().admitted().is_some());
}

#[test]
fn a_severed_network_is_reported_and_the_release_follows() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let id = permit.claim().id;
    proxy.sever();
    let released = permit.release();
    assert!(released.is_err() || IS_ASYNCHRONOUS);
    assert_released_in_the_background(&database, id);
}

/// Diesel's instrumentation is the application's code, and may panic.
#[test]
fn a_panic_in_the_instrumentation_neither_aborts_nor_loses_the_release() {
    let database = database();
    let pool = trusting_pool(&database);
    for panics in [
        panic_before_the_next_statement,
        panic_after_the_next_statement,
    ] {
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let id = permit.claim().id;
        panics(&mut pool.get().unwrap());
        drop(permit);
        assert_released_in_the_background(&database, id);

        // While another panic unwinds.
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let id = permit.claim().id;
        panics(&mut pool.get().unwrap());
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _permit = permit;
            panic!("in the work");
        }));
        assert!(panicked.is_err());
        assert_released_in_the_background(&database, id);

        // In the background thread.
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let id = permit.claim().id;
        let mut only = pool.get().unwrap();
        panics(&mut only);
        drop(permit);
        drop(only);
        assert_released_in_the_background(&database, id);

        // In the release itself.
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let id = permit.claim().id;
        panics(&mut pool.get().unwrap());
        assert!(catch_unwind(AssertUnwindSafe(|| permit.release())).is_err());
        assert_released_in_the_background(&database, id);
    }
}

/// Statements in a transaction that an earlier user of the pool left open are never committed.
#[test]
fn what_is_done_in_a_transaction_left_open_in_the_pool_does_not_count() {
    let database = database();
    let pool = database.pool(1);
    let leave_open = || pool.get().unwrap().batch_execute("BEGIN").unwrap();
    let mut permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let (id, expires_at) = (permit.claim().id, permit.claim().expires_at);
    leave_open();
    let renewed = permit.renew();
    assert_matches!(renewed, Err(Error::TransactionInPool));
    assert_eq!(permit.claim().expires_at, expires_at);
    leave_open();
    let released = permit.release();
    assert_matches!(released, Err(Error::TransactionInPool));
    assert_released_in_the_background(&database, id);

    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let id = permit.claim().id;
    leave_open();
    drop(permit);
    assert_released_in_the_background(&database, id);

    // The background thread finds it.
    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let id = permit.claim().id;
    let mut only = pool.get().unwrap();
    only.batch_execute("BEGIN").unwrap();
    drop(permit);
    drop(only);
    assert_released_in_the_background(&database, id);
}

/// A pool whose connections are always in use never has an idle one, so the release waits for a connection like other
/// callers.
#[test]
fn a_release_is_delivered_by_a_pool_that_is_never_idle() {
    let database = database();
    let pool = unchecked_pool(&database.url(), 1, Duration::from_secs(60));
    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let id = permit.claim().id;
    let delivered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !delivered.load(Ordering::SeqCst) {
                    pool.get()
                        .unwrap()
                        .batch_execute("SELECT pg_sleep(0.02)")
                        .unwrap();
                }
            });
        }
        let conn = &mut database.connect();
        eventually("all of them wait for the one", || {
            idle_connections(&pool) == 0
        });
        drop(permit);
        if !IS_FAIR {
            // The release takes the connection when the others are done, or the slot is free after its timeout.
            delivered.store(true, Ordering::SeqCst);
        }
        let end = Instant::now() + Duration::from_secs(30);
        while request(conn, id).completed_at.is_none() && Instant::now() < end {}
        delivered.store(true, Ordering::SeqCst);
        assert!(request(conn, id).completed_at.is_some());
    });
}
