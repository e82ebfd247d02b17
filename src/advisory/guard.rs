//! The guard of a session lock.

use super::attempt::Attempt;
use super::holder::{Holder, Pooled};
use crate::error::{Error, Result};
use crate::key::LockKey;
use crate::mode::Mode;
use crate::pool::{Connection, Pool, Reply, debug};

/// A held session lock, or several, with the pooled connection whose session holds it.
///
/// A drop releases the lock, and gives the connection back if the server confirms that. Over r2d2
/// the drop waits for the server; over deadpool and bb8 it leaves the release to a task of the
/// runtime on which the lock was taken. [`release`](Self::release) does the same, and returns what
/// went wrong.
///
/// If the session ends (a killed backend, a restarted server), the lock is free at once, while the
/// work goes on without protection: [`is_held`](Self::is_held) asks, [`release`](Self::release)
/// reports it, and a [`Fence`](crate::Fence) protects data of the database.
#[must_use = "if unused, the lock is released at once"]
pub struct AdvisoryLockGuard<P: Pool>(Holder<Pooled<P>>);

impl<P: Pool> AdvisoryLockGuard<P> {
    pub(super) fn new(mut holder: Holder<Pooled<P>>) -> Self {
        holder.begin_holding();
        Self(holder)
    }

    /// Lends the connection whose session holds the lock, for any statements. A transaction on it
    /// must have ended before the release.
    pub fn conn(&mut self) -> &mut Connection<P> {
        self.0.conn()
    }

    /// Returns what the lock is on, or of several the first in their order.
    pub fn lock_key(&self) -> &LockKey {
        &self.0.held_ref().locks.first().key
    }

    /// Returns the `pg_backend_pid()` of the session that holds the lock.
    pub fn backend_pid(&self) -> i32 {
        self.0.pid()
    }

    /// Asks whether the session still holds the lock. One round trip, to `pg_locks`.
    pub fn is_held(&mut self) -> Reply<'_, P, bool> {
        P::Mode::drive(self.0.is_held())
    }

    /// Draws a number that is larger than those of all earlier holders, for a
    /// [`Fence`](crate::Fence). One round trip, to a sequence of the schema `resource_control`.
    ///
    /// Fails with [`Error::NotInstalled`] without that schema, [`Error::LockLost`] if the session
    /// has ended, and [`Error::SessionMoved`] behind a pooler in transaction mode.
    pub fn fencing_token(&mut self) -> Reply<'_, P, i64> {
        P::Mode::drive(self.0.fencing_token())
    }

    /// Releases the lock, and gives the connection back to the pool. One round trip.
    ///
    /// The lock is free after an error, too, which says what was wrong with the work under it:
    /// [`Error::LockLost`], [`Error::TransactionLeftOpen`], [`Error::SessionMoved`], or
    /// [`Error::ReleaseFailed`].
    pub fn release(mut self) -> Reply<'static, P, ()> {
        P::Mode::drive(async move { self.0.release_and_report("release").await })
    }
}

#[cfg(feature = "r2d2")]
impl AdvisoryLockGuard<crate::pool::PgPool> {
    /// Runs `work` on the connection, releases the lock, and returns the value of `work`.
    ///
    /// After an error of `work` the lock is released as by a drop. A lock that was lost while
    /// `work` succeeded is an error.
    pub fn run<T, E: From<Error>>(
        mut self,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let value = work(self.conn())?;
        self.release()?;
        Ok(value)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> AdvisoryLockGuard<P> {
    /// Runs `work` on the connection, releases the lock, and returns the value of `work`.
    ///
    /// After an error of `work` the lock is released as by a drop. A lock that was lost while
    /// `work` succeeded is an error.
    pub async fn run<T, E: From<Error>>(
        mut self,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let value = work(self.conn()).await?;
        self.release().await?;
        Ok(value)
    }
}

#[cfg(feature = "r2d2")]
impl Attempt<AdvisoryLockGuard<crate::pool::PgPool>> {
    /// Runs `work` if the lock was acquired, and releases it.
    pub fn run<T, E: From<Error>>(
        self,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        match self {
            Self::Acquired(guard) => guard.run(work).map(Attempt::Acquired),
            Self::Busy => Ok(Attempt::Busy),
        }
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Attempt<AdvisoryLockGuard<P>> {
    /// Runs `work` if the lock was acquired, and releases it.
    pub async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        match self {
            Self::Acquired(guard) => guard.run(work).await.map(Attempt::Acquired),
            Self::Busy => Ok(Attempt::Busy),
        }
    }
}

debug!(
    AdvisoryLockGuard | this | locks = this.0.held_ref().locks,
    backend_pid = this.backend_pid()
);
