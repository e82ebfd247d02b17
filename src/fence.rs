//! Fences: where a holder that is no longer one is stopped.

use std::borrow::Cow;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use crate::error::{Error, Result};
use crate::functions::pass_fence;
use crate::installed;
use crate::read_committed::is_serialization_failure;
use crate::send::send;
use crate::text;
use crate::transaction::{self, Transaction};

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
    /// - [`Error::FenceOutsideTransaction`] outside a transaction, where nothing would be protected. One
    ///   that was opened by a plain SQL `BEGIN` is not seen.
    /// - [`Error::EmptyName`], [`Error::TooLong`] and [`Error::NulCharacter`], before anything is sent.
    /// - [`Error::ReadOnly`] in a read-only transaction.
    /// - [`Error::StrictIsolation`] for a serialization failure.
    /// - [`Error::Database`] for anything else, a missing schema or a missing right among it. Such an error
    ///   has aborted the transaction, so this cannot ask the catalogue which of them it was, as operations
    ///   outside a transaction do; the message of the server tells.
    pub fn pass(&self, conn: &mut PgConnection, token: i64) -> Result<()> {
        if self.name.is_empty() {
            return Err(Error::EmptyName);
        }
        let _names = text::names_on(conn);
        let name = text::name(&self.name);
        text::check(&name, "the name of a fence", text::LONGEST_NAME)?;
        match transaction::of(conn) {
            Transaction::Open | Transaction::Test => {}
            Transaction::None => return Err(Error::FenceOutsideTransaction),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        let pass = |conn: &mut _| diesel::select(pass_fence(&*name, token)).get_result(conn);
        match send(conn, pass) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Fenced {
                name: self.name.to_string(),
                token,
            }),
            Err(error) if is_serialization_failure(&error) => Err(Error::StrictIsolation),
            Err(error) => Err(installed::explain(conn, error, None)),
        }
    }
}
