//! The guard of a session lock on an asynchronous connection.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;
use futures_core::Stream;
use tokio::time::timeout;

use super::pinned::{self, GuardConnection};
use super::watch::Watch;
use crate::advisory::operations::{self, HeldLock};
use crate::advisory::watched::Watches;
use crate::attempt::Attempt;
use crate::error::{Error, Result};
use crate::key::LockKey;
use crate::pool::asynchronous::Pool;
use crate::runtime;

/// A held session lock, together with the connection whose session holds it.
///
/// Works as the guard of the blocking half, with `async` methods.
///
/// # Dropping
///
/// A drop cannot wait. The guard of a pooled connection moves it to a task on the runtime on which the lock was acquired. The
/// task releases the lock in one round trip, and gives the connection back, or discards it as the blocking half does. If a
/// statement of the caller's is still running, because its future was dropped, the task cancels it after 20 milliseconds, or
/// after four round trips if that is longer, and discards the connection. A current-thread runtime that nobody drives runs no
/// task, so the lock stays held until the runtime is driven again or dropped.
///
/// A guard on a borrowed connection queues the unlock behind the statements that were sent, and does not wait for the reply.
/// In an aborted transaction the unlock fails, and the session keeps the lock: roll back first, or use
/// [`release`](Self::release), which then leaves the connection marked as broken.
///
/// [`release`](Self::release) waits, and returns the error.
#[must_use = "if unused the lock is released at once"]
#[clippy::has_significant_drop]
pub struct AdvisoryLockGuard<C: GuardConnection> {
    pinned: C,
    held: HeldLock,
    since: Instant,
    watches: Watches,
    is_released: bool,
    /// Whether an event tells of the release.
    is_recorded: bool,
}

impl<C: GuardConnection> AdvisoryLockGuard<C> {
    pub(super) fn new(mut pinned: C, held: HeldLock) -> Self {
        pinned.holds(&held);
        Self {
            pinned,
            held,
            since: Instant::now(),
            watches: Watches::default(),
            is_released: false,
            is_recorded: false,
        }
    }

    /// Lends the connection whose session holds the lock.
    ///
    /// Any statement may run on it, including transactions, which must have ended when the guard is released. After
    /// `pg_advisory_unlock_all()` or `DISCARD ALL` the lock is lost, and [`release`](Self::release) returns an error.
    pub fn conn(&mut self) -> &mut AsyncPgConnection {
        self.pinned.conn()
    }

    #[cfg(feature = "migrations")]
    pub(crate) fn conn_ref(&self) -> &AsyncPgConnection {
        self.pinned.conn_ref()
    }

    /// Returns the key of the lock.
    pub fn key(&self) -> &LockKey {
        &self.held.key
    }

    /// Returns the `pg_backend_pid()` of the session that holds the lock, as `pg_locks` and `pg_stat_activity` show it.
    pub fn backend_pid(&self) -> i32 {
        self.held.pid
    }

    /// Queries whether the session still holds the lock, in one round trip.
    ///
    /// `false` means that the lock was lost: the session ended, or some code unlocked it there. `true` was correct when the
    /// server replied, and may be outdated since.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] if the query failed, which says nothing about the lock.
    pub async fn is_held(&mut self) -> Result<bool> {
        let (mut session, _) = self.pinned.session();
        operations::is_held(&mut session, &self.held).await
    }

    /// Returns when the session that holds the lock has ended, and the lock with it. No round trip: the connection reports its end,
    /// usually within milliseconds. Without the features `deadpool` and `bb8` there is one round trip per second.
    ///
    /// It discards the notifications (`LISTEN`) that arrive on the connection meanwhile. If the connection was made by
    /// `AsyncPgConnection::try_from`, which reports no end, it is checked once a second.
    ///
    /// It reports neither an unlock by other code nor a network that was cut. [`watch`](Self::watch) does. Dropping the future
    /// changes nothing. Outside a runtime of tokio, nothing is checked once a second.
    pub async fn lost(&mut self) {
        let conn = self.pinned.conn();
        let has_timers = runtime::current().is_ok();
        loop {
            let ended = async {
                let mut notifications = pin!(conn.notifications_stream());
                // An error is the last item.
                while let Some(Ok(_)) =
                    poll_fn(|context| notifications.as_mut().poll_next(context)).await
                {
                }
            };
            if !has_timers {
                return ended.await;
            }
            if timeout(Duration::from_secs(1), ended).await.is_ok() || is_closed(conn).await {
                return;
            }
        }
    }

    /// Watches the lock from now on. A task queries it at the interval `every`, over a connection from the pool, and the [`Watch`]
    /// returns the last result. Use this instead of [`lost`](Self::lost) if the work uses [`conn`](Self::conn), or to detect what a
    /// connection does not report: a network that was cut, or an unlock by other code.
    ///
    /// This call takes one round trip, which queries whether the lock is held now. Each query of the task takes one more. It waits
    /// at most a second for a connection that is in use, and as long as the pool allows for one that is opened. If it gets none, or
    /// fails, the task tries again after at most 100 milliseconds. An `every` below 10 milliseconds counts as 10 milliseconds.
    ///
    /// Pass a pool of the same database on the primary. On a standby the lock is not found, and counts as lost.
    ///
    /// # Errors
    ///
    /// [`Error::Database`] if the query failed.
    pub async fn watch<P: Pool>(&mut self, pool: &P, every: Duration) -> Result<Watch> {
        let runtime = runtime::current()?;
        let (mut session, _) = self.pinned.session();
        let watch = Watch::begin(&mut session, &runtime, pool, &self.held, every).await?;
        self.watches.add(watch.watched());
        Ok(watch)
    }

    /// Returns the fencing token: a number that is greater than that of every earlier holder of the lock.
    ///
    /// As in the blocking half. The token comes with the lock if the lock is
    /// [`fenced`](crate::asynchronous::AdvisoryLock::fenced) and was free. Otherwise the first call draws it, in one round trip.
    ///
    /// # Errors
    ///
    /// - [`Misplaced::TokenInTransaction`](crate::error::Misplaced::TokenInTransaction) if a transaction is open on the
    ///   connection when the token is to be drawn, even by a plain SQL `BEGIN`.
    /// - [`Error::LockLost`] if the lock is no longer held.
    /// - [`Error::Database`] if the statement failed.
    pub async fn fencing_token(&mut self) -> Result<i64> {
        let (mut session, _) = self.pinned.session();
        operations::fencing_token(&mut session, &mut self.held).await
    }

    /// Runs `work` on the connection that holds the lock, releases the lock, and returns the value of `work`.
    ///
    /// The lock is released on every way out: a value, an error, a panic, or when the future is dropped. If `work` succeeded under
    /// a lock that was lost, that is an error, such as [`Error::LockLost`]. `work` may drop the future of a statement and then fail
    /// while the statement still runs. With a connection of a pool, this then returns within a second, and a task cancels the
    /// statement, as after a drop of the guard.
    ///
    /// # Errors
    ///
    /// The error of `work`, and those of [`release`](Self::release).
    pub async fn run<T, E, F>(mut self, work: F) -> Result<T, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let worked = work(self.conn()).await;
        // Not by a drop, so that the lock is mostly free when this returns, also after an error.
        match (worked, self.pinned.patience()) {
            (Ok(value), _) => {
                self.release().await?;
                Ok(value)
            }
            (Err(error), Some(patience)) => {
                self.release_within(patience).await;
                Err(error)
            }
            (Err(error), None) => {
                let _ = self.release().await;
                Err(error)
            }
        }
    }

    /// Releases the lock after the work has failed. A statement may still run whose future the work dropped, such as by a
    /// timeout. If the release has to wait for it for so long, a task cancels the statement.
    async fn release_within(mut self, patience: Duration) {
        if runtime::current().is_err() {
            // Without a runtime there is no timer.
            let _ = self.release().await;
            return;
        }
        self.watches.releasing(|_| ());
        let release = pinned::release(&mut self.pinned, &self.held, &self.watches);
        let release = timeout(patience, release);
        self.is_released = true;
        let released = release.await;
        self.is_recorded = true;
        match released {
            Ok(released) => self.held.record_release(self.since, &released),
            Err(_) => {
                self.pinned.set_waiting(true);
                self.held.record_deferral(self.since);
            }
        }
    }

    /// Releases the lock and gives the connection back.
    ///
    /// One round trip, and one more to prepare the statement, once per connection. If the guard has lent its connection, the
    /// release sends another statement, which is prepared separately. Waits for statements that still run on the connection. The
    /// guard ends even if this returns an error. After [`Error::ReleaseFailed`] on a borrowed connection, the session may still
    /// hold the lock. If the future is dropped, the lock is released as by a drop of the guard.
    ///
    /// # Errors
    ///
    /// - [`Error::LockLost`] if the lock was no longer held, or its session had ended.
    /// - [`Error::SessionMoved`] if a different session replied than the one that took the lock.
    /// - [`Error::TransactionLeftOpen`] if a transaction was left open on the connection.
    /// - [`Error::ReleaseFailed`] if the unlock failed, as it does in an aborted transaction.
    pub async fn release(mut self) -> Result<()> {
        self.is_released = true;
        self.watches.releasing(|_| ());
        let released = pinned::release(&mut self.pinned, &self.held, &self.watches).await;
        self.is_recorded = true;
        self.held.record_release(self.since, &released);
        released
    }
}

impl<C: GuardConnection> Attempt<AdvisoryLockGuard<C>> {
    /// Runs `work` under the lock if it was acquired, as [`AdvisoryLockGuard::run`] does. Returns [`Attempt::Busy`] otherwise,
    /// without running `work`.
    ///
    /// # Errors
    ///
    /// The error of `work`, and those of [`release`](AdvisoryLockGuard::release).
    pub async fn run<T, E, F>(self, work: F) -> Result<Attempt<T>, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        match self {
            Attempt::Acquired(guard) => guard.run(work).await.map(Attempt::Acquired),
            Attempt::Busy => Ok(Attempt::Busy),
        }
    }
}

impl<C: GuardConnection> Drop for AdvisoryLockGuard<C> {
    fn drop(&mut self) {
        if self.is_released {
            // Before the connection is back in its pool, because the next guard on this session must not share the token.
            self.held.fencing_token = None;
            if !self.is_recorded {
                // The future of the release was dropped.
                self.held.record_deferral(self.since);
            }
        } else {
            self.watches.releasing(|_| ());
            let (held, watches) = (self.held.take(), std::mem::take(&mut self.watches));
            self.pinned.release_later(held, self.since, watches);
        }
    }
}

impl<C: GuardConnection> fmt::Debug for AdvisoryLockGuard<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdvisoryLockGuard")
            .field("key", &self.held.key)
            .field("mode", &self.held.lock.mode)
            .field("backend_pid", &self.held.pid)
            .finish_non_exhaustive()
    }
}

/// Returns whether the connection is closed. No round trip.
#[cfg(any(feature = "deadpool", feature = "bb8"))]
async fn is_closed(conn: &mut AsyncPgConnection) -> bool {
    use diesel_async::pooled_connection::PoolableConnection;
    use diesel_async::{AnsiTransactionManager, TransactionManager};

    // A connection inside a transaction is broken for a pool, too.
    let status = AnsiTransactionManager::transaction_manager_status_mut(conn);
    let transaction = std::mem::take(status);
    let is_closed = conn.is_broken();
    *AnsiTransactionManager::transaction_manager_status_mut(conn) = transaction;
    is_closed
}

/// Returns whether the connection is closed. Without a pool diesel-async does not tell, so this takes one round trip.
#[cfg(not(any(feature = "deadpool", feature = "bb8")))]
async fn is_closed(conn: &mut AsyncPgConnection) -> bool {
    use diesel_async::SimpleAsyncConnection;

    conn.batch_execute("").await.is_err()
}
