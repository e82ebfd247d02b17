//! Throttles.

use std::borrow::Cow;
use std::fmt;

use diesel_interlock::{
    Decision, DeclaredResources, Error, Grant, Result, Synced, ThrottledResource, asynchronous,
};
use ref_cast::RefCast;

use super::{PgConnection, PgPool, block_on, blocking};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub(crate) struct Throttle<R>(pub(super) asynchronous::Throttle<R>);

impl<R> Throttle<R> {
    pub(crate) const fn of(resource: R) -> Self {
        Self(asynchronous::Throttle::of(resource))
    }

    pub(crate) fn key(&self, key: impl fmt::Display) -> Self
    where
        R: Clone,
    {
        Self(self.0.key(key))
    }

    pub(crate) fn details(&self, details: impl Into<Cow<'static, str>>) -> Self
    where
        R: Clone,
    {
        Self(self.0.details(details))
    }
}

impl<R: ThrottledResource + Sync> Throttle<R> {
    pub(crate) fn attempt(&self, pool: &PgPool) -> Result<Decision> {
        block_on(self.0.attempt(&pool.pool))
    }

    pub(crate) fn attempt_on(&self, conn: &mut PgConnection) -> Result<Decision> {
        block_on(self.0.attempt_on(&mut conn.0))
    }

    pub(crate) fn run<T, E, F>(&self, pool: &PgPool, work: F) -> Result<Decision<T>, E>
    where
        F: FnOnce(Grant) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(
            self.0
                .run(&pool.pool, async |grant| blocking(|| work(grant))),
        )
    }

    pub(crate) fn run_on<T, E, F>(&self, conn: &mut PgConnection, work: F) -> Result<Decision<T>, E>
    where
        F: FnOnce(&mut PgConnection, Grant) -> Result<T, E>,
        E: From<Error>,
    {
        block_on(self.0.run_on(&mut conn.0, async |conn, grant| {
            blocking(|| work(PgConnection::ref_cast_mut(conn), grant))
        }))
    }
}

pub(crate) fn sync<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    block_on(asynchronous::sync_on::<R>(&mut conn.0))
}

pub(crate) fn sync_intervals<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    block_on(asynchronous::sync_intervals_on::<R>(&mut conn.0))
}
