//! The asynchronous half.

#[path = "asynchronous/at_most_once.rs"]
mod at_most_once;
#[path = "asynchronous/cancelled.rs"]
mod cancelled;
#[path = "asynchronous/chaos.rs"]
mod chaos;
#[path = "asynchronous/dropping.rs"]
mod dropping;
#[path = "asynchronous/drops.rs"]
mod drops;
#[cfg(feature = "tracing")]
#[path = "asynchronous/events.rs"]
mod events;
#[path = "asynchronous/fences.rs"]
mod fences;
#[path = "asynchronous/locks.rs"]
mod locks;
#[path = "asynchronous/lost.rs"]
mod lost;
#[path = "asynchronous/migrations.rs"]
mod migrations;
#[path = "asynchronous/panicking_pool.rs"]
mod panicking_pool;
#[path = "asynchronous/places.rs"]
mod places;
#[path = "asynchronous/preparing_pooler.rs"]
mod preparing_pooler;
#[path = "asynchronous/rate_limits.rs"]
mod rate_limits;
#[path = "asynchronous/semaphores.rs"]
mod semaphores;
#[path = "asynchronous/sessions.rs"]
mod sessions;
#[path = "asynchronous/shared_sessions.rs"]
mod shared_sessions;
#[cfg(feature = "testing")]
#[path = "asynchronous/testing.rs"]
mod testing;
#[path = "asynchronous/throttles.rs"]
mod throttles;
#[path = "asynchronous/transactions.rs"]
mod transactions;

use std::future::Future;

/// Runs a future that may be spawned on a runtime of several threads: this does not compile for one that is not `Send`.
fn run<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(async { tokio::spawn(future).await.unwrap() })
}
