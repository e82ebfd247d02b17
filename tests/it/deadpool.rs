//! The suite over the asynchronous half, with connections of deadpool.

#![allow(dead_code)] // some helpers serve only files that are not shared

#[macro_use]
#[path = "asynchronous/suite.rs"]
mod suite;
#[path = "asynchronous/half.rs"]
mod half;

use std::time::Duration;

use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_async::pooled_connection::deadpool::Pool;

/// The pool under test.
type AsyncPool = Pool<AsyncPgConnection>;

/// Makes a pool of at most `size` connections, from which a checkout waits for at most `patience`. It lends the
/// connection that came back last, as r2d2 does. The manager says whether it checks a connection.
fn make_pool(
    manager: AsyncDieselConnectionManager<AsyncPgConnection>,
    size: u32,
    patience: Duration,
    _: bool,
) -> AsyncPool {
    Pool::builder(manager)
        .max_size(size as usize)
        .wait_timeout(Some(patience))
        .runtime(deadpool::Runtime::Tokio1)
        .queue_mode(deadpool::managed::QueueMode::Lifo)
        .build()
        .expect("the settings of the pool are complete")
}

/// Whether a session is compared with another of the pool before its first lock.
const COMPARES_SESSIONS: bool = true;

/// Whether the pool lends a connection to the caller that has waited longest.
const IS_FAIR: bool = true;

/// How many connections of the pool are not in use.
fn idle_connections(pool: &AsyncPool) -> u32 {
    u32::try_from(pool.status().available).unwrap_or_default()
}

suite!();
