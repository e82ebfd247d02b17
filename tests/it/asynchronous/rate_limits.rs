//! Rate limits.

use std::fmt;
use std::time::Duration;

use diesel_interlock::{
    Check, CheckAll, Quota, RateLimitState, Reservation, Reserve, Result, Spent, asynchronous,
};

use super::{PgConnection, PgPool, block_on};
use crate::AsyncPool;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub(crate) struct RateLimit(pub(super) asynchronous::RateLimit);

impl RateLimit {
    pub(crate) const fn named(name: &'static str, quota: Quota) -> Self {
        Self(asynchronous::RateLimit::named(name, quota))
    }

    pub(crate) fn new(name: impl Into<String>, quota: Quota) -> Self {
        Self(asynchronous::RateLimit::new(name, quota))
    }

    pub(crate) fn durable(self) -> Self {
        Self(self.0.durable())
    }

    pub(crate) fn key(&self, key: impl fmt::Display) -> Self {
        Self(self.0.key(key))
    }

    pub(crate) fn cost(&self, units: u32) -> Self {
        Self(self.0.cost(units))
    }

    pub(crate) fn partition_key(&self, bytes: impl AsRef<[u8]>) -> Self {
        Self(self.0.partition_key(bytes))
    }

    pub(crate) fn check(&self, pool: &PgPool) -> Result<Check> {
        block_on(self.0.check(&pool.pool))
    }

    pub(crate) fn check_on(&self, conn: &mut PgConnection) -> Result<Check> {
        block_on(self.0.check_on(&mut conn.0))
    }

    pub(crate) fn check_all(pool: &PgPool, limits: &[&RateLimit]) -> Result<CheckAll> {
        let limits: Vec<_> = limits.iter().map(|limit| &limit.0).collect();
        block_on(asynchronous::RateLimit::check_all(&pool.pool, &limits))
    }

    pub(crate) fn check_all_on(conn: &mut PgConnection, limits: &[&RateLimit]) -> Result<CheckAll> {
        let limits: Vec<_> = limits.iter().map(|limit| &limit.0).collect();
        block_on(asynchronous::RateLimit::check_all_on(&mut conn.0, &limits))
    }

    pub(crate) fn reserve(&self, pool: &PgPool, max_wait: Duration) -> Result<Reserve> {
        block_on(self.0.reserve(&pool.pool, max_wait))
    }

    pub(crate) fn reserve_on(
        &self,
        conn: &mut PgConnection,
        max_wait: Duration,
    ) -> Result<Reserve> {
        block_on(self.0.reserve_on(&mut conn.0, max_wait))
    }

    pub(crate) fn acquire_timeout(&self, pool: &PgPool, timeout: Duration) -> Result<Check> {
        block_on(self.0.acquire_timeout(&pool.pool, timeout))
    }

    pub(crate) fn peek(&self, pool: &PgPool) -> Result<RateLimitState> {
        block_on(self.0.peek(&pool.pool))
    }

    pub(crate) fn peek_on(&self, conn: &mut PgConnection) -> Result<RateLimitState> {
        block_on(self.0.peek_on(&mut conn.0))
    }

    pub(crate) fn reset(&self, pool: &PgPool) -> Result<bool> {
        block_on(self.0.reset(&pool.pool))
    }

    pub(crate) fn reset_on(&self, conn: &mut PgConnection) -> Result<bool> {
        block_on(self.0.reset_on(&mut conn.0))
    }

    pub(crate) fn reset_all(&self, pool: &PgPool) -> Result<u64> {
        block_on(self.0.reset_all(&pool.pool))
    }

    pub(crate) fn reset_all_on(&self, conn: &mut PgConnection) -> Result<u64> {
        block_on(self.0.reset_all_on(&mut conn.0))
    }

    pub(crate) fn prune(pool: &PgPool) -> Result<u64> {
        block_on(asynchronous::RateLimit::prune(&pool.pool))
    }

    pub(crate) fn prune_on(conn: &mut PgConnection) -> Result<u64> {
        block_on(asynchronous::RateLimit::prune_on(&mut conn.0))
    }

    pub(crate) fn local(&self, pool: &PgPool, chunk: u32) -> Result<LocalRateLimit> {
        self.0.local(&pool.pool, chunk).map(LocalRateLimit)
    }
}

#[derive(Debug)]
pub(crate) struct LocalRateLimit(asynchronous::LocalRateLimit<AsyncPool>);

impl LocalRateLimit {
    pub(crate) fn check(&self, key: &str, cost: u32) -> Result<Check> {
        block_on(self.0.check(key, cost))
    }
}

pub(crate) fn give_back(pool: &PgPool, spent: &Spent, units: u32) -> Result<u32> {
    let given = asynchronous::RateLimit::give_back(&pool.pool, spent, units);
    block_on(given)
}

pub(crate) fn give_back_on(conn: &mut PgConnection, spent: &Spent, units: u32) -> Result<u32> {
    let given = asynchronous::RateLimit::give_back_on(&mut conn.0, spent, units);
    block_on(given)
}

pub(crate) fn cancel(pool: &PgPool, reservation: Reservation) -> Result<u32> {
    block_on(asynchronous::RateLimit::cancel(&pool.pool, reservation))
}

pub(crate) fn cancel_on(conn: &mut PgConnection, reservation: Reservation) -> Result<u32> {
    block_on(asynchronous::RateLimit::cancel_on(&mut conn.0, reservation))
}
