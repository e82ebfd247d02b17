//! The closure forms of the session lock.

use std::time::Duration;

use diesel::pg::PgConnection;

use super::AdvisoryLock;
use super::guard::AdvisoryLockGuard;
use super::lease::Lease;
use crate::attempt::Attempt;
use crate::error::{Error, Result};
#[cfg(feature = "r2d2")]
use crate::pool::PgPool;

/// # Closure forms of the session lock
///
/// Each takes the session lock, runs `work` on the connection that holds it, and releases it on
/// every way out: a value, an error, a panic. What `work` did under a lock that was lost is an
/// error ([`Error::LockLost`] and its like), even if `work` itself succeeded.
///
/// One bound, `E: From<Error>`, lets `work` answer this crate's [`Error`], Diesel's, or the
/// application's own.
impl AdvisoryLock {
    /// Runs `work` under the lock, on a connection out of the pool; waits for the lock as
    /// [`acquire`](Self::acquire) does.
    ///
    /// # Errors
    ///
    /// What `work` answers; else those of [all session locks](#errors-of-all-of-them) and of
    /// [`release`](AdvisoryLockGuard::release).
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_interlock::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(1);
    /// let one = AdvisoryLock::named("vacuum").with(&pool, |conn| {
    ///     diesel::sql_query("VACUUM").execute(conn)?; // not possible inside a transaction
    ///     QueryResult::Ok(1)
    /// })?;
    /// # assert_eq!(one, 1);
    /// # Ok::<(), diesel::result::Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        run(self.acquire(pool)?, work)
    }

    /// Runs `work` under the lock, on the given connection; waits for the lock as
    /// [`acquire_on`](Self::acquire_on) does.
    ///
    /// # Errors
    ///
    /// As [`with`](Self::with).
    pub fn with_on<T, E, F>(&self, conn: &mut PgConnection, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        run(self.acquire_on(conn)?, work)
    }

    /// Runs `work` under the lock if it is free, on a connection out of the pool; else answers
    /// [`Attempt::Busy`], as [`try_acquire`](Self::try_acquire) does.
    ///
    /// # Errors
    ///
    /// As [`with`](Self::with).
    #[cfg(feature = "r2d2")]
    pub fn try_with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        run_if_acquired(self.try_acquire(pool)?, work)
    }

    /// Runs `work` under the lock if it is free, on the given connection; else answers
    /// [`Attempt::Busy`], as [`try_acquire_on`](Self::try_acquire_on) does.
    ///
    /// # Errors
    ///
    /// As [`with`](Self::with).
    pub fn try_with_on<T, E, F>(&self, conn: &mut PgConnection, work: F) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        run_if_acquired(self.try_acquire_on(conn)?, work)
    }

    /// Runs `work` under the lock, on a connection out of the pool, if both are to be had within
    /// `timeout`, as [`acquire_timeout`](Self::acquire_timeout) does.
    ///
    /// # Errors
    ///
    /// As [`with`](Self::with).
    #[cfg(feature = "r2d2")]
    pub fn with_timeout<T, E, F>(
        &self,
        pool: &PgPool,
        timeout: Duration,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        run_if_acquired(self.acquire_timeout(pool, timeout)?, work)
    }

    /// Runs `work` under the lock, on the given connection, if it is to be had within `timeout`,
    /// as [`acquire_timeout_on`](Self::acquire_timeout_on) does.
    ///
    /// # Errors
    ///
    /// As [`with`](Self::with).
    pub fn with_timeout_on<T, E, F>(
        &self,
        conn: &mut PgConnection,
        timeout: Duration,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        run_if_acquired(self.acquire_timeout_on(conn, timeout)?, work)
    }
}

fn run<C: Lease, T, E: From<Error>>(
    mut guard: AdvisoryLockGuard<C>,
    work: impl FnOnce(&mut PgConnection) -> Result<T, E>,
) -> Result<T, E> {
    let value = work(guard.conn())?;
    guard.release()?;
    Ok(value)
}

fn run_if_acquired<C: Lease, T, E: From<Error>>(
    attempt: Attempt<AdvisoryLockGuard<C>>,
    work: impl FnOnce(&mut PgConnection) -> Result<T, E>,
) -> Result<Attempt<T>, E> {
    match attempt {
        Attempt::Acquired(guard) => run(guard, work).map(Attempt::Acquired),
        Attempt::Busy => Ok(Attempt::Busy),
    }
}
