//! Where a permit may be dropped.

use std::pin::Pin;
use std::task::Poll;

use tokio::runtime::{Builder, Runtime};

use super::*;

fn multi_thread() -> Runtime {
    Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Waits until no slot is taken. `drive` drives a runtime that does not drive itself.
#[track_caller]
fn free(database: &Database, mut drive: impl FnMut()) {
    let end = Instant::now() + Duration::from_secs(20);
    while in_flight(database) > 0 {
        assert!(Instant::now() < end, "not within twenty seconds");
        drive();
    }
}

/// Drops a permit of each runtime in each place.
fn everywhere<P: Pool>(pool: impl Fn(&Database) -> P) {
    let database = database();
    for (runtime, drives_itself) in [(multi_thread(), true), (current_thread(), false)] {
        let pool = runtime.block_on(async { pool(&database) });
        let held = || runtime.block_on(permit(&ONE, &pool));
        let brief = || {
            if !drives_itself {
                runtime.block_on(async { sleep(Duration::from_millis(5)).await });
            }
        };

        drop(held()); // outside a runtime
        free(&database, brief);

        let permit = held();
        std::thread::spawn(move || drop(permit)).join().unwrap();
        free(&database, brief);

        let permit = held();
        let dropped = runtime.spawn_blocking(move || drop(permit));
        runtime.block_on(dropped).unwrap();
        free(&database, brief);

        let permit = held();
        current_thread().block_on(async move { drop(permit) });
        free(&database, brief);

        let permit = held();
        let panicked = runtime.spawn(async move {
            let _permit = permit;
            std::panic::resume_unwind(Box::new("a panic of the work"));
        });
        assert!(runtime.block_on(panicked).unwrap_err().is_panic());
        free(&database, brief);

        let permit = held();
        let aborted = runtime.spawn(async move {
            let _permit = permit;
            std::future::pending::<()>().await;
        });
        runtime.block_on(async {
            tokio::task::yield_now().await;
            aborted.abort();
            assert!(aborted.await.unwrap_err().is_cancelled());
        });
        free(&database, brief);

        // A future that is dropped in flight, outside its runtime.
        for polls in 1..4 {
            let mut claim = Box::pin(ONE.try_acquire(&pool));
            runtime.block_on(async {
                let mut polled = 0;
                std::future::poll_fn(|context| {
                    polled += 1;
                    let is_ready = claim.as_mut().poll(context).is_ready();
                    if is_ready || polled == polls {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
            });
            drop(claim);
            std::thread::sleep(Duration::from_millis(2));
            brief();
            free(&database, brief);
        }
    }
}

#[test]
fn a_permit_of_deadpool_is_released_wherever_it_is_dropped() {
    everywhere(|database| database.deadpool(2));
}

#[test]
fn a_permit_of_bb8_is_released_wherever_it_is_dropped() {
    everywhere(|database| database.bb8(2));
}

/// Drops permits and claims in flight with their runtime, and after it.
fn with_its_runtime<P: Pool>(pool: impl Fn(&Database) -> P) {
    let brief = Semaphore::named("brief", 8, Duration::from_secs(2));
    for make in [multi_thread, current_thread] {
        let database = database();
        let runtime = make();
        let pool = runtime.block_on(async { pool(&database) });
        let (inside, outside, pending) = runtime.block_on(async {
            let pending = brief.claim_in_flight(&pool).await;
            (
                permit(&brief, &pool).await,
                permit(&brief, &pool).await,
                pending,
            )
        });
        drop(runtime.spawn(async move {
            let _inside = inside;
            std::future::pending::<()>().await;
        }));
        let end =
            "SELECT count(*) FROM resource_control.service_request WHERE completed_at IS NOT NULL";
        let before = number(&mut database.connect(), end);
        drop(runtime);
        drop(outside);
        drop(pending);
        assert!(in_flight(&database) <= 3);
        // They end by their timeout, and nothing else does.
        free(&database, || {
            std::thread::sleep(Duration::from_millis(20));
        });
        assert!(number(&mut database.connect(), end) <= before + 2);
    }
}

type Claim<'a, P> = Pin<Box<dyn Future<Output = Result<Admission<Permit<P>>, Error>> + 'a>>;

trait ClaimInFlight {
    async fn claim_in_flight<'a, P: Pool>(&'a self, pool: &'a P) -> Claim<'a, P>;
}

impl ClaimInFlight for Semaphore {
    /// Returns the future of a claim that was sent.
    async fn claim_in_flight<'a, P: Pool>(&'a self, pool: &'a P) -> Claim<'a, P> {
        permit(self, pool).await.release().await.unwrap(); // so that a connection is open
        loop {
            let mut claim: Claim<'a, P> = Box::pin(self.try_acquire(pool));
            let polled = std::future::poll_fn(|context| Poll::Ready(claim.as_mut().poll(context)));
            match polled.await {
                Poll::Pending => return claim,
                // The server may reply before the future is polled to its end.
                Poll::Ready(claimed) => {
                    let permit = claimed.unwrap().admitted().unwrap();
                    permit.release().await.unwrap();
                }
            }
        }
    }
}

#[test]
fn a_permit_of_deadpool_that_outlives_its_runtime_times_out() {
    with_its_runtime(|database| database.deadpool(3));
}

#[test]
fn a_permit_of_bb8_that_outlives_its_runtime_times_out() {
    with_its_runtime(|database| database.bb8(3));
}

/// The exception: the task that releases the permit does not run.
#[test]
fn a_current_thread_runtime_that_nobody_drives_releases_nothing_until_it_is_driven() {
    let database = database();
    let runtime = current_thread();
    let pool = database.deadpool(1);
    drop(runtime.block_on(permit(&ONE, &pool)));
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(in_flight(&database), 1);
    free(&database, || {
        runtime.block_on(async { sleep(Duration::from_millis(1)).await });
    });
}

#[test]
fn a_runtime_that_nobody_drives_does_not_stop_the_releases_of_others() {
    let database = database();
    let many = Semaphore::named("not driven", 20, LONG);
    let not_driven = current_thread();
    let exhausted = database.deadpool(1);
    let _only = not_driven.block_on(async {
        for _ in 0..20 {
            drop(permit(&many, &exhausted).await);
        }
        taken(&database, 0).await;
        let permits: Vec<_> = {
            let mut permits = Vec::new();
            for _ in 0..20 {
                permits.push(permit(&many, &exhausted).await);
            }
            permits
        };
        let only = exhausted.check_out().await.unwrap();
        drop(permits);
        // The tasks begin, and wait for the connection.
        sleep(Duration::from_millis(50)).await;
        only
    });
    run(async move {
        let pool = database.deadpool(2);
        let other = permit(&ONE, &pool).await;
        let begun = Instant::now();
        drop(other);
        taken(&database, 20).await;
        assert!(begun.elapsed() < Duration::from_secs(5));
    });
}

/// A runtime without timers claims and releases. Only a wait needs them.
#[test]
fn a_runtime_without_timers_is_an_error_before_anything_is_sent() {
    let database = database();
    let runtime = Builder::new_current_thread().enable_io().build().unwrap();
    let pool = database.deadpool(1);
    runtime.block_on(async {
        let tried = ONE.try_acquire(&pool).await;
        assert!(matches!(tried, Err(Error::NoRuntime)), "{tried:?}");
    });
    assert_eq!(in_flight(&database), 0);
}
