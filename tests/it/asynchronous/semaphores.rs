//! Semaphores and their permits.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel_interlock::{Admission, Claim, Error, Result, asynchronous};
use ref_cast::RefCast;

use super::{PgConnection, PgPool, block_on, blocking, runtime};
use crate::AsyncPool;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub(crate) struct Semaphore(pub(super) asynchronous::Semaphore);

impl Semaphore {
    pub(crate) const fn named(service: &'static str, slots: u32, timeout: Duration) -> Self {
        Self(asynchronous::Semaphore::named(service, slots, timeout))
    }

    pub(crate) fn new(service: impl Into<String>, slots: u32, timeout: Duration) -> Self {
        Self(asynchronous::Semaphore::new(service, slots, timeout))
    }

    pub(crate) fn details(&self, details: impl Into<Cow<'static, str>>) -> Self {
        Self(self.0.details(details))
    }

    pub(crate) fn service(&self) -> &str {
        self.0.service()
    }

    pub(crate) const fn slots(&self) -> u32 {
        self.0.slots()
    }

    pub(crate) const fn timeout(&self) -> Duration {
        self.0.timeout()
    }

    pub(crate) fn try_acquire(&self, pool: &PgPool) -> Result<Admission<Permit>> {
        let admission = block_on(self.0.try_acquire(&pool.pool))?;
        Ok(admission.map(Permit))
    }

    pub(crate) fn acquire(&self, pool: &PgPool) -> Result<Permit> {
        block_on(self.0.acquire(&pool.pool)).map(Permit)
    }

    pub(crate) fn acquire_timeout(
        &self,
        pool: &PgPool,
        timeout: Duration,
    ) -> Result<Admission<Permit>> {
        let admission = block_on(self.0.acquire_timeout(&pool.pool, timeout))?;
        Ok(admission.map(Permit))
    }

    pub(crate) fn with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(self.0.with(&pool.pool, async |permit| {
            blocking(|| work(Permit::ref_cast_mut(permit)))
        }))
    }

    pub(crate) fn claim_on(&self, conn: &mut PgConnection) -> Result<Admission<Claim>> {
        block_on(self.0.claim_on(&mut conn.0))
    }

    pub(crate) fn complete_on(&self, conn: &mut PgConnection, id: i64) -> Result<bool> {
        block_on(self.0.complete_on(&mut conn.0, id))
    }

    pub(crate) fn renew_on(
        &self,
        conn: &mut PgConnection,
        id: i64,
    ) -> Result<Option<DateTime<Utc>>> {
        block_on(self.0.renew_on(&mut conn.0, id))
    }
}

#[derive(RefCast)]
#[repr(transparent)]
#[must_use]
pub(crate) struct Permit(asynchronous::Permit<AsyncPool>);

impl Permit {
    pub(crate) const fn fencing_token(&self) -> i64 {
        self.0.fencing_token()
    }

    pub(crate) const fn claim(&self) -> &Claim {
        self.0.claim()
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.0.remaining()
    }

    pub(crate) fn renew(&mut self) -> Result<DateTime<Utc>> {
        block_on(self.0.renew())
    }

    pub(crate) fn release(self) -> Result<()> {
        block_on(self.0.release())
    }

    pub(crate) fn run<T, E, F>(self, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(
            self.0
                .run(async |permit| blocking(|| work(Permit::ref_cast_mut(permit)))),
        )
    }

    pub(crate) fn into_claim(self) -> Claim {
        self.0.into_claim()
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// `run` of an admission, which is an inherent method for the permits of the library.
pub(crate) trait RunAdmission: Sized {
    fn run<T, E, F>(self, work: F) -> Result<Admission<T>, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>;
}

impl RunAdmission for Admission<Permit> {
    fn run<T, E, F>(self, work: F) -> Result<Admission<T>, E>
    where
        F: FnOnce(&mut Permit) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(
            self.map(|permit| permit.0)
                .run(async |permit| blocking(|| work(Permit::ref_cast_mut(permit)))),
        )
    }
}
