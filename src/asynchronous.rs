//! The primitives for asynchronous connections: those of diesel-async, with its pools deadpool and bb8.
//!
//! The handles have the names, the constructors and the guarantees of the blocking half. Keys, outcomes, errors and the queries
//! of [`monitor`](crate::monitor) are the same types.

#[cfg(feature = "migrations")]
pub mod migrations;
pub mod monitor;
#[cfg(feature = "testing")]
pub mod testing;

pub use crate::advisory::asynchronous::{
    AdvisoryLock, AdvisoryLockGuard, Borrowed, BorrowedGuard, GuardConnection, Pooled, PooledGuard,
    Watch,
};
pub use crate::fence::asynchronous::Fence;
pub use crate::pool::asynchronous::{Pool, PoolConnection};
pub use crate::rate_limit::asynchronous::RateLimit;
pub use crate::rate_limit::local::asynchronous::LocalRateLimit;
pub use crate::semaphore::asynchronous::{Permit, Semaphore};
pub use crate::sessions::asynchronous::probe_sessions;
pub use crate::throttle::asynchronous::Throttle;
pub use crate::throttle::sync::asynchronous::{sync, sync_intervals, sync_intervals_on, sync_on};
