//! Taking a transaction lock, and the transaction around it.

use std::time::Duration;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use super::AdvisoryLock;
use super::query::{TryAcquireXact, get_numbered_result};
use super::wait::{self, Deadline};
use crate::attempt::Attempt;
use crate::error::{Error, Misplaced, Result};
use crate::events::{self, Outcome, Subject};
use crate::session::{now, sent as send};
use crate::transaction::{self, Transaction};

/// # Transaction locks
///
/// Held until the surrounding transaction ends, with nothing to release. They need no guard, no
/// pinned connection and no session of their own, which makes them **the lock to use behind a
/// pooler in transaction mode**, and the first choice wherever what is protected is a transaction.
///
/// A rollback to a savepoint that was set before the lock was taken releases it too, as does the
/// rollback of a nested `conn.transaction`.
///
/// # Isolation levels
///
/// "Lock, check, insert" is right only if the check sees what the previous holder committed. At
/// REPEATABLE READ it does not: the snapshot is as old as the transaction's first statement, and
/// four sessions that waited for each other still insert four rows. So a lock there is refused, as
/// [`Misplaced::XactLockAtRepeatableRead`](crate::error::Misplaced::XactLockAtRepeatableRead). SERIALIZABLE is allowed: PostgreSQL then lets one succeed and fails
/// the others with a serialization failure
/// ([`DatabaseErrorKind::SerializationFailure`](diesel::result::DatabaseErrorKind)), which is the
/// caller's to repeat.
///
/// # Idle in transaction
///
/// The server's `idle_in_transaction_session_timeout` ends a session that does nothing inside a
/// transaction for too long, and the lock is free. The work then cannot be committed, and the
/// caller learns it from its next statement.
impl AdvisoryLock {
    /// Takes the lock until the transaction ends; waits for it as long as it takes.
    ///
    /// Sends, if the lock is free, one prepared statement:
    /// ```sql
    /// SELECT CASE WHEN current_setting('transaction_isolation') = 'repeatable read' THEN -1
    ///             WHEN pg_is_in_recovery() THEN NULL WHEN pg_try_advisory_xact_lock($1) THEN 1 ELSE 0 END
    /// ```
    /// and otherwise a second message, which lifts the two settings below, waits with
    /// `SELECT pg_advisory_xact_lock(…)` and restores them.
    ///
    /// # Blocking
    ///
    /// Waits in the server's queue, in the order of arrival and under PostgreSQL's deadlock
    /// detection. The caller's own `statement_timeout` and `lock_timeout` do not apply to the wait
    /// and are as they were after it.
    ///
    /// A transaction that waits holds a snapshot: if the holder of the lock runs `CREATE INDEX
    /// CONCURRENTLY` under a session lock of the same key, the two wait for each other, and
    /// PostgreSQL ends one of them with "deadlock detected".
    ///
    /// # Errors
    ///
    /// - [`Misplaced::XactLockOutsideTransaction`](crate::error::Misplaced::XactLockOutsideTransaction) outside a transaction. One that was opened by a plain SQL
    ///   `BEGIN` is not seen.
    /// - [`Misplaced::XactLockAtRepeatableRead`](crate::error::Misplaced::XactLockAtRepeatableRead) and [`Error::Standby`], where the lock would not protect.
    /// - [`Input::EmptyName`](crate::error::Input::EmptyName), before anything is sent.
    /// - [`Error::Database`] for anything else, a deadlock among it. The transaction is then
    ///   aborted.
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
        let mut call = || match self.try_xact(conn)? {
            Attempt::Acquired(()) => Ok(()),
            Attempt::Busy => {
                let id = self.key().id_on(conn)?;
                wait::for_xact_lock(conn, id, self.mode())
            }
        };
        now(events::observe(
            "acquire",
            Subject::Lock(self.key()),
            async { call() },
            |()| Outcome::Acquired,
        ))
    }

    /// Takes the lock until the transaction ends, if it is free; never waits for it.
    ///
    /// One round trip, the statement of [`acquire_xact`](Self::acquire_xact).
    ///
    /// # Errors
    ///
    /// As [`acquire_xact`](Self::acquire_xact).
    pub fn try_acquire_xact(&self, conn: &mut PgConnection) -> Result<Attempt<()>> {
        let mut call = || self.try_xact(conn);
        now(events::observe(
            "acquire",
            Subject::Lock(self.key()),
            async { call() },
            Attempt::outcome,
        ))
    }

    fn try_xact(&self, conn: &mut PgConnection) -> Result<Attempt<()>> {
        let id = self.key().id_on(conn)?;
        match transaction::of(conn) {
            Transaction::Open | Transaction::Test => {}
            Transaction::None => {
                return Err(Error::Misplaced(Misplaced::XactLockOutsideTransaction));
            }
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        let answer: Option<i32> = send(conn, |conn| {
            let (id, mode) = (&id, self.mode());
            get_numbered_result!(TryAcquireXact { id, mode }, conn)
        })?;
        match answer {
            Some(1) => Ok(Attempt::Acquired(())),
            Some(0) => Ok(Attempt::Busy),
            Some(_) => Err(Error::Misplaced(Misplaced::XactLockAtRepeatableRead)),
            None => Err(Error::Standby),
        }
    }

    /// Takes the lock until the transaction ends; waits at most `timeout` for it.
    ///
    /// One round trip if the lock is free, as [`acquire_xact`](Self::acquire_xact); otherwise three
    /// more, since the wait runs in a savepoint. After a time-out the transaction is as usable as
    /// before, and so are its `lock_timeout` and `statement_timeout`.
    ///
    /// # Blocking
    ///
    /// For `timeout`, rounded up to whole milliseconds; zero is a try. What exceeds PostgreSQL's
    /// limit of almost 25 days is cut to it. Otherwise as [`acquire_xact`](Self::acquire_xact).
    ///
    /// An error of the server within the last hundredth of that time, such as a deadlock or a
    /// cancellation, is taken for the timeout, because Diesel does not tell these errors apart.
    ///
    /// # Errors
    ///
    /// As [`acquire_xact`](Self::acquire_xact), but after an error while waiting (a deadlock,
    /// say) the transaction is still usable.
    pub fn acquire_xact_timeout(
        &self,
        conn: &mut PgConnection,
        timeout: Duration,
    ) -> Result<Attempt<()>> {
        let deadline = Deadline::after(timeout);
        let mut call = || {
            if let Attempt::Acquired(()) = self.try_xact(conn)? {
                return Ok(Attempt::Acquired(()));
            }
            let id = self.key().id_on(conn)?;
            Ok(
                if wait::for_xact_lock_until(conn, id, self.mode(), deadline)? {
                    Attempt::Acquired(())
                } else {
                    Attempt::Busy
                },
            )
        };
        now(events::observe(
            "acquire",
            Subject::Lock(self.key()),
            async { call() },
            Attempt::outcome,
        ))
    }

    /// Opens a transaction, takes the lock in it, runs `work` and commits; rolls back if `work`
    /// fails.
    ///
    /// The transaction is READ COMMITTED whatever the session's default is, so that `work` sees
    /// what the previous holder committed. Three round trips beside the work: `BEGIN TRANSACTION
    /// ISOLATION LEVEL READ COMMITTED`, the lock, `COMMIT`. Inside a test transaction it is a
    /// savepoint, and the lock stays until the test transaction ends.
    ///
    /// # Blocking
    ///
    /// Waits for the lock as [`acquire_xact`](Self::acquire_xact) does.
    ///
    /// # Errors
    ///
    /// - [`Misplaced::NestedTransaction`](crate::error::Misplaced::NestedTransaction) inside an open transaction: use
    ///   [`acquire_xact`](Self::acquire_xact) there. One that was opened by a plain SQL `BEGIN` is
    ///   not seen, and would be committed.
    /// - [`Misplaced::XactLockAtRepeatableRead`](crate::error::Misplaced::XactLockAtRepeatableRead) inside a test transaction of that level, whose savepoint has no
    ///   level of its own.
    /// - What `work` answers, and otherwise as [`acquire_xact`](Self::acquire_xact). Nothing was
    ///   committed then.
    ///
    /// As with Diesel's own `transaction`, `work` that hides the error of a statement and answers
    /// `Ok` is believed, though PostgreSQL rolls back what such an error aborted.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_interlock::{AdvisoryLock, LockKey};
    ///
    /// # diesel::table! { reserved_servers (server_id) { server_id -> Integer } }
    /// fn book(conn: &mut PgConnection, datacenter: i32, server: i32) -> QueryResult<bool> {
    ///     AdvisoryLock::new(LockKey::parts([datacenter, server])).transaction(conn, |conn| {
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
        run_transaction(conn, |conn| {
            self.acquire_xact(conn)?;
            work(conn).map_err(Failure::Work)
        })
    }

    /// As [`transaction`](Self::transaction), but answers [`Attempt::Busy`] without running `work`
    /// if another session has the lock.
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
        run_transaction(conn, |conn| match self.try_acquire_xact(conn)? {
            Attempt::Acquired(()) => work(conn).map(Attempt::Acquired).map_err(Failure::Work),
            Attempt::Busy => Ok(Attempt::Busy),
        })
    }

    /// As [`transaction`](Self::transaction), but answers [`Attempt::Busy`] without running `work`
    /// if the lock was not to be had within `timeout`.
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
        run_transaction(conn, |conn| {
            match self.acquire_xact_timeout(conn, timeout)? {
                Attempt::Acquired(()) => work(conn).map(Attempt::Acquired).map_err(Failure::Work),
                Attempt::Busy => Ok(Attempt::Busy),
            }
        })
    }
}

/// Keeps the caller's error, of which we know only that it can be made from ours, apart from
/// those that Diesel's transaction wants to report.
enum Failure<E> {
    Lock(Error),
    Work(E),
}

impl<E> From<Error> for Failure<E> {
    fn from(error: Error) -> Self {
        Failure::Lock(error)
    }
}

impl<E> From<DieselError> for Failure<E> {
    fn from(error: DieselError) -> Self {
        Failure::Lock(error.into())
    }
}

fn run_transaction<T, E: From<Error>>(
    conn: &mut PgConnection,
    work: impl FnOnce(&mut PgConnection) -> Result<T, Failure<E>>,
) -> Result<T, E> {
    match transaction::of(conn) {
        Transaction::None => conn.build_transaction().read_committed().run(work),
        Transaction::Test => conn.transaction(work),
        Transaction::Open => Err(Failure::Lock(Error::Misplaced(
            Misplaced::NestedTransaction,
        ))),
        Transaction::Broken => Err(DieselError::BrokenTransactionManager.into()),
    }
    .map_err(|failure| match failure {
        Failure::Lock(error) => error.into(),
        Failure::Work(error) => error,
    })
}
