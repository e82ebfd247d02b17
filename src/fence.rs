//! Fences: a transaction of an earlier holder is refused.
//!
//! A fence is one statement, so all of its rooms but the asynchronous one are this file.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;

use std::borrow::Cow;

#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

use crate::error::{Error, Input, Misplaced, Result};
use crate::functions::pass_fence;
use crate::installed;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
use crate::session::{Session, is_serialization_failure};
use crate::transaction;

/// Protects data in the database from a holder that continues without noticing that it has lost its lock or its slot, such as a
/// process that was suspended or cut off.
///
/// PostgreSQL stores the largest fencing token that has passed, in `resource_control.fence`. A writer passes the fence inside the
/// transaction that writes. If a larger token has passed before, the fence returns an error, and the writer must roll its
/// transaction back. A new holder passes the fence once, in a transaction that it commits, before it reads. From then on no earlier
/// holder can commit a write through this fence, so what the new holder reads stays as it is.
///
/// Use one fence for the tokens of one source: one [lock](crate::AdvisoryLockGuard::fencing_token) or one
/// [slot](crate::Permit::fencing_token) of a semaphore. Each new holder of a lock or slot gets a larger token, but
/// tokens of different sources are not ordered.
///
/// # Examples
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{AdvisoryLock, Error, Fence};
///
/// static IMPORT: AdvisoryLock = AdvisoryLock::named("import").fenced();
/// static IMPORTED: Fence = Fence::named("imported rows");
///
/// # let database = workbench::Database::new();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// # let pool = database.pool(2);
/// let mut guard = IMPORT.acquire(&pool)?;
/// let token = guard.fencing_token()?;
/// let conn = &mut pool.get()?; // any connection
/// conn.transaction(|conn| IMPORTED.pass(conn, token))?; // from here on, earlier holders are refused
/// // … read, and minutes later:
/// conn.transaction(|conn| {
///     IMPORTED.pass(conn, token)?; // Err(Fenced) if a later holder has passed
///     // … write
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a fence protects nothing until it is passed"]
pub struct Fence {
    name: Cow<'static, str>,
}

impl Fence {
    /// Makes a fence, named after the data that it protects. The name has 1 to 1,000 bytes. [`pass`](Self::pass)
    /// returns an error for any other name.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name: Cow::Borrowed(name),
        }
    }

    /// As [`named`](Self::named), for a name that is known only at run time.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: Cow::Owned(name.into()),
        }
    }

    /// Returns the name, without the prefix of a test.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Passes the fence with a token, unless a larger token has passed it. The same token passes again.
    ///
    /// Roll the transaction back on an error, as `?` in Diesel's `transaction` does.
    ///
    /// One round trip: `SELECT resource_control.pass_fence($1, $2)`.
    ///
    /// # Blocking
    ///
    /// Waits for the end of another transaction that has passed this fence.
    ///
    /// # Errors
    ///
    /// - [`Error::Fenced`] if a larger token has passed, which is that of a later holder. Nested guards of one lock on one session
    ///   normally [share a token](crate::AdvisoryLockGuard::fencing_token), so the inner one does not shut out the outer one then.
    /// - [`Misplaced::FenceOutsideTransaction`](crate::error::Misplaced::FenceOutsideTransaction) outside a
    ///   transaction, where the fence would protect nothing. A transaction that a plain SQL `BEGIN` opened is not seen,
    ///   and counts as none.
    /// - [`Error::Input`] for a name that is empty, longer than 1,000 bytes, or contains a NUL character. Nothing was sent.
    /// - [`Error::ReadOnly`] in a read-only transaction.
    /// - [`Error::StrictIsolation`] for a serialization failure.
    /// - [`Error::Database`] for anything else, including a missing schema or right. Operations outside a transaction
    ///   query the catalogue for what is missing. Here the error has aborted the transaction, so only the server's
    ///   message says it.
    #[cfg(feature = "postgres")]
    pub fn pass(&self, conn: &mut PgConnection, token: i64) -> Result<()> {
        now(self.pass_in(&mut Blocking::lent(conn), token))
    }

    async fn pass_in<S: Session>(&self, session: &mut S, token: i64) -> Result<()> {
        if self.name.is_empty() {
            return Err(Input::EmptyName.into());
        }
        let name = session.name(&self.name).checked("the name of a fence")?;
        transaction::require_open(session.transaction(), Misplaced::FenceOutsideTransaction)?;
        match session
            .one(diesel::select(pass_fence(name.as_str(), token)))
            .await
        {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Fenced {
                name: self.name.to_string(),
                token,
            }),
            Err(error) if is_serialization_failure(&error) => Err(Error::StrictIsolation),
            Err(error) => Err(installed::by_kind(error)),
        }
    }
}
