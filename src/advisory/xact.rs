//! Transaction locks on a connection, blocking.

use std::time::Duration;

use diesel::pg::PgConnection;

use super::{AdvisoryLock, operations};
use crate::attempt::Attempt;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::session::{Blocking, now};

/// # Transaction locks
///
/// A transaction lock is held until the surrounding transaction ends, and needs no release. It needs neither a guard nor a
/// pinned connection. So it is **the lock to use behind a pooler in transaction mode**, and the first
/// choice if a single transaction does the protected work.
///
/// A rollback to a savepoint that was set before the lock was taken also releases it, as does the rollback of a nested
/// `conn.transaction`.
///
/// # Isolation levels
///
/// "Lock, check, insert" is correct only if the check sees what the previous holder committed. At REPEATABLE READ it does not,
/// because the snapshot is as old as the transaction's first statement. At that level, four sessions that take the lock one after
/// another still insert four rows. So a lock at that level is refused, as
/// [`Misplaced::XactLockAtRepeatableRead`](crate::error::Misplaced::XactLockAtRepeatableRead). SERIALIZABLE is allowed: PostgreSQL
/// lets one transaction succeed and fails the others with a serialization failure
/// ([`DatabaseErrorKind::SerializationFailure`](diesel::result::DatabaseErrorKind)), which the caller has to retry.
///
/// # Idle transactions
///
/// The server's `idle_in_transaction_session_timeout` ends a session that is idle inside a transaction for too long, which
/// frees the lock. The work can then not be committed, and the caller's next statement fails.
impl AdvisoryLock {
    /// Takes the lock until the transaction ends. Waits indefinitely.
    ///
    /// Sends one prepared statement if the lock is free:
    /// ```sql
    /// SELECT CASE WHEN current_setting('transaction_isolation') = 'repeatable read' THEN -1
    ///             WHEN pg_is_in_recovery() THEN NULL WHEN pg_try_advisory_xact_lock($1) THEN 1 ELSE 0 END
    /// ```
    /// Otherwise it sends a second message, which lifts `statement_timeout` and `lock_timeout`, waits with
    /// `SELECT pg_advisory_xact_lock(…)`, and restores them.
    ///
    /// # Blocking
    ///
    /// Waits in the server's queue, in the order of arrival and under PostgreSQL's deadlock detection. The session's
    /// `statement_timeout` and `lock_timeout` do not apply to the wait, and have their old values after it.
    ///
    /// A transaction that waits holds a snapshot. If the holder of the lock runs `CREATE INDEX CONCURRENTLY` under a session
    /// lock of the same key, the two wait for each other, and PostgreSQL ends one of them with "deadlock detected".
    ///
    /// # Errors
    ///
    /// - [`Misplaced::XactLockOutsideTransaction`](crate::error::Misplaced::XactLockOutsideTransaction) outside a transaction. A
    ///   transaction that was opened by a plain SQL `BEGIN` is not detected, so the error is returned there, too.
    /// - [`Misplaced::XactLockAtRepeatableRead`](crate::error::Misplaced::XactLockAtRepeatableRead) and [`Error::Standby`], because
    ///   the lock would not protect there.
    /// - [`Input::EmptyName`](crate::error::Input::EmptyName), before anything is sent.
    /// - [`Error::Database`] for anything else, including a deadlock. The transaction is then aborted.
    ///
    /// # Examples
    ///
    /// ```
    /// # use diesel::prelude::*;
    /// use diesel_interlock::{AdvisoryLock, Error, LockKey};
    ///
    /// # let database = workbench::Database::new();
    /// # let conn = &mut database.connect();
    /// // The tenant is known only inside a transaction that does other things as well.
    /// conn.transaction(|conn| {
    ///     let tenant = 7;
    ///     AdvisoryLock::new(LockKey::parts(["invoice number", &tenant.to_string()])).acquire_xact(conn)?;
    ///     // … take the next number; the lock goes with the commit
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn acquire_xact(&self, conn: &mut PgConnection) -> Result<()> {
        now(self.acquire_xact_in(&mut Blocking::lent(conn)))
    }

    /// Takes the lock until the transaction ends, if it is free. Never waits.
    ///
    /// One round trip, with the statement of [`acquire_xact`](Self::acquire_xact).
    ///
    /// # Errors
    ///
    /// As [`acquire_xact`](Self::acquire_xact).
    pub fn try_acquire_xact(&self, conn: &mut PgConnection) -> Result<Attempt<()>> {
        self.acquire_xact_timeout(conn, Duration::ZERO)
    }

    /// Takes the lock until the transaction ends. Waits for at most `timeout`.
    ///
    /// One round trip if the lock is free, as with [`acquire_xact`](Self::acquire_xact). Otherwise three more, because the
    /// wait runs in a savepoint. After a timeout the transaction is as usable as before, and its `lock_timeout` and
    /// `statement_timeout` have their old values.
    ///
    /// # Blocking
    ///
    /// Waits for at most `timeout`, rounded up to whole milliseconds. A timeout of zero makes one try. A timeout longer than
    /// PostgreSQL's limit of almost 25 days is shortened to it. Otherwise as [`acquire_xact`](Self::acquire_xact).
    ///
    /// An error of the server within the last hundredth of that time, such as a deadlock or a cancellation, is mistaken for the
    /// timeout, because Diesel does not distinguish these errors.
    ///
    /// # Errors
    ///
    /// As [`acquire_xact`](Self::acquire_xact), except that the transaction is still usable after an error of the wait, such
    /// as a deadlock.
    pub fn acquire_xact_timeout(
        &self,
        conn: &mut PgConnection,
        timeout: Duration,
    ) -> Result<Attempt<()>> {
        let deadline = Deadline::after(timeout);
        now(self.acquire_xact_until_in(&mut Blocking::lent(conn), deadline))
    }

    /// Opens a transaction, takes the lock in it, runs `work`, and commits. Rolls back if `work` fails or panics.
    ///
    /// The transaction is always READ COMMITTED, not the session's default level, so that `work` sees what the previous holder
    /// committed. Three round trips beside the work: `BEGIN TRANSACTION ISOLATION LEVEL READ COMMITTED`, the lock, `COMMIT`.
    /// Inside a test transaction it is a savepoint, and the lock is held until the test transaction ends.
    ///
    /// # Blocking
    ///
    /// Waits for the lock as [`acquire_xact`](Self::acquire_xact) does.
    ///
    /// # Errors
    ///
    /// - [`Misplaced::NestedTransaction`](crate::error::Misplaced::NestedTransaction) inside an open transaction: use
    ///   [`acquire_xact`](Self::acquire_xact) there. A transaction that was opened by a plain SQL `BEGIN` is not detected, and
    ///   would be committed.
    /// - [`Misplaced::XactLockAtRepeatableRead`](crate::error::Misplaced::XactLockAtRepeatableRead) inside a test transaction of
    ///   that level, because a savepoint cannot have another level.
    /// - Diesel's `BrokenTransactionManager` if `work` returned `Ok` and left a nested transaction open, as a caught panic does.
    /// - The error of `work`, and otherwise as [`acquire_xact`](Self::acquire_xact). After an error nothing was committed, unless
    ///   the connection broke during the `COMMIT`, which may have been executed.
    ///
    /// If `work` hides the error of a statement and returns `Ok`, this returns `Ok`, too, although PostgreSQL rolls the
    /// transaction back. Diesel's own `transaction` does the same.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_interlock::{AdvisoryLock, LockKey};
    ///
    /// # diesel::table! { reserved_servers (server_id) { server_id -> Integer } }
    /// fn book(conn: &mut PgConnection, datacenter: i32, server: i32) -> QueryResult<bool> {
    ///     let key = LockKey::parts(["server", &datacenter.to_string(), &server.to_string()]);
    ///     AdvisoryLock::new(key).transaction(conn, |conn| {
    ///         let taken = reserved_servers::table.find(server);
    ///         if diesel::select(diesel::dsl::exists(taken)).get_result(conn)? {
    ///             return Ok(false);
    ///         }
    ///         diesel::insert_into(reserved_servers::table)
    ///             .values(reserved_servers::server_id.eq(server))
    ///             .execute(conn)?;
    ///         Ok(true)
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # let conn = &mut database.connect();
    /// # diesel::sql_query("CREATE TABLE reserved_servers (server_id int)").execute(conn)?;
    /// assert!(book(conn, 223, 345)?);
    /// assert!(!book(conn, 223, 345)?);
    /// # Ok::<(), diesel::result::Error>(())
    /// ```
    pub fn transaction<T, E, F>(&self, conn: &mut PgConnection, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let session = &mut Blocking::lent(conn);
        let mut transaction = now(operations::begin_transaction(session))?;
        let value = match now(self.acquire_xact_in(transaction.session())) {
            Ok(()) => work(transaction.session().conn()),
            Err(error) => Err(error.into()),
        };
        now(transaction.end(value))
    }

    /// As [`transaction`](Self::transaction), but returns [`Attempt::Busy`] without running `work` if another session holds
    /// the lock.
    ///
    /// # Errors
    ///
    /// As [`transaction`](Self::transaction).
    pub fn try_transaction<T, E, F>(
        &self,
        conn: &mut PgConnection,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        self.transaction_timeout(conn, Duration::ZERO, work)
    }

    /// As [`transaction`](Self::transaction), but returns [`Attempt::Busy`] without running `work` if the lock was not
    /// granted within `timeout`.
    ///
    /// # Blocking
    ///
    /// Waits for the lock as [`acquire_xact_timeout`](Self::acquire_xact_timeout) does.
    ///
    /// # Errors
    ///
    /// As [`transaction`](Self::transaction).
    pub fn transaction_timeout<T, E, F>(
        &self,
        conn: &mut PgConnection,
        timeout: Duration,
        work: F,
    ) -> Result<Attempt<T>, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        let deadline = Deadline::after(timeout);
        let session = &mut Blocking::lent(conn);
        let mut transaction = now(operations::begin_transaction(session))?;
        let value = match now(self.acquire_xact_until_in(transaction.session(), deadline)) {
            Ok(Attempt::Acquired(())) => work(transaction.session().conn()).map(Attempt::Acquired),
            Ok(Attempt::Busy) => Ok(Attempt::Busy),
            Err(error) => Err(error.into()),
        };
        now(transaction.end(value))
    }
}
