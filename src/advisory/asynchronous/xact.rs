//! Transaction locks on a connection, asynchronous.

use std::time::Duration;

use diesel_async::AsyncPgConnection;

use super::AdvisoryLock;
use crate::advisory::operations;
use crate::attempt::Attempt;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::session::Asynchronous;

/// # Transaction locks
///
/// A transaction lock is held until the surrounding transaction ends, as in the
/// [blocking half](crate::AdvisoryLock#transaction-locks).
///
/// # Dropped futures
///
/// If the future of a method with `xact` in its name is dropped, the lock may be granted all the same. It is then held until the
/// caller's transaction ends, unless [`acquire_xact_timeout`](Self::acquire_xact_timeout) was already waiting for it, because that
/// wait is undone. The caller may continue the transaction, as after any other statement whose future was dropped.
///
/// If the future of `transaction`, `try_transaction` or `transaction_timeout` is dropped, a `ROLLBACK` is queued behind the
/// statements that were sent, and the connection is left marked as broken, so that a pool discards it. The `ROLLBACK` is sent even
/// if the connection is not used again. The lock is free when the server has executed the `ROLLBACK` and the statements before it.
/// A statement of `work` runs to its end, and a wait for the lock ends when the lock is granted, or at its timeout. If the future
/// is dropped during the `COMMIT`, the transaction may have been committed.
///
/// Nobody ends the caller's own transaction around `acquire_xact`. After a drop of the caller's own future, deadpool keeps the idle
/// connection with its transaction and its locks until the next check-out finds it. bb8 closes it at once.
impl AdvisoryLock {
    /// Takes the lock until the transaction ends. Waits indefinitely. As
    /// [`AdvisoryLock::acquire_xact`](crate::AdvisoryLock::acquire_xact).
    ///
    /// # Errors
    ///
    /// As in the blocking half.
    pub async fn acquire_xact(&self, conn: &mut AsyncPgConnection) -> Result<()> {
        self.0.acquire_xact_in(&mut Asynchronous::lent(conn)).await
    }

    /// Takes the lock until the transaction ends, if it is free. Never waits. As
    /// [`AdvisoryLock::try_acquire_xact`](crate::AdvisoryLock::try_acquire_xact).
    ///
    /// # Errors
    ///
    /// As in the blocking half.
    pub async fn try_acquire_xact(&self, conn: &mut AsyncPgConnection) -> Result<Attempt<()>> {
        self.acquire_xact_timeout(conn, Duration::ZERO).await
    }

    /// Takes the lock until the transaction ends. Waits for at most `timeout`. As
    /// [`AdvisoryLock::acquire_xact_timeout`](crate::AdvisoryLock::acquire_xact_timeout).
    ///
    /// If the future is dropped while it waits, the transaction is rolled back to where the wait began.
    ///
    /// # Errors
    ///
    /// As in the blocking half.
    pub async fn acquire_xact_timeout(
        &self,
        conn: &mut AsyncPgConnection,
        timeout: Duration,
    ) -> Result<Attempt<()>> {
        let deadline = Deadline::after(timeout);
        let session = &mut Asynchronous::lent(conn);
        self.0.acquire_xact_until_in(session, deadline).await
    }

    /// Opens a transaction, takes the lock in it, runs `work`, and commits. Rolls back if `work` fails or panics, or if the
    /// future is dropped. As [`AdvisoryLock::transaction`](crate::AdvisoryLock::transaction).
    ///
    /// # Errors
    ///
    /// The error of `work`, and otherwise as in the blocking half. If `work` drops the future of a nested transaction, as a timeout
    /// does, and returns `Ok`, everything is rolled back, and the error is Diesel's `BrokenTransactionManager`.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_async::{AsyncPgConnection, RunQueryDsl};
    /// use diesel_interlock::{LockKey, asynchronous::AdvisoryLock};
    ///
    /// # diesel::table! { reserved_servers (server_id) { server_id -> Integer } }
    /// async fn book(
    ///     conn: &mut AsyncPgConnection,
    ///     datacenter: i32,
    ///     server: i32,
    /// ) -> QueryResult<bool> {
    ///     let key = LockKey::parts(["server", &datacenter.to_string(), &server.to_string()]);
    ///     AdvisoryLock::new(key)
    ///         .transaction(conn, async |conn| {
    ///             let taken = reserved_servers::table.find(server);
    ///             if diesel::select(diesel::dsl::exists(taken)).get_result(conn).await? {
    ///                 return Ok(false);
    ///             }
    ///             diesel::insert_into(reserved_servers::table)
    ///                 .values(reserved_servers::server_id.eq(server))
    ///                 .execute(conn)
    ///                 .await?;
    ///             Ok(true)
    ///         })
    ///         .await
    /// }
    /// # let database = workbench::Database::new();
    /// # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    /// # runtime.block_on(async {
    /// # let conn = &mut database.connect_async().await;
    /// # diesel::sql_query("CREATE TABLE reserved_servers (server_id int)").execute(conn).await?;
    /// assert!(book(conn, 223, 345).await?);
    /// assert!(!book(conn, 223, 345).await?);
    /// # Ok::<(), diesel::result::Error>(())
    /// # })?;
    /// # Ok::<(), diesel::result::Error>(())
    /// ```
    pub async fn transaction<T, E, F>(&self, conn: &mut AsyncPgConnection, work: F) -> Result<T, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let session = &mut Asynchronous::lent(conn);
        let mut transaction = operations::begin_transaction(session).await?;
        let value = match self.0.acquire_xact_in(transaction.session()).await {
            Ok(()) => work(transaction.session().conn()).await,
            Err(error) => Err(error.into()),
        };
        transaction.end(value).await
    }

    /// As [`transaction`](Self::transaction), but returns [`Attempt::Busy`] without running `work` if another session holds
    /// the lock.
    ///
    /// # Errors
    ///
    /// As [`transaction`](Self::transaction).
    pub async fn try_transaction<T, E, F>(
        &self,
        conn: &mut AsyncPgConnection,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        self.transaction_timeout(conn, Duration::ZERO, work).await
    }

    /// As [`transaction`](Self::transaction), but returns [`Attempt::Busy`] without running `work` if the lock was not
    /// granted within `timeout`.
    ///
    /// # Errors
    ///
    /// As [`transaction`](Self::transaction).
    pub async fn transaction_timeout<T, E, F>(
        &self,
        conn: &mut AsyncPgConnection,
        timeout: Duration,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let deadline = Deadline::after(timeout);
        let session = &mut Asynchronous::lent(conn);
        let mut transaction = operations::begin_transaction(session).await?;
        let acquired = (self.0)
            .acquire_xact_until_in(transaction.session(), deadline)
            .await;
        let value = match acquired {
            Ok(Attempt::Acquired(())) => {
                (work(transaction.session().conn()).await).map(Attempt::Acquired)
            }
            Ok(Attempt::Busy) => Ok(Attempt::Busy),
            Err(error) => Err(error.into()),
        };
        transaction.end(value).await
    }
}
