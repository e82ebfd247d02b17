//! The asynchronous half under the names of the blocking one.
//!
//! Each method blocks on the future of the asynchronous method with its name, so the tests of `tests/it` can call it. A
//! future is polled on the thread of the test, and what it spawns runs on a runtime of the process.

#![allow(dead_code, unused_imports)] // the files that are not shared use the rest

mod cluster;
mod connection;
mod database;
mod fences;
mod locks;
pub(crate) mod migrations;
pub(crate) mod monitor;
mod pool;
mod rate_limits;
mod semaphores;
mod sessions;
#[cfg(feature = "testing")]
pub(crate) mod testing;
mod throttles;

use std::future::Future;
use std::sync::OnceLock;

pub(crate) use diesel_interlock::asynchronous::Watch;
pub(crate) use diesel_interlock::*;
use tokio::runtime::Runtime;
pub(crate) use workbench::{RoundTrips, StopMode};

pub(crate) use self::cluster::Cluster;
pub(crate) use self::connection::{AnsiTransactionManager, PgConnection, is_broken, roll_back};
pub(crate) use self::database::Database;
pub(crate) use self::fences::Fence;
pub(crate) use self::locks::{AdvisoryLock, AdvisoryLockGuard, BorrowedGuard, PooledGuard};
pub(crate) use self::pool::{
    PgPool, PooledPgConnection, idle_connections, instrumented_pool, pool_in_test_transactions,
    pool_that_runs, pool_with_patience, silent_pool, unchecked_pool, unchecked_pool_and_timeouts,
};
pub(crate) use self::rate_limits::{
    LocalRateLimit, RateLimit, cancel, cancel_on, give_back, give_back_on,
};
pub(crate) use self::semaphores::{Permit, Semaphore};
pub(crate) use self::sessions::probe_sessions;
pub(crate) use self::throttles::{Throttle, sync, sync_intervals};

/// What a file of tests imports as a whole.
pub(crate) mod prelude {
    pub(crate) use diesel::prelude::*;

    pub(crate) use super::connection::PgConnection;
    pub(crate) use super::locks::RunAttempt;
    pub(crate) use super::semaphores::RunAdmission;
}

/// Whether a future that is dropped, and a guard or permit that is dropped, leave work to a task of the runtime.
pub(crate) const IS_ASYNCHRONOUS: bool = true;

pub(crate) use crate::{COMPARES_SESSIONS, IS_FAIR};

/// A stack for one of a thousand threads that call the crate, in bytes. Without optimization, futures take more than calls.
pub(crate) const SMALL_STACK: usize = 2 * 1024 * 1024;

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime can be made")
    })
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(future)
}

/// Runs a closure of a test, which blocks, inside a future.
fn blocking<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}
