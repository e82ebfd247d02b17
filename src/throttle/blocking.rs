//! Throttles over a pool and on a connection, blocking.

use diesel::pg::PgConnection;

use super::sync::{LOCK, add_missing, compare, log, overwrite};
use super::{Decision, DeclaredResources, Grant, Synced, Throttle, ThrottledResource};
use super::{operations, rules};
use crate::error::{Error, Result};
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool};
use crate::session::{Blocking, now};
#[cfg(feature = "r2d2")]
use crate::text::Name;
use crate::transaction;

/// # Attempts
///
/// An attempt is one round trip, and one more to prepare the statement, once per connection:
/// ```sql
/// SELECT … FROM resource_control.attempt_throttled_resource($1, $2)
/// SELECT … FROM resource_control.attempt_throttled_key($1, $2, $3) -- with a key
/// ```
/// A denial only reads. It locks no row and assigns no transaction id. Where the session's default isolation level is stricter than
/// READ COMMITTED, a serialization failure is retried once, in a separate READ COMMITTED transaction. After an error that Diesel
/// does not classify, one more round trip queries the catalogue, because a function, a table or a privilege may be missing.
///
/// # Errors of attempts
///
/// - [`Error::Input`] for a key or details that are empty, for a key longer than 1,000 bytes, for details longer than 8,192
///   bytes, for a label longer than 63 bytes, for a NUL character, and for a key whose `Display` fails. Nothing was sent.
/// - [`Schema::UnknownResource`](crate::error::Schema::UnknownResource) if the resource has no row: run
///   [`sync`](crate::sync).
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and
///   [`Schema::MissingRights`](crate::error::Schema::MissingRights).
/// - [`Error::ReadOnly`] on a standby and in a read-only transaction, unless the resource is not due: then the attempt is denied.
/// - [`Error::StrictIsolation`] for a serialization failure inside the caller's own transaction.
/// - [`Error::Pool`](crate::Error::Pool) if the pool had no connection in time, and
///   [`Error::TransactionInPool`](crate::Error::TransactionInPool) if an earlier user of the connection had left a
///   transaction open.
/// - [`Error::Database`] for anything else.
impl<R: ThrottledResource> Throttle<R> {
    /// Takes the resource if it is due, through a connection from the pool. Never waits for the resource.
    ///
    /// The grant is committed when this returns, and the connection is back in the pool.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows.
    ///
    /// # Errors
    ///
    /// See [errors of attempts](#errors-of-attempts).
    #[cfg(feature = "r2d2")]
    pub fn attempt(&self, pool: &PgPool) -> Result<Decision> {
        let attempt = async {
            self.checked_with_details(Name::anywhere)?; // before the pool is asked
            let mut conn = pool::check_out(pool, None)?;
            operations::send_committed(&mut Blocking::pooled(&mut conn), self).await
        };
        now(operations::observed(self, attempt))
    }

    /// Takes the resource if it is due, on the given connection. Never waits for the resource.
    ///
    /// Inside a transaction, the grant counts when the transaction commits: see [the type](Self#order-of-grant-and-work).
    ///
    /// # Errors
    ///
    /// See [errors of attempts](#errors-of-attempts).
    pub fn attempt_on(&self, conn: &mut PgConnection) -> Result<Decision> {
        now(operations::attempt(&mut Blocking::lent(conn), self))
    }

    /// Runs `work` if the resource is due, and returns its value, or the denial.
    ///
    /// The grant is committed, and the connection is back in the pool, before `work` runs. If `work` fails, the resource is
    /// due again when its interval has passed, not before.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows.
    ///
    /// # Errors
    ///
    /// The error of `work`, and the [errors of attempts](#errors-of-attempts).
    #[cfg(feature = "r2d2")]
    pub fn run<T, E, F>(&self, pool: &PgPool, work: F) -> Result<Decision<T>, E>
    where
        F: FnOnce(Grant) -> Result<T, E>,
        E: From<Error>,
    {
        match self.attempt(pool)? {
            Decision::Granted(grant) => work(grant).map(Decision::Granted),
            Decision::Denied(denial) => Ok(Decision::Denied(denial)),
        }
    }

    /// Runs `work` on the given connection if the resource is due, and returns its value, or the denial.
    ///
    /// The grant is committed before `work` runs, as with [`run`](Self::run). A transaction that was opened by a plain SQL `BEGIN`
    /// is not detected: the grant then counts when that transaction commits.
    ///
    /// # Errors
    ///
    /// The error of `work`, the [errors of attempts](#errors-of-attempts), and
    /// [`Misplaced::GrantInTransaction`](crate::error::Misplaced::GrantInTransaction) inside an open transaction, where the
    /// grant could not be committed before `work` runs.
    pub fn run_on<T, E, F>(&self, conn: &mut PgConnection, work: F) -> Result<Decision<T>, E>
    where
        F: FnOnce(&mut PgConnection, Grant) -> Result<T, E>,
        E: From<Error>,
    {
        let decision = now(operations::attempt_committed(
            &mut Blocking::lent(conn),
            self,
        ))?;
        match decision {
            Decision::Granted(grant) => work(conn, grant).map(Decision::Granted),
            Decision::Denied(denial) => Ok(Decision::Denied(denial)),
        }
    }
}

/// Inserts the declared resources that the database does not have. Returns what it inserted, and which intervals differ.
///
/// Call it at every start of a program. Many instances may call it at the same time. It reads first, one round trip per resource.
/// If nothing is missing, it writes nothing. It sends DDL only if a label is missing, so otherwise it succeeds for a role that may
/// not alter the type. To write, it takes a session lock and adds what is missing of each resource: its label
/// (`ALTER TYPE … ADD VALUE IF NOT EXISTS`) and its row (`INSERT … ON CONFLICT DO NOTHING`), each committed by itself.
///
/// The database owns the interval from then on. A changed `every` has no effect until [`sync_intervals`] is called,
/// because an operator may have changed the row. Each interval that differs is returned and logged as a
/// [warning](crate#events). Resources that are not declared stay as they are.
///
/// # Blocking
///
/// Waits for other instances that insert resources, as [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on) does.
///
/// # Errors
///
/// - [`Input::BadLabel`](crate::error::Input::BadLabel), [`Input::BadInterval`](crate::error::Input::BadInterval) and
///   [`Input::NulCharacter`](crate::error::Input::NulCharacter), before anything is sent.
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test
///   transaction included.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled).
/// - [`Schema::MissingRights`](crate::error::Schema::MissingRights) if a label is missing and the role does not own the type, or
///   if the role lacks the grants.
/// - Those of [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on).
pub fn sync<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    let synced = insert_missing::<R>(conn)?;
    log(&synced.different);
    Ok(synced)
}

/// Does the same as [`sync`], and then overwrites the intervals that differ with the declared ones. It returns those as
/// `different` and does not log them.
///
/// # Errors
///
/// As [`sync`].
pub fn sync_intervals<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    let synced = insert_missing::<R>(conn)?;
    now(overwrite(&mut Blocking::lent(conn), &synced.different))?;
    Ok(synced)
}

fn insert_missing<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    let declared = rules::declared::<R>()?;
    transaction::refuse_any(transaction::of(conn))?;
    let (missing, synced) = now(compare(&mut Blocking::lent(conn), &declared))?;
    if missing.is_empty() {
        return Ok(synced);
    }
    let mut guard = LOCK.acquire_on(conn)?;
    let synced = now(add_missing(&mut Blocking::lent(guard.conn()), &declared))?;
    guard.release()?;
    Ok(synced)
}
