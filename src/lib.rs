//! Locks for Diesel applications, coordinated by the PostgreSQL that they already run.

mod advisory;
mod attempt;
mod error;
pub mod functions;
mod key;
#[cfg(feature = "migrations")]
pub mod migrations;
#[cfg(feature = "r2d2")]
mod pool;
#[cfg(feature = "testing")]
pub mod testing;
mod transaction;

#[cfg(feature = "r2d2")]
pub use crate::advisory::PooledGuard;
pub use crate::advisory::{AdvisoryLock, AdvisoryLockGuard, BorrowedGuard, Lease};
pub use crate::attempt::Attempt;
pub use crate::error::{Error, Result};
pub use crate::key::{LockId, LockKey, fnv1a};
#[cfg(feature = "r2d2")]
pub use crate::pool::{PgPool, PooledPgConnection};
