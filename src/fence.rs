//! Fences: where a holder that is no longer one is stopped.

use std::borrow::Cow;

use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use crate::error::{Error, Input, Misplaced, Result};
use crate::functions::pass_fence;
use crate::installed;
use crate::session::{Blocking, Session, is_serialization_failure, now};
use crate::transaction::Transaction;

/// Guards what is written in the database from a holder of a lock, or of a slot, that lost it and does
/// not know: a process that was suspended, or cut off, and goes on.
///
/// PostgreSQL keeps the greatest fencing token that passed, in `resource_control.fence`. A writer
/// passes the fence inside the transaction that writes; one whose token is smaller than one that has
/// passed before is refused. A new holder passes once before it reads, so that whatever the former
/// one has not committed by then is refused.
///
/// One fence takes the tokens of one kind: those of one [lock](crate::AdvisoryLockGuard::fencing_token),
/// or those of one [slot](crate::Permit::fencing_token), which ascend from each holder to the next.
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
/// // … on this connection or any other, minutes later:
/// let conn = &mut pool.get()?;
/// conn.transaction(|conn| {
///     IMPORTED.pass(conn, token)?; // Err(Fenced) if somebody else has the lock and has passed
///     // … write
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fence {
    name: Cow<'static, str>,
}

impl Fence {
    /// Names a fence after what it protects. 1 to 1,000 bytes; anything else is reported by
    /// [`pass`](Self::pass).
    pub const fn named(name: &'static str) -> Self {
        Self {
            name: Cow::Borrowed(name),
        }
    }

    /// As [`named`](Self::named), for a name that is put together at run time.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: Cow::Owned(name.into()),
        }
    }

    /// The name, without the prefix of a test.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Lets the token pass, unless a greater one has. The transaction is to be rolled back if it does
    /// not, which `?` in Diesel's `transaction` does.
    ///
    /// One round trip: `SELECT resource_control.pass_fence($1, $2)`.
    ///
    /// # Blocking
    ///
    /// Waits for the other transaction that is passing this fence to end.
    ///
    /// # Errors
    ///
    /// - [`Error::Fenced`] if a greater token has passed: that of a later holder. Guards of one lock on one
    ///   session have [one token](crate::AdvisoryLockGuard::fencing_token).
    /// - [`Misplaced::FenceOutsideTransaction`](crate::error::Misplaced::FenceOutsideTransaction) outside a transaction, where nothing would be protected. One
    ///   that was opened by a plain SQL `BEGIN` is not seen.
    /// - [`Input::EmptyName`](crate::error::Input::EmptyName), [`Input::TooLong`](crate::error::Input::TooLong) and [`Input::NulCharacter`](crate::error::Input::NulCharacter), before anything is sent.
    /// - [`Error::ReadOnly`] in a read-only transaction.
    /// - [`Error::StrictIsolation`] for a serialization failure.
    /// - [`Error::Database`] for anything else, a missing schema or a missing right among it. Such an error
    ///   has aborted the transaction, so this cannot ask the catalogue which of them it was, as operations
    ///   outside a transaction do; the message of the server tells.
    pub fn pass(&self, conn: &mut PgConnection, token: i64) -> Result<()> {
        now(self.pass_in(&mut Blocking::lent(conn), token))
    }

    async fn pass_in<S: Session>(&self, session: &mut S, token: i64) -> Result<()> {
        if self.name.is_empty() {
            return Err(Input::EmptyName.into());
        }
        let name = session.name(&self.name).checked("the name of a fence")?;
        match session.transaction() {
            Transaction::Open | Transaction::Test => {}
            Transaction::None => return Err(Misplaced::FenceOutsideTransaction.into()),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
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
            Err(error) => Err(installed::explain(session, error, None).await),
        }
    }
}
