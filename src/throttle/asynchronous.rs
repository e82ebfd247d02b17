//! Throttles over a pool and on a connection, asynchronous.

use std::borrow::Cow;
use std::fmt;

use diesel_async::AsyncPgConnection;

use super::operations;
use super::{Decision, Grant, ThrottledResource};
use crate::error::{Error, Result};
use crate::pool::asynchronous::{self as pool, Pool};
use crate::runtime;
use crate::session::Asynchronous;
use crate::text::Name;

/// A resource that is granted at most once per interval, across all instances.
///
/// The same throttle as [`diesel_interlock::Throttle`](crate::Throttle), for asynchronous connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a throttle does nothing until it is attempted"]
pub struct Throttle<R>(crate::Throttle<R>);

impl<R> From<crate::Throttle<R>> for Throttle<R> {
    fn from(throttle: crate::Throttle<R>) -> Self {
        Self(throttle)
    }
}

impl<R> AsRef<crate::Throttle<R>> for Throttle<R> {
    fn as_ref(&self) -> &crate::Throttle<R> {
        &self.0
    }
}

impl<R> Throttle<R> {
    /// Makes the throttle of a resource. As [`Throttle::of`](crate::Throttle::of).
    pub const fn of(resource: R) -> Self {
        Self(crate::Throttle::of(resource))
    }

    /// Returns the throttle of one key. As [`Throttle::key`](crate::Throttle::key).
    pub fn key(&self, key: impl fmt::Display) -> Self
    where
        R: Clone,
    {
        Self(self.0.key(key))
    }

    /// Returns the throttle with the details of who takes the resource. As [`Throttle::details`](crate::Throttle::details).
    pub fn details(&self, details: impl Into<Cow<'static, str>>) -> Self
    where
        R: Clone,
    {
        Self(self.0.details(details))
    }
}

/// # Attempts
///
/// Statements, round trips and errors are those of the [blocking half](crate::Throttle#attempts). Outside a runtime an operation
/// with a pool returns [`Error::NoRuntime`].
///
/// If the future of an attempt is dropped, the attempt may take place all the same. The resource is still granted at most once, but
/// the grant may remain unknown to the caller.
impl<R: ThrottledResource + Sync> Throttle<R> {
    /// Takes the resource if it is due, through a connection from the pool. Never waits for the resource.
    ///
    /// The grant is committed when this returns, and the connection is back in the pool.
    ///
    /// # Errors
    ///
    /// See [errors of attempts](crate::Throttle#errors-of-attempts), and [`Error::NoRuntime`].
    pub async fn attempt<P: Pool>(&self, pool: &P) -> Result<Decision> {
        let attempt = async {
            self.0.checked_with_details(Name::anywhere)?; // before the pool is asked
            runtime::current()?;
            let mut conn = pool::check_out(pool, None).await?;
            let session = &mut Asynchronous::pooled(&mut conn);
            operations::send_committed(session, &self.0).await
        };
        operations::observed(&self.0, attempt).await
    }

    /// Takes the resource if it is due, on the given connection. Never waits for the resource.
    ///
    /// Inside a transaction, the grant counts when the transaction commits.
    ///
    /// # Errors
    ///
    /// See [errors of attempts](crate::Throttle#errors-of-attempts).
    pub async fn attempt_on(&self, conn: &mut AsyncPgConnection) -> Result<Decision> {
        operations::attempt(&mut Asynchronous::lent(conn), &self.0).await
    }

    /// Runs `work` if the resource is due, and returns its value, or the denial.
    ///
    /// The grant is committed, and the connection is back in the pool, before `work` runs. If `work` fails, the resource is
    /// due again when its interval has passed, not before.
    ///
    /// # Errors
    ///
    /// The error of `work`, and the [errors of attempts](crate::Throttle#errors-of-attempts).
    pub async fn run<P, T, E, F>(&self, pool: &P, work: F) -> Result<Decision<T>, E>
    where
        P: Pool,
        F: AsyncFnOnce(Grant) -> Result<T, E>,
        E: From<Error>,
    {
        match self.attempt(pool).await? {
            Decision::Granted(grant) => work(grant).await.map(Decision::Granted),
            Decision::Denied(denial) => Ok(Decision::Denied(denial)),
        }
    }

    /// Runs `work` on the given connection if the resource is due, and returns its value, or the denial.
    ///
    /// The grant is committed before `work` runs, as with [`run`](Self::run).
    ///
    /// # Errors
    ///
    /// The error of `work`, the [errors of attempts](crate::Throttle#errors-of-attempts), and
    /// [`Misplaced::GrantInTransaction`](crate::error::Misplaced::GrantInTransaction) inside an open transaction.
    pub async fn run_on<T, E, F>(
        &self,
        conn: &mut AsyncPgConnection,
        work: F,
    ) -> Result<Decision<T>, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection, Grant) -> Result<T, E>,
        E: From<Error>,
    {
        let decision =
            operations::attempt_committed(&mut Asynchronous::lent(conn), &self.0).await?;
        match decision {
            Decision::Granted(grant) => work(conn, grant).await.map(Decision::Granted),
            Decision::Denied(denial) => Ok(Decision::Denied(denial)),
        }
    }
}
