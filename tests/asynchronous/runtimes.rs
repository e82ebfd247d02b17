//! Runtimes with a paused clock, runtimes without timers, and runtimes that have ended.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;

use crate::assert_matches;
use crate::half::*;
use crate::support::{IN_FLIGHT, Observer, eventually, installed, number};

static LOCK: AdvisoryLock = AdvisoryLock::named("runtimes");
const HOUR: Duration = Duration::from_secs(3600);
const SLOT: Semaphore = Semaphore::named("runtimes", 1, HOUR);
const UNITS: RateLimit = RateLimit::named("runtimes", Quota::per_hour(1));
static ONCE: Once = Once::named("runtimes");

/// Runs a test on a separate thread, and fails if it takes longer than two minutes.
fn run_in_time<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || sender.send(test()));
    match receiver.recv_timeout(Duration::from_secs(120)) {
        Ok(value) => value,
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("the test hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            std::panic::resume_unwind(thread.join().map(drop).unwrap_err())
        }
    }
}

/// A paused clock jumps to the next timer whenever the runtime waits for the server.
#[test]
fn with_a_paused_clock_tries_releases_drops_and_once_work() {
    let database = installed();
    let url = database.url();
    let before = Observer::of(&database).sessions();
    run_in_time(move || {
        let mut runtime = Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            // A pool without timeouts, which would end at once under a paused clock.
            let pool = paused(&url);
            for _ in 0..5 {
                let guard = LOCK.try_acquire(&pool).await.unwrap();
                assert!(LOCK.try_acquire(&pool).await.unwrap().is_busy());
                guard.acquired().unwrap().release().await.unwrap();
                let failed: Result<()> = LOCK.with(&pool, async |_conn| Err(Error::TimedOut)).await;
                assert_matches!(failed, Err(Error::TimedOut));
                drop(LOCK.try_acquire(&pool).await.unwrap().acquired().unwrap());
                // The release of a dropped guard runs in a task.
                let guard = loop {
                    if let Attempt::Acquired(guard) = LOCK.try_acquire(&pool).await.unwrap() {
                        break guard;
                    }
                };
                guard.release().await.unwrap();
                let permit = SLOT.try_acquire(&pool).await.unwrap();
                permit.admitted().unwrap().release().await.unwrap();
                drop(SLOT.try_acquire(&pool).await.unwrap().admitted().unwrap());
                let permit = loop {
                    if let Admission::Admitted(permit) = SLOT.try_acquire(&pool).await.unwrap() {
                        break permit;
                    }
                };
                permit.release().await.unwrap();
                let _ = UNITS.check(&pool).await.unwrap();
                let mut conn = pool.get().await.unwrap();
                let done = ONCE.run(&mut conn, async |_conn| Ok::<_, Error>("done"));
                assert_eq!(done.await.unwrap().bytes(), b"done");
            }
        });
    });
    let observer = &mut Observer::of(&database);
    assert_eq!(number(observer.conn(), IN_FLIGHT), 0);
    eventually("no session is left", || observer.sessions() <= before);
}

fn paused(url: &str) -> PgPool {
    PgPool::builder(manager(url)).max_size(3).build().unwrap()
}

#[test]
fn without_timers_an_operation_is_an_error_and_a_drop_frees() {
    let database = installed();
    let pool = pool(&database, 3);
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    let permit = wait(SLOT.acquire(&pool)).unwrap();
    let here = pool.clone();
    run_in_time(move || {
        let mut runtime = Builder::new_current_thread();
        let runtime = runtime.enable_io().build().unwrap();
        runtime.block_on(async {
            drop(guard);
            drop(permit);
            let other = LOCK.key("other");
            assert_matches!(other.try_acquire(&here).await, Err(Error::NoRuntime));
            assert_matches!(
                other.acquire_timeout(&here, HOUR).await,
                Err(Error::NoRuntime)
            );
            assert_matches!(SLOT.try_acquire(&here).await, Err(Error::NoRuntime));
            assert_matches!(
                SLOT.acquire_timeout(&here, HOUR).await,
                Err(Error::NoRuntime)
            );
            assert_matches!(UNITS.check(&here).await, Err(Error::NoRuntime));
            assert_matches!(
                UNITS.acquire_timeout(&here, HOUR).await,
                Err(Error::NoRuntime)
            );
            assert_matches!(check_exclusion(&here).await, Err(Error::NoRuntime));
        });
    });
    let observer = &mut Observer::of(&database);
    observer.assert_free(LOCK.lock_key());
    eventually("the slot is free", || {
        number(observer.conn(), IN_FLIGHT) == 0
    });
    wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
}

#[test]
fn on_a_runtime_that_has_ended_an_operation_is_an_error() {
    let database = installed();
    let pool = pool(&database, 1);
    wait(on_all(&pool, "SELECT 1")).unwrap();
    run_in_time(move || {
        let runtime = Builder::new_multi_thread().enable_all().build().unwrap();
        let handle = runtime.handle().clone();
        runtime.shutdown_background();
        assert_matches!(
            handle.block_on(SLOT.try_acquire(&pool)),
            Err(Error::NoRuntime)
        );
    });
    assert_eq!(number(&mut database.connect(), IN_FLIGHT), 0);
}
