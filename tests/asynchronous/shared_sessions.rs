//! Whether the connections of a pool have their own sessions.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::pooled_connection::{AsyncDieselConnectionManager, bb8};
use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool, probe_sessions};
use diesel_interlock::{Error, Sessions};
use workbench::Database;

use crate::dropping::{assert_full_strength, poll_times};
use crate::run;
use crate::transactions::{count, freed};

static LOCK: AdvisoryLock = AdvisoryLock::named("x");

const OPEN: &str = "SELECT count(*) FROM pg_stat_activity \
     WHERE datname = current_database() AND state LIKE 'idle in transaction%'";

async fn own_sessions<P: Pool>(database: Database, pool: P) {
    let observer = &mut database.connect();
    assert_eq!(probe_sessions(&pool).await.unwrap(), Sessions::Own);
    assert_eq!(count(observer, OPEN), 0);
    let first = pool.check_out().await.unwrap();
    let second = pool.check_out().await.unwrap();
    drop(second);
    assert_eq!(probe_sessions(&pool).await.unwrap(), Sessions::Unknown);
    drop(first);

    let mut polls = 0;
    loop {
        let probed = poll_times(probe_sessions(&pool), polls).await;
        for _ in 0..1000 {
            if count(observer, OPEN) == 0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(count(observer, OPEN), 0, "after {polls} polls");
        if let Some(probed) = probed {
            assert_ne!(probed.unwrap(), Sessions::Shared);
            break;
        }
        polls += 1;
    }
    assert!(polls >= 5, "{polls}");

    let mut left = pool.check_out().await.unwrap();
    left.batch_execute("BEGIN; CREATE TABLE leftover ()")
        .await
        .unwrap();
    let busy = pool.check_out().await.unwrap();
    drop(left);
    let probed = probe_sessions(&pool).await;
    assert!(
        matches!(
            probed,
            Err(Error::TransactionInPool) | Ok(Sessions::Unknown)
        ),
        "{probed:?}"
    );
    drop(busy);
}

#[test]
fn each_connection_of_a_pool_has_its_own_session() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(2);
        own_sessions(database, pool).await;
        let database = Database::new();
        let pool = database.bb8(2);
        own_sessions(database, pool).await;
    });
}

/// The comparison before the first lock of a connection must not hide that a session has ended.
#[test]
fn a_lock_is_taken_although_all_sessions_of_the_pool_ended() {
    run(async {
        let database = Database::new();
        let observer = &mut database.connect();
        for _ in 0..10 {
            let pool = database.deadpool(2);
            let (one, two) = (pool.get().await.unwrap(), pool.get().await.unwrap());
            drop((one, two));
            let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                 WHERE datname = current_database() AND pid <> pg_backend_pid()";
            diesel::sql_query(end).execute(observer).unwrap();
            // Each of the two sessions has ended: the first is found by the first try, the second by the second.
            let guard = match LOCK.acquire(&pool).await {
                Ok(guard) => guard,
                Err(error) => {
                    assert!(matches!(error, Error::Database(_)), "{error:?}");
                    LOCK.acquire(&pool).await.unwrap()
                }
            };
            guard.release().await.unwrap();
            freed(observer).await;
        }
    });
}

/// Polls a probe at most so often, and returns it.
fn polled<'a, P: Pool>(
    runtime: &tokio::runtime::Runtime,
    pool: &'a P,
    polls: usize,
) -> Pin<Box<dyn Future<Output = Result<Sessions, Error>> + 'a>> {
    let mut probe = Box::pin(probe_sessions(pool));
    let mut polled = 0;
    runtime.block_on(poll_fn(|context| {
        polled += 1;
        match probe.as_mut().poll(context) {
            Poll::Pending if polled < polls => Poll::Pending,
            Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
        }
    }));
    probe
}

/// bb8 opens another connection, in a task, when it is given back one that is broken, is older than `max_lifetime`, or is dropped
/// while the thread panics.
#[test]
fn a_probe_is_dropped_outside_a_runtime_without_a_panic() {
    let database = Database::new();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    for (lifetime, panics) in [
        (None, false),
        (None, true),
        (Some(Duration::from_nanos(1)), false),
        (Some(Duration::from_nanos(1)), true),
    ] {
        for polls in 1..12 {
            let manager =
                AsyncDieselConnectionManager::<AsyncPgConnection>::new(database.async_url());
            let pool = bb8::Pool::builder()
                .max_size(3)
                .min_idle(Some(2))
                .max_lifetime(lifetime);
            let pool = runtime.block_on(pool.build(manager)).unwrap();
            let probe = polled(&runtime, &pool, polls);
            let panicked = catch_unwind(AssertUnwindSafe(|| {
                let _probe = probe;
                if panics {
                    resume_unwind(Box::new("a panic of the caller"));
                }
            }));
            assert_eq!(panicked.is_err(), panics, "{lifetime:?}, {polls} polls");
            // A pool that had panicked would have lost the connection.
            runtime.block_on(assert_full_strength(&pool, 3));
            let _entered = runtime.enter();
            drop(pool);
        }
    }
}
