//! Fences: a transaction of an earlier holder is refused.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use diesel::sql_types::Bool;

use crate::call::classify;
use crate::error::{Error, Result};
use crate::event::{Outcome, Subject};
use crate::input;
use crate::mode::Mode;
use crate::pool::{Connection, Pool, Reply, debug};
use crate::session::{Session, Transaction};
use crate::statement::Statement;
use crate::transaction::refusal;

/// Protects data of the database from a holder that goes on without noticing that it has lost its
/// lock or its slot, such as a process that was suspended or cut off.
///
/// PostgreSQL keeps the largest fencing token that has passed. A writer passes the fence in the
/// transaction that writes; if a larger token has passed before, that is an error, and the writer
/// rolls back. A new holder passes the fence once, in a transaction that it commits, before it
/// reads: from then on no earlier holder can commit a write through it.
///
/// Use one fence for the tokens of one source: one
/// [lock](crate::advisory::AdvisoryLockGuard::fencing_token), one [service and
/// slot](crate::semaphore::Permit::fencing_token), one leader or schedule. Tokens of different
/// sources are not ordered.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{AdvisoryLock, Error, Fence};
///
/// static IMPORT: AdvisoryLock = AdvisoryLock::named("import");
/// static IMPORTED: Fence = Fence::named("imported rows");
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// # diesel_interlock::migrations::install(&pool)?;
/// let mut guard = IMPORT.acquire(&pool)?;
/// let token = guard.fencing_token()?;
/// let conn = &mut pool.get()?; // any connection
/// // From here on, earlier holders are refused:
/// conn.transaction(|conn| IMPORTED.pass(conn, token))?;
/// // … read, and minutes later:
/// conn.transaction(|conn| {
///     IMPORTED.pass(conn, token)?; // an error if a later holder has passed
///     // … write
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Fenced`] if a larger token has passed, [`Error::OutsideTransaction`], [`Error::Input`],
/// and [`Error::Database`].
#[must_use = "a fence protects nothing until it is passed"]
#[derive(Clone)]
pub struct Fence<P: Pool> {
    name: &'static str,
    /// What the database knows it by: the name, and the key if there is one.
    stored: Cow<'static, str>,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> Fence<P> {
    /// Makes a fence, named after the data that it protects.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            stored: Cow::Borrowed(name),
            pool: PhantomData,
        }
    }

    /// Returns the fence of one thing. A second key replaces the first.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            name: self.name,
            stored: Cow::Owned(input::join([self.name, &input::show(key)])),
            pool: PhantomData,
        }
    }

    /// Passes the fence with a token, unless a larger one has passed it. The same token passes
    /// again.
    ///
    /// Roll the transaction back on an error, as `?` in Diesel's `transaction` does. Waits for the
    /// end of another transaction that has passed this fence. One round trip: `SELECT
    /// resource_control.pass_fence($1, $2)`.
    pub fn pass<'a>(&'a self, conn: &'a mut Connection<P>, token: i64) -> Reply<'a, P, ()> {
        let subject = Subject {
            primitive: "fence",
            name: self.name,
        };
        P::Mode::drive(async move {
            let passed = subject
                .observe("pass", self.pass_unreported(conn, token))
                .await;
            passed.map(|Passed| ())
        })
    }

    async fn pass_unreported<S: Session>(&self, session: &mut S, token: i64) -> Result<Passed> {
        input::name(self.name)?;
        input::name(&self.stored)?;
        match session.transaction() {
            Transaction::Open | Transaction::Test => {}
            Transaction::None => return Err(Error::OutsideTransaction),
            Transaction::Broken => return Err(refusal(Transaction::Broken)),
        }
        const PASS: &str = "SELECT resource_control.pass_fence($1, $2)";
        let pass = Statement::<Bool>::new(PASS, [(&*self.stored).into(), token.into()]);
        match session.one(&pass).await {
            Ok(true) => Ok(Passed),
            Ok(false) => {
                let name = self.stored.to_string();
                Err(Error::Fenced { name, token })
            }
            Err(error) => Err(classify(session, error).await),
        }
    }
}

struct Passed;

impl Outcome for Passed {
    fn word(&self) -> &'static str {
        "passed"
    }
}

debug!(Fence | this | name = this.stored);
