//! The guard of a session lock.
//!
//! **`guard.conn()` instead of `Deref`.** The purpose of a guard is that the work runs on the
//! guard's connection, and the method says so at the call.

use super::attempt::Attempt;
use super::holder::Holder;
use crate::error::{Error, Result};
use crate::key::LockKey;
use crate::mode::Mode;
use crate::pool::{Checkout, ConnectionOf, Pool, Reply, impl_debug};
#[cfg(feature = "r2d2")]
use crate::session::run_ready;

/// A held session lock (or several), with the pooled connection whose session holds it.
///
/// Run your work on [`conn`](Self::conn): then the work and the unlock use the session that holds
/// the lock.
///
/// Dropping the guard releases the lock. The connection is returned to its pool if the server
/// confirms the release, and is discarded otherwise. With r2d2 the drop waits for the server; with
/// deadpool and bb8 it leaves the release to a task on the runtime where the lock was taken.
/// [`release`](Self::release) does the same, and also returns what went wrong.
///
/// If the session ends (its backend is killed, or the server restarts), the lock is free at once,
/// but your work goes on unprotected. [`is_held`](Self::is_held) asks whether that has happened,
/// [`release`](Self::release) reports it, and a [`Fence`](crate::Fence) protects data in the
/// database.
#[must_use = "if unused, the lock is released at once"]
pub struct AdvisoryLockGuard<P: Pool>(Holder<Checkout<P>>);

impl<P: Pool> AdvisoryLockGuard<P> {
    pub(super) fn new(mut holder: Holder<Checkout<P>>) -> Self {
        holder.begin_holding();
        Self(holder)
    }

    /// Returns the connection whose session holds the lock, for any statements.
    ///
    /// End every transaction on it before you release the lock.
    pub fn conn(&mut self) -> &mut ConnectionOf<P> {
        self.0.conn()
    }

    /// Returns the key of the lock; of several locks, the first in the order of their numbers.
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

    /// Draws a fencing token, which is larger than the tokens of all earlier holders.
    ///
    /// Pass it to a [`Fence`](crate::Fence). One round trip, to a sequence of the schema
    /// `resource_control`.
    ///
    /// Fails with [`Error::NotInstalled`] if that schema is missing, [`Error::LockLost`] if the
    /// session has ended, and [`Error::SessionMoved`] behind a pooler in transaction mode.
    pub fn fencing_token(&mut self) -> Reply<'_, P, i64> {
        P::Mode::drive(self.0.fencing_token())
    }

    /// Releases the lock, and returns the connection to the pool. One round trip.
    ///
    /// An error says what was wrong with the work under the lock: [`Error::LockLost`],
    /// [`Error::TransactionLeftOpen`], [`Error::SessionMoved`], or [`Error::ReleaseFailed`]. The
    /// lock is free after an error, too, except after [`Error::SessionMoved`], where another
    /// session may still hold it.
    pub fn release(mut self) -> Reply<'static, P, ()> {
        P::Mode::drive(async move { self.0.release_and_report("release").await })
    }
}

#[cfg(feature = "r2d2")]
impl<M> AdvisoryLockGuard<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Runs `work` on the connection, releases the lock, and returns the value of `work`.
    ///
    /// If `work` fails, its error is returned, and what it has left open is rolled back. If `work`
    /// succeeds but the release fails, for example because the lock was lost, that is an error. In
    /// each case the lock is free when this returns, unless the server is silent for two seconds:
    /// then the connection is closed, which frees the lock within another second.
    pub fn run<T, E: From<Error>>(
        mut self,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let outcome = work(self.conn());
        run_ready(self.0.release_after(outcome))
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> AdvisoryLockGuard<P> {
    /// Runs `work` on the connection, releases the lock, and returns the value of `work`. In
    /// everything else like the blocking `run`; a future that is dropped releases as a drop of the
    /// guard.
    pub async fn run<T, E: From<Error>>(
        mut self,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let outcome = work(self.conn()).await;
        self.0.release_after(outcome).await
    }
}

#[cfg(feature = "r2d2")]
impl<M> Attempt<AdvisoryLockGuard<diesel::r2d2::Pool<M>>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Runs `work` and releases the lock, if the lock was acquired.
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
    /// Runs `work` and releases the lock, if the lock was acquired.
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

impl_debug!(
    AdvisoryLockGuard | this | locks = this.0.held_ref().locks,
    backend_pid = this.backend_pid()
);
