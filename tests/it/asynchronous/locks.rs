//! Locks and their guards.

use std::fmt;
use std::time::Duration;

use diesel_interlock::asynchronous::{self, Borrowed, GuardConnection, Pool, Pooled};
use diesel_interlock::{Attempt, Error, LockKey, Result};
use ref_cast::RefCast;

use super::{PgConnection, PgPool, Watch, block_on, blocking};
use crate::AsyncPool;

pub(crate) type PooledGuard = AdvisoryLockGuard<Pooled<<AsyncPool as Pool>::Connection>>;
pub(crate) type BorrowedGuard<'conn> = AdvisoryLockGuard<Borrowed<'conn>>;

/// It has the parts of a handle, because a constant cannot take one out of a wrapper.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub(crate) struct AdvisoryLock {
    key: LockKey,
    is_shared: bool,
    is_fenced: bool,
}

impl AdvisoryLock {
    pub(crate) const fn named(name: &'static str) -> Self {
        Self::new(LockKey::named(name))
    }

    pub(crate) const fn new(key: LockKey) -> Self {
        Self {
            key,
            is_shared: false,
            is_fenced: false,
        }
    }

    pub(crate) const fn shared(mut self) -> Self {
        self.is_shared = true;
        self
    }

    pub(crate) const fn fenced(mut self) -> Self {
        self.is_fenced = true;
        self
    }

    pub(crate) const fn key(&self) -> &LockKey {
        &self.key
    }

    pub(super) fn handle(&self) -> asynchronous::AdvisoryLock {
        let mut lock = asynchronous::AdvisoryLock::new(self.key.clone());
        if self.is_shared {
            lock = lock.shared();
        }
        if self.is_fenced {
            lock = lock.fenced();
        }
        lock
    }

    pub(crate) fn try_acquire(&self, pool: &PgPool) -> Result<Attempt<PooledGuard>> {
        let attempt = block_on(self.handle().try_acquire(&pool.pool))?;
        Ok(attempt.map(AdvisoryLockGuard))
    }

    pub(crate) fn try_acquire_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        let attempt = block_on(self.handle().try_acquire_on(&mut conn.0))?;
        Ok(attempt.map(AdvisoryLockGuard))
    }

    pub(crate) fn acquire(&self, pool: &PgPool) -> Result<PooledGuard> {
        block_on(self.handle().acquire(&pool.pool)).map(AdvisoryLockGuard)
    }

    pub(crate) fn acquire_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
    ) -> Result<BorrowedGuard<'conn>> {
        block_on(self.handle().acquire_on(&mut conn.0)).map(AdvisoryLockGuard)
    }

    pub(crate) fn acquire_timeout(
        &self,
        pool: &PgPool,
        timeout: Duration,
    ) -> Result<Attempt<PooledGuard>> {
        let attempt = block_on(self.handle().acquire_timeout(&pool.pool, timeout))?;
        Ok(attempt.map(AdvisoryLockGuard))
    }

    pub(crate) fn acquire_timeout_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
        timeout: Duration,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        let attempt = block_on(self.handle().acquire_timeout_on(&mut conn.0, timeout))?;
        Ok(attempt.map(AdvisoryLockGuard))
    }

    pub(crate) fn with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(self.handle().with(&pool.pool, async |conn| {
            blocking(|| work(PgConnection::ref_cast_mut(conn)))
        }))
    }
}

/// Transaction locks.
impl AdvisoryLock {
    pub(crate) fn acquire_xact(&self, conn: &mut PgConnection) -> Result<()> {
        block_on(self.handle().acquire_xact(&mut conn.0))
    }

    pub(crate) fn try_acquire_xact(&self, conn: &mut PgConnection) -> Result<Attempt<()>> {
        block_on(self.handle().try_acquire_xact(&mut conn.0))
    }

    pub(crate) fn acquire_xact_timeout(
        &self,
        conn: &mut PgConnection,
        timeout: Duration,
    ) -> Result<Attempt<()>> {
        block_on(self.handle().acquire_xact_timeout(&mut conn.0, timeout))
    }

    pub(crate) fn transaction<T, E, F>(&self, conn: &mut PgConnection, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(self.handle().transaction(&mut conn.0, async |conn| {
            blocking(|| work(PgConnection::ref_cast_mut(conn)))
        }))
    }

    pub(crate) fn try_transaction<T, E, F>(
        &self,
        conn: &mut PgConnection,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(self.handle().try_transaction(&mut conn.0, async |conn| {
            blocking(|| work(PgConnection::ref_cast_mut(conn)))
        }))
    }

    pub(crate) fn transaction_timeout<T, E, F>(
        &self,
        conn: &mut PgConnection,
        timeout: Duration,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let work = async |conn: &mut _| blocking(|| work(PgConnection::ref_cast_mut(conn)));
        block_on(
            self.handle()
                .transaction_timeout(&mut conn.0, timeout, work),
        )
    }
}

#[must_use]
pub(crate) struct AdvisoryLockGuard<C: GuardConnection>(asynchronous::AdvisoryLockGuard<C>);

impl<C: GuardConnection> AdvisoryLockGuard<C> {
    pub(crate) fn conn(&mut self) -> &mut PgConnection {
        PgConnection::ref_cast_mut(self.0.conn())
    }

    pub(crate) fn key(&self) -> &LockKey {
        self.0.key()
    }

    pub(crate) fn backend_pid(&self) -> i32 {
        self.0.backend_pid()
    }

    pub(crate) fn is_held(&mut self) -> Result<bool> {
        block_on(self.0.is_held())
    }

    pub(crate) fn watch(&mut self, pool: &PgPool, every: Duration) -> Result<Watch> {
        block_on(self.0.watch(&pool.pool, every))
    }

    pub(crate) fn fencing_token(&mut self) -> Result<i64> {
        block_on(self.0.fencing_token())
    }

    pub(crate) fn run<T, E, F>(self, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(
            self.0
                .run(async |conn| blocking(|| work(PgConnection::ref_cast_mut(conn)))),
        )
    }

    pub(crate) fn release(self) -> Result<()> {
        block_on(self.0.release())
    }
}

impl<C: GuardConnection> fmt::Debug for AdvisoryLockGuard<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// `run` of an attempt, which is an inherent method for the guards of the library.
pub(crate) trait RunAttempt: Sized {
    fn run<T, E, F>(self, work: F) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>;
}

impl<C: GuardConnection> RunAttempt for Attempt<AdvisoryLockGuard<C>> {
    fn run<T, E, F>(self, work: F) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(
            self.map(|guard| guard.0)
                .run(async |conn| blocking(|| work(PgConnection::ref_cast_mut(conn)))),
        )
    }
}
