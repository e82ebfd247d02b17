//! The guard of a session lock.

use std::fmt;
#[cfg(feature = "r2d2")]
use std::time::Duration;
use std::time::Instant;

use diesel::pg::PgConnection;

use super::discard::{GuardConnection, PinnedConnection};
use super::operations::{self, HeldLock};
#[cfg(any(feature = "r2d2", feature = "async"))]
use super::waiter::LocalHold;
#[cfg(feature = "r2d2")]
use super::watch::{self, Watch};
#[cfg(feature = "r2d2")]
use super::watched::Watches;
use crate::attempt::Attempt;
use crate::error::{Error, Result};
use crate::key::LockKey;
use crate::panics::caught;
#[cfg(feature = "r2d2")]
use crate::pool::PgPool;
use crate::session::now;

/// A held session lock, together with the connection whose session holds it.
///
/// PostgreSQL releases a session lock only on the session that took it. So the guard owns the pooled connection or borrows
/// the caller's, and lends it as [`conn`](Self::conn). The protected work runs on the same session and
/// needs no second connection, which a pool full of waiters could not provide.
///
/// An [`AdvisoryLock`](crate::AdvisoryLock) creates it.
///
/// # Release
///
/// [`release`](Self::release) unlocks in one round trip, reports a lock that was lost, and gives the connection back.
/// Dropping the guard does the same, but drops the error. [`run`](Self::run) does some work and then releases.
///
/// The unlock runs on the session that took the lock, and on no other:
/// ```sql
/// SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock($2) END
/// ```
///
/// A pooled connection goes back to its pool only if the unlock certainly succeeded. Otherwise it is discarded: the server
/// ends its session within milliseconds, which frees the lock. This covers an aborted transaction, a transaction left open
/// (even by a `BEGIN` that Diesel does not know of), a killed backend, a restarted server, and a panic.
///
/// # Borrowed connections
///
/// A borrowed connection cannot be discarded, so a failed unlock is repaired where possible:
/// - If the caller's plain SQL `BEGIN` is aborted, it is rolled back and the unlock is repeated.
/// - If a transaction of Diesel's is aborted, only the caller can roll it back. The session keeps the lock, the connection is
///   marked as broken, and [`release`](Self::release) returns [`Error::ReleaseFailed`].
/// - If the unlock failed for another reason and the session still holds the lock, the session is ended.
///
/// **Do not use a connection again after [`Error::ReleaseFailed`].** Diesel clears the mark with the next statement that succeeds,
/// and a pool that lent the connection would take it back with the lock. Drop it. With deadpool, take it out of the pool first,
/// with `Object::take`.
///
/// # Transactions
///
/// The compiler refuses to drop the guard inside a transaction of its own connection:
/// ```compile_fail,E0505
/// # use diesel::prelude::*;
/// # use diesel_interlock::{Error, PooledGuard};
/// fn releases_too_early(mut guard: PooledGuard) -> Result<(), Error> {
///     guard.conn().transaction(|_| {
///         drop(guard);
///         Ok(())
///     })
/// }
/// ```
///
/// # Blocking
///
/// Dropping a guard waits for the server's reply to the unlock. On a network that loses packets this takes as long as the
/// connection string's `tcp_user_timeout` and `keepalives_*` settings allow.
///
/// # Lost locks
///
/// If the session ends (a killed backend, a restarted server), the server frees the lock at once. After a cut of the network it
/// frees the lock when TCP notices the cut. The code that relies on the guard then continues unprotected.
/// [`is_held`](Self::is_held) and [`watch`](Self::watch) detect this.
#[must_use = "if unused the lock is released at once"]
#[clippy::has_significant_drop]
pub struct AdvisoryLockGuard<C: GuardConnection> {
    pinned: PinnedConnection<C>,
    held: HeldLock,
    since: Instant,
    #[cfg(feature = "r2d2")]
    watches: Watches,
    is_released: bool,
    /// Dropped last, when the connection is back in its pool.
    #[cfg(any(feature = "r2d2", feature = "async"))]
    _local: LocalHold,
}

impl<C: GuardConnection> AdvisoryLockGuard<C> {
    pub(super) fn new(pinned: PinnedConnection<C>, held: HeldLock) -> Self {
        Self {
            #[cfg(any(feature = "r2d2", feature = "async"))]
            _local: LocalHold::of(held.lock.id),
            pinned,
            held,
            since: Instant::now(),
            #[cfg(feature = "r2d2")]
            watches: Watches::default(),
            is_released: false,
        }
    }

    /// Lends the connection whose session holds the lock.
    ///
    /// Any statement may run on it, including transactions, which must have ended when the guard is released. After a `COPY`
    /// through Diesel, the next statement of the guard takes one more round trip, which reads the remaining rows. After
    /// `pg_advisory_unlock_all()` or `DISCARD ALL` the lock is lost, and [`release`](Self::release) returns an error.
    pub fn conn(&mut self) -> &mut PgConnection {
        self.pinned.conn()
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
    /// [`Error::Database`] if the query failed, which says nothing about the lock. After an error inside a transaction it
    /// fails until that transaction is rolled back.
    pub fn is_held(&mut self) -> Result<bool> {
        let (mut session, _) = self.pinned.session();
        now(operations::is_held(&mut session, &self.held))
    }

    /// Watches the lock from now on. A background thread queries it at the interval `every`, over a connection from the pool,
    /// and the [`Watch`] returns the last result.
    ///
    /// This call takes one round trip, which queries whether the lock is held now. Each query of the thread takes one more, and
    /// waits at most a second for a connection. If it gets none, or fails, the thread tries again after at most 100 milliseconds.
    /// An `every` below 10 milliseconds counts as 10 milliseconds, and one above a year as a year.
    ///
    /// Pass a pool of the same database on the primary. On a standby the lock is not found, and counts as lost.
    ///
    /// If the lock is lost already, the watch reports that from the beginning. The watch ends with the
    /// [release](Watch#release).
    ///
    /// # Errors
    ///
    /// [`Error::Database`] if the query failed.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(2);
    /// # let pages = 0..3;
    /// let mut guard = AdvisoryLock::named("import").acquire(&pool)?;
    /// let watch = guard.watch(&pool, Duration::from_secs(1))?;
    /// for page in pages {
    ///     if !watch.is_held_within(Duration::from_secs(5)) {
    ///         break; // stop before another holder is far into it: some pages are missing
    ///     }
    ///     // … import the page, which needs no connection
    /// }
    /// guard.release()?;
    /// assert!(!watch.is_held_within(Duration::MAX) && !watch.is_lost());
    /// # Ok::<(), diesel_interlock::Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn watch(&mut self, pool: &PgPool, every: Duration) -> Result<Watch> {
        let (mut session, _) = self.pinned.session();
        let watch = Watch::begin(&mut session, pool, &self.held, every)?;
        self.watches.add(watch.watched());
        Ok(watch)
    }

    /// Returns the fencing token: a number that is greater than that of every earlier holder of the lock. A
    /// [`Fence`](crate::Fence) or an external service refuses a token if it has seen a greater one.
    ///
    /// The token is a transaction id, `pg_current_xact_id()`, drawn while the lock is held. It comes with the lock if the lock
    /// is [`fenced`](crate::AdvisoryLock::fenced) and was free. Otherwise the first call draws it, in one round trip. Each
    /// sharer of a shared lock has a token, in no order.
    ///
    /// Nested guards of one lock on one session share one token, because they hold the lock together. A guard takes over the token
    /// of the nearest guard around it that has one. There are exceptions:
    /// - If the outer guard is shared and the inner one exclusive, the inner one draws a new token, because other sharers may have
    ///   come in between. A fence that has seen this token refuses that of the outer guard.
    /// - If a `RESET ALL` runs between the two acquisitions, the guards share no token, because it clears the setting
    ///   `diesel_interlock.session`, which identifies the session.
    /// - If the outer guard has lost the lock meanwhile, as by `pg_advisory_unlock_all`, both guards still share its token. A fence
    ///   that has seen the token of a holder in between refuses both.
    /// - In a test transaction all tokens are the same.
    ///
    /// An empty message in the write-ahead log, `pg_logical_emit_message`, makes the order of tokens survive a crash of the
    /// server, unless `synchronous_commit` is `off`. The order does not survive a failover to an asynchronous standby. If the
    /// order is lost, the next holder's token may be smaller.
    ///
    /// # Blocking
    ///
    /// The transaction that draws a token waits for the write-ahead log, as every commit does. If `synchronous_standby_names` is
    /// set, it waits for the standbys, indefinitely while they are down. Neither a timeout of the wait for the lock nor a
    /// `statement_timeout` ends this, because the statement itself has completed by then. Only `synchronous_commit = local` on the
    /// session limits it, at the cost that a failover may draw the same token again.
    ///
    /// # Errors
    ///
    /// - [`Misplaced::TokenInTransaction`](crate::error::Misplaced::TokenInTransaction) if the token is to be drawn while a
    ///   transaction is open on the connection, even one that a plain SQL `BEGIN` opened. Before the commit of that transaction,
    ///   nothing ensures that its log is on the disk, so after a crash the same number could be drawn again.
    /// - [`Error::LockLost`] if the lock is no longer held.
    /// - [`Error::Database`] if the statement failed.
    pub fn fencing_token(&mut self) -> Result<i64> {
        let (mut session, _) = self.pinned.session();
        now(operations::fencing_token(&mut session, &mut self.held))
    }

    /// Runs `work` on the connection that holds the lock, releases the lock, and returns the value of `work`.
    ///
    /// The lock is released on every way out: a value, an error, or a panic. If `work` succeeded under a lock that was lost,
    /// that is an error, such as [`Error::LockLost`].
    ///
    /// `E: From<Error>` lets `work` return this crate's [`Error`], Diesel's, or one of the application.
    ///
    /// # Errors
    ///
    /// The error of `work`, and those of [`release`](Self::release).
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_interlock::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let conn = &mut database.connect();
    /// AdvisoryLock::named("vacuum").acquire_on(conn)?.run(|conn| {
    ///     diesel::sql_query("VACUUM").execute(conn)
    /// })?;
    /// # Ok::<(), diesel::result::Error>(())
    /// ```
    pub fn run<T, E, F>(mut self, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let value = work(self.conn())?;
        self.release()?;
        Ok(value)
    }

    /// Releases the lock and gives the connection back. The same as dropping the guard, except that it returns the error.
    ///
    /// One round trip, and one more to prepare the statement, once per connection. The guard ends even if this returns an error.
    /// After [`Error::ReleaseFailed`] on a borrowed connection, the session may still hold the lock.
    ///
    /// # Errors
    ///
    /// - [`Error::LockLost`] if the lock was no longer held, or its session had ended.
    /// - [`Error::SessionMoved`] if a different session replied than the one that took the lock.
    /// - [`Error::TransactionLeftOpen`] if a transaction was left open on the connection.
    /// - [`Error::ReleaseFailed`] if the unlock failed, as it does in an aborted transaction.
    pub fn release(mut self) -> Result<()> {
        self.release_inner()
    }

    fn release_inner(&mut self) -> Result<()> {
        self.is_released = true;
        #[cfg(feature = "r2d2")]
        self.watches.releasing(watch::stop);
        let (mut session, doubt) = self.pinned.session();
        let released = now(operations::release(&mut session, doubt, &self.held));
        // Before the connection is back in its pool, because the next guard on this session must not share the token.
        self.held.fencing_token = None;
        #[cfg(feature = "r2d2")]
        self.watches.released(&released);
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
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::{AdvisoryLock, Attempt, Error, PgPool};
    ///
    /// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
    ///
    /// fn nightly(pool: &PgPool) -> Result<Attempt<usize>, Error> {
    ///     NIGHTLY.try_acquire(pool)?.run(|conn| write_report(conn))
    /// }
    /// # fn write_report(_: &mut diesel::PgConnection) -> Result<usize, Error> { Ok(3) }
    /// # let database = workbench::Database::new();
    /// # assert_eq!(nightly(&database.pool(1))?, Attempt::Acquired(3));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn run<T, E, F>(self, work: F) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        match self {
            Attempt::Acquired(guard) => guard.run(work).map(Attempt::Acquired),
            Attempt::Busy => Ok(Attempt::Busy),
        }
    }
}

impl<C: GuardConnection> Drop for AdvisoryLockGuard<C> {
    fn drop(&mut self) {
        if !self.is_released {
            // After a panic the doubt discards the connection.
            let _ = caught(|| self.release_inner());
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
