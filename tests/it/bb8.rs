//! The suite over the asynchronous half, with connections of bb8.

#![allow(dead_code)] // some helpers serve only files that are not shared

#[macro_use]
#[path = "asynchronous/suite.rs"]
mod suite;
#[path = "asynchronous/half.rs"]
mod half;

use std::time::Duration;

use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_async::pooled_connection::bb8::Pool;

/// The pool under test.
type AsyncPool = Pool<AsyncPgConnection>;

/// Makes a pool of at most `size` connections, from which a checkout waits for at most `patience`. It lends the
/// connection that came back last, as r2d2 does. Called inside a runtime.
fn make_pool(
    manager: AsyncDieselConnectionManager<AsyncPgConnection>,
    size: u32,
    patience: Duration,
    is_checked: bool,
) -> AsyncPool {
    Pool::builder()
        .max_size(size)
        .test_on_check_out(is_checked)
        .queue_strategy(bb8::QueueStrategy::Lifo)
        .connection_timeout(patience)
        .build_unchecked(manager)
}

/// Whether a session is compared with another of the pool before its first lock. Nothing identifies a connection of bb8.
const COMPARES_SESSIONS: bool = false;

/// Whether the pool lends a connection to the caller that has waited longest. In bb8 one that has just given it back may be first.
const IS_FAIR: bool = false;

/// How many connections of the pool are not in use.
fn idle_connections(pool: &AsyncPool) -> u32 {
    pool.state().idle_connections
}

suite!();
