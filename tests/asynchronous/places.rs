//! Where a guard may be dropped.

use std::time::{Duration, Instant};

use diesel_interlock::asynchronous::{AdvisoryLock, Pool, PooledGuard};
use diesel_interlock::{Error, LockKey};
use tokio::runtime::{Builder, Runtime};
use workbench::Database;

use crate::dropping::{KEY, NOBODY, ONE_HOLDER, Observer};

static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::bigint(KEY));
static OTHER: AdvisoryLock = AdvisoryLock::named("another");

const LIMIT: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(5);

fn several_threads() -> Runtime {
    (Builder::new_multi_thread().worker_threads(2).enable_all())
        .build()
        .unwrap()
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn held<P: Pool>(runtime: &Runtime, pool: &P) -> PooledGuard<P> {
    let attempt = runtime.block_on(LOCK.try_acquire(pool)).unwrap();
    attempt.acquired().expect("nobody holds it")
}

/// Drops guards at each place. `drive` lets a runtime run that nobody drives otherwise, until nobody holds the lock.
fn each_place<P: Pool>(
    start: fn() -> Runtime,
    drive: fn(&Runtime, &mut Observer),
    make: impl Fn(&Runtime, &Database) -> P,
) {
    let database = Database::new();
    let observer = &mut Observer::of(&database);
    let runtime = start();
    let pool = make(&runtime, &database);

    drop(held(&runtime, &pool));
    drive(&runtime, observer);
    observer.until(NOBODY, LIMIT);

    let guard = held(&runtime, &pool);
    std::thread::spawn(move || drop(guard)).join().unwrap();
    drive(&runtime, observer);
    observer.until(NOBODY, LIMIT);

    let guard = held(&runtime, &pool);
    runtime.block_on(async move {
        let dropped = tokio::task::spawn_blocking(move || drop(guard));
        dropped.await.unwrap();
        tokio::time::sleep(MOMENT).await;
    });
    drive(&runtime, observer);
    observer.until(NOBODY, LIMIT);

    let guard = held(&runtime, &pool);
    current_thread().block_on(async move {
        drop(guard);
        tokio::time::sleep(MOMENT).await;
    });
    drive(&runtime, observer);
    observer.until(NOBODY, LIMIT);

    let guard = held(&runtime, &pool);
    runtime.block_on(async move {
        let panics = tokio::spawn(async move {
            let _guard = guard;
            std::panic::resume_unwind(Box::new("expected"));
        });
        assert!(panics.await.unwrap_err().is_panic());
        tokio::time::sleep(MOMENT).await;
    });
    drive(&runtime, observer);
    observer.until(NOBODY, LIMIT);

    let guard = held(&runtime, &pool);
    runtime.block_on(async move {
        let waits = tokio::spawn(async move {
            let _guard = guard;
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
        waits.abort();
        assert!(waits.await.unwrap_err().is_cancelled());
        tokio::time::sleep(MOMENT).await;
    });
    drive(&runtime, observer);
    observer.until(NOBODY, LIMIT);

    // With its runtime, and after it.
    let guard = held(&runtime, &pool);
    let other = runtime.block_on(OTHER.try_acquire(&pool)).unwrap();
    runtime.spawn(async move {
        let _guard = guard;
        std::future::pending::<()>().await;
    });
    runtime.block_on(tokio::task::yield_now());
    drop(runtime);
    observer.until(NOBODY, LIMIT);
    drop(other);

    // Just before its runtime.
    let runtime = start();
    let pool = make(&runtime, &database);
    drop(held(&runtime, &pool));
    runtime.shutdown_background();
    observer.until(NOBODY, LIMIT);
}

fn nothing(_: &Runtime, _: &mut Observer) {}

fn driven(runtime: &Runtime, observer: &mut Observer) {
    let end = Instant::now() + LIMIT;
    while observer.requests() != NOBODY && Instant::now() < end {
        runtime.block_on(async { tokio::time::sleep(MOMENT).await });
    }
}

#[test]
fn a_guard_may_be_dropped_anywhere_with_deadpool() {
    each_place(several_threads, nothing, |_, database| database.deadpool(4));
    each_place(current_thread, driven, |_, database| database.deadpool(4));
}

#[test]
fn a_guard_may_be_dropped_anywhere_with_bb8() {
    let make = |runtime: &Runtime, database: &Database| {
        let _entered = runtime.enter();
        database.bb8(4)
    };
    each_place(several_threads, nothing, make);
    each_place(current_thread, driven, make);
}

#[test]
fn a_current_thread_runtime_that_nobody_drives_releases_nothing_until_it_is_driven_or_dropped() {
    let database = Database::new();
    let observer = &mut Observer::of(&database);
    let runtime = current_thread();
    let pool = database.deadpool(2);
    for ends in [false, true] {
        drop(held(&runtime, &pool));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(observer.requests(), ONE_HOLDER);
        if ends {
            break;
        }
        driven(&runtime, observer);
        observer.until(NOBODY, LIMIT);
    }
    drop(runtime);
    observer.until(NOBODY, LIMIT);
}

#[test]
fn a_runtime_without_timers_is_an_error_before_anything_is_sent() {
    let database = Database::new();
    let pool = database.deadpool(1);
    let runtime = Builder::new_current_thread().enable_io().build().unwrap();
    runtime.block_on(async {
        let tried = LOCK.try_acquire(&pool).await;
        assert!(matches!(tried, Err(Error::NoRuntime)), "{tried:?}");
        let timed = LOCK.acquire_timeout(&pool, MOMENT).await;
        assert!(matches!(timed, Err(Error::NoRuntime)), "{timed:?}");
        let conn = &mut database.connect_async().await;
        let lent = LOCK.try_acquire_on(conn).await;
        assert!(matches!(lent, Err(Error::NoRuntime)), "{lent:?}");
    });
    assert_eq!(Observer::of(&database).requests(), NOBODY);
}
