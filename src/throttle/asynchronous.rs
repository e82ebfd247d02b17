//! Throttles on an asynchronous connection.
//!
//! Not public yet, and not reachable by a released name: the methods are those of [`Asynchronous`], which the tests use.

use diesel_async::AsyncPgConnection;

use super::operations;
use super::{Decision, Grant, Throttle, ThrottledResource};
use crate::error::{Error, Result};

/// A throttle whose attempts are awaited.
#[derive(Debug)]
pub struct Asynchronous<'a, R>(pub &'a Throttle<R>);

impl<R: ThrottledResource + Sync> Asynchronous<'_, R> {
    /// As [`Throttle::attempt_on`], on an asynchronous connection.
    ///
    /// If the returned future is dropped, the attempt may take place all the same. The resource is then granted at most
    /// once, and the grant may be lost.
    ///
    /// # Errors
    ///
    /// As [`Throttle::attempt_on`].
    pub async fn attempt_on(&self, conn: &mut AsyncPgConnection) -> Result<Decision> {
        operations::attempt(conn, self.0).await
    }

    /// As [`Throttle::run_on`], on an asynchronous connection.
    ///
    /// # Errors
    ///
    /// As [`Throttle::run_on`].
    pub async fn run_on<T, E, F>(
        &self,
        conn: &mut AsyncPgConnection,
        work: F,
    ) -> Result<Decision<T>, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection, Grant) -> Result<T, E>,
        E: From<Error>,
    {
        match operations::attempt_committed(conn, self.0).await? {
            Decision::Granted(grant) => work(conn, grant).await.map(Decision::Granted),
            Decision::Denied(denial) => Ok(Decision::Denied(denial)),
        }
    }
}
