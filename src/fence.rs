//! Fences: the transaction of an earlier holder is refused.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use diesel::sql_types::Bool;

use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input;
use crate::mode::Mode;
use crate::pool::{ConnectionOf, Pool, Reply, impl_debug};
use crate::session::{Session, Transaction, classify};
use crate::statement::Statement;
use crate::transaction::refusal;

/// Protects data in the database from a holder that has lost its lock or slot and does not know it,
/// for example a process that was suspended or cut off.
///
/// PostgreSQL stores the largest fencing token that has passed. A writer passes the fence in the
/// transaction that writes. If a larger token has passed before, `pass` returns an error, and the
/// writer rolls back.
///
/// A new holder passes the fence once before it reads, in a transaction that it commits. From then
/// on, no earlier holder can commit a write that must pass this fence.
///
/// Use a fence only for tokens of one source: one
/// [lock](crate::advisory::AdvisoryLockGuard::fencing_token), one [service and
/// slot](crate::semaphore::Permit::fencing_token), one leader or one schedule. Tokens of different
/// sources cannot be compared.
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
/// [`Error::Standby`] if the server refuses to write, and [`Error::Database`].
#[must_use = "a fence protects nothing until it is passed"]
#[derive(Clone)]
pub struct Fence<P: Pool> {
    name: &'static str,
    /// The name in the database: the name, and the key if there is one.
    stored: Cow<'static, str>,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> Fence<P> {
    /// Makes a fence. Name it after the data that it protects.
    pub const fn named(name: &'static str) -> Self {
        Self {
            name,
            stored: Cow::Borrowed(name),
            pool: PhantomData,
        }
    }

    /// Returns the fence of one thing. A second call replaces the first key.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            name: self.name,
            stored: Cow::Owned(input::with_key(&[self.name], &input::show(key))),
            pool: PhantomData,
        }
    }

    /// Passes the fence with a token, or returns an error if a larger token has passed it. The same
    /// token may pass again.
    ///
    /// Call it in the transaction that writes, and roll that transaction back on an error, as `?`
    /// in Diesel's `transaction` does. It waits until other transactions that have passed this
    /// fence end. One round trip: `SELECT resource_control.pass_fence($1, $2)`.
    pub fn pass<'a>(&'a self, conn: &'a mut ConnectionOf<P>, token: i64) -> Reply<'a, P, ()> {
        let subject = Subject {
            primitive: "fence",
            name: self.name,
        };
        P::Mode::drive(subject.observe_as("pass", |()| "passed", self.pass_unreported(conn, token)))
    }

    async fn pass_unreported<S: Session>(&self, session: &mut S, token: i64) -> Result<()> {
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
            Ok(true) => Ok(()),
            Ok(false) => {
                let name = self.stored.to_string();
                Err(Error::Fenced { name, token })
            }
            Err(error) => Err(classify(session, error).await),
        }
    }
}

impl_debug!(Fence | this | name = this.stored);
