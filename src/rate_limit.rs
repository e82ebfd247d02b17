//! Rate limits: a number of units per period and key, on all instances together.

mod all;
mod check;
mod headers;
mod local;
mod quota;
pub(crate) mod sql;

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use diesel::data_types::PgInterval;
use diesel::deserialize::FromSqlRow;
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::sql_types::BigInt;

pub use self::check::{Check, KeyState, Limited, Spent};
pub use self::local::{LocalCheck, LocalRateLimit};
pub use self::quota::Quota;
use self::sql::{Call, Commit, Row};
use crate::call::{Question, ask, ask_on};
use crate::error::{Error, Result};
use crate::event::{Subject, changed};
use crate::input;
use crate::input::difference;
use crate::mode::Mode;
use crate::pool::{Checkout, ConnectionOf, Pool, Reply, impl_debug};
use crate::session::{Session, is_unknown};
use crate::statement::Database;
use crate::statement::Statement;
use crate::transaction::Own;
use crate::waiting::{self, Turns, What};

/// Allows N units per period for each key, and up to [`burst`](Quota::burst) units at once.
///
/// In no period are more than burst + N units allowed, on all instances together, by the database's
/// clock.
///
/// ```
/// use diesel_interlock::{Check, Error, PgPool, Quota, RateLimit};
///
/// static LOGINS: RateLimit = RateLimit::named("logins", Quota::per_minute(10).burst(3));
///
/// fn login(pool: &PgPool, user: &str) -> Result<String, Error> {
///     Ok(match LOGINS.key(user).check(pool)? {
///         Check::Allowed(_) => "welcome".to_owned(),
///         Check::Limited(limited) => format!("429 Retry-After: {}", limited.retry_after_secs()),
///     })
/// }
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # diesel_interlock::migrations::install(&pool)?;
/// # assert_eq!([login(&pool, "a")?, login(&pool, "a")?, login(&pool, "a")?], ["welcome"; 3]);
/// # assert!(login(&pool, "a")?.starts_with("429 "));
/// # Ok::<(), Error>(())
/// ```
///
/// A key has a row from its first call until it is [pruned](crate::prune::rate_limits). A denial
/// only reads. A changed quota applies from the key's next call on; the units that the key owes
/// stay owed.
///
/// A grant commits asynchronously, so a crash of the server may forget the grants of the last
/// second. If that matters, make the limit [`durable`](Self::durable). A check on the caller's
/// connection is committed with the caller's transaction, as that transaction commits.
///
/// An operation that writes to a key waits while another transaction that has checked this key is
/// open. Over a pool it gives up with [`Error::KeyLocked`] if the key is still locked after 250 ms,
/// so that a forgotten `BEGIN` on a busy key does not use up the pool. If the key was free for a
/// moment, it waits again, at most four times in all.
///
/// # Errors
///
/// [`Error::Input`], for example for a cost above the burst, [`Error::Pool`], [`Error::KeyLocked`],
/// [`Error::NotInstalled`], [`Error::Standby`] if the server refuses to write,
/// [`Error::DirtyConnection`] and [`Error::Database`].
#[must_use = "a rate limit decides nothing until it is checked"]
#[derive(Clone)]
pub struct RateLimit<P: Pool> {
    name: &'static str,
    key: Cow<'static, str>,
    quota: Quota,
    cost: u32,
    is_durable: bool,
    pool: PhantomData<fn(&P)>,
}

/// How often a call is repeated after an error that [may be that of a locked row](may_be_locked).
/// Once is enough if the key has a row, because the repetition locks it first. If it has none, the
/// repetition may wait for another first call of the key.
const RETRIES: usize = 3;

/// Whether the error may be that of a wait for a row which has timed out. Diesel has no kind for
/// it.
const fn may_be_locked(error: &Error) -> bool {
    matches!(error, Error::Database(cause) if is_unknown(cause))
}

impl<P: Pool> RateLimit<P> {
    /// Makes a limit with this name and quota.
    pub const fn named(name: &'static str, quota: Quota) -> Self {
        Self {
            name,
            key: Cow::Borrowed(""),
            quota,
            cost: 1,
            is_durable: false,
            pool: PhantomData,
        }
    }

    /// Returns the limit of one caller, tenant or address. Each key has a quota of its own to
    /// spend. An empty key is none. A second call replaces the first key.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Cow::Owned(input::show(key)),
            ..*self
        }
    }

    /// Returns the limit with another quota, for a key that does not have the usual one.
    ///
    /// The units that the key owes stay owed, and are refilled at the new rate: a key that has used
    /// 9,000 of `per_day(10_000)` and then gets `per_day(100)` is limited for 89 days. To let it
    /// start anew, [`reset`](Self::reset) it.
    pub fn quota(&self, quota: Quota) -> Self {
        Self {
            quota,
            ..self.clone()
        }
    }

    /// Returns the limit for calls that each cost this many units. The default is one.
    pub fn cost(&self, units: u32) -> Self {
        Self {
            cost: units,
            ..self.clone()
        }
    }

    /// Makes grants survive a crash of the server. Each grant then waits until the server has
    /// flushed its log.
    pub const fn durable(mut self) -> Self {
        self.is_durable = true;
        self
    }

    /// Spends the units if they are available.
    ///
    /// One round trip. A key's first call and a call with a changed quota take three.
    pub fn check<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Check> {
        P::Mode::drive(
            self.subject()
                .observe("check", self.check_within(pool, None)),
        )
    }

    /// Checks as [`check`](Self::check) does, in the transaction of `conn`.
    ///
    /// If that transaction is rolled back, the units are given back. Until it ends, all other
    /// checks of the key wait.
    pub fn check_on<'a>(&'a self, conn: &'a mut ConnectionOf<P>) -> Reply<'a, P, Check> {
        P::Mode::drive(
            self.subject()
                .observe("check_on", self.decide(conn, Commit::Callers)),
        )
    }

    /// Waits for at most `timeout` until the units are available, and spends them.
    ///
    /// It checks, pauses for `retry_after`, and checks again. If the pause would end after
    /// `timeout`, it returns [`Check::Limited`] at once. It holds no connection while it pauses,
    /// and reserves nothing, so a caller that gives up has taken nothing. No order is promised.
    ///
    /// It fails with [`Error::TimedOut`] if not even the first check had a reply in time; that
    /// check may have spent the units. A timeout of zero is the same as [`check`](Self::check).
    pub fn acquire_timeout<'a>(&'a self, pool: &'a P, timeout: Duration) -> Reply<'a, P, Check> {
        P::Mode::drive(async move {
            if timeout.is_zero() {
                let once = self.check_within(pool, None);
                return self.subject().observe_wait("acquire_timeout", once).await;
            }
            let wait = self.wait(pool, Instant::now().checked_add(timeout));
            self.subject().observe_wait("acquire_timeout", wait).await
        })
    }

    /// Reads how many units the key has, and spends nothing. One round trip.
    pub fn peek<'a>(&'a self, pool: &'a P) -> Reply<'a, P, KeyState> {
        P::Mode::drive(self.look(pool))
    }

    /// Makes the key full, and returns whether it was not full before. One round trip.
    pub fn reset<'a>(&'a self, pool: &'a P) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let reset = async {
                let (call, _) = self.call()?;
                self.change(pool, call.reset()).await
            };
            self.subject().observe_as("reset", changed, reset).await
        })
    }

    /// Gives back units that a check of this key has spent, less those that have refilled since.
    /// One round trip.
    ///
    /// All refunds of a check together give back at most the units that it spent. The units of a
    /// refund that fails count as given back, too, so that nothing is refunded twice. Returns
    /// `false` if there was nothing to give back, for example because the key was reset or its
    /// quota was changed.
    ///
    /// ```
    /// use diesel_interlock::{Check, Error, PgPool, Quota, RateLimit};
    ///
    /// static TOKENS: RateLimit = RateLimit::named("tokens", Quota::per_minute(10_000));
    ///
    /// fn complete(pool: &PgPool, customer: i64, prompt: &str) -> Result<Option<String>, Error> {
    ///     let most = TOKENS.key(customer).cost(1_000);
    ///     let Check::Allowed(spent) = most.check(pool)? else {
    ///         return Ok(None);
    ///     };
    ///     let (answer, used) = ask_the_model(prompt);
    ///     most.refund(pool, &spent, 1_000 - used)?;
    ///     Ok(Some(answer))
    /// }
    /// # fn ask_the_model(prompt: &str) -> (String, u32) { (prompt.to_owned(), 400) }
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(1);
    /// # diesel_interlock::migrations::install(&pool)?;
    /// # assert!(complete(&pool, 7, "?")?.is_some());
    /// # assert!(TOKENS.key(7).peek(&pool)?.remaining >= 9_500);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn refund<'a>(&'a self, pool: &'a P, spent: &'a Spent, units: u32) -> Reply<'a, P, bool> {
        P::Mode::drive(async move {
            let refund = async {
                let (call, _) = self.call()?;
                // Not that of this handle, which may have another one.
                let quota = spent.state.quota.exact()?;
                let (units, before) = spent.begin_part(units);
                if units == 0 {
                    return Ok(false);
                }
                let refund = call.refund(units, spent.at, before);
                let ((refilled,), _): ((Option<i64>,), _) = self.ask(pool, None, &refund).await?;
                spent.end_part(refilled.unwrap_or_else(|| quota.refill(units)));
                waiting::wake_oldest(&self.units());
                Ok(refilled.is_some())
            };
            self.subject().observe_as("refund", changed, refund).await
        })
    }

    async fn wait(&self, pool: &P, deadline: Option<Instant>) -> Result<Check> {
        let mut turns = Turns::for_units(self.cost, deadline);
        let mut last = Err(Error::TimedOut);
        while turns.next::<P::Mode>().await {
            match P::Mode::within(deadline, self.try_check(pool, deadline)).await {
                None => break,
                Some(Ok((Check::Limited(limited), database, sent))) => {
                    let due = Instant::now().checked_add(limited.retry_after);
                    last = Ok(Check::Limited(limited));
                    // Before it joins the queue, so that its drop wakes nobody.
                    if deadline.is_some() && due > deadline {
                        break;
                    }
                    turns.note_refusal(self.units(), database, sent);
                    turns.not_before(limited.retry_after);
                }
                // The other transaction may end before the deadline.
                Some(Err(locked @ Error::KeyLocked(_))) => {
                    turns.note_lock(self.units());
                    last = last.or(Err(locked));
                }
                // The wait for a connection lasted until the deadline: return the last result,
                // which says more.
                Some(Err(Error::Pool(_)))
                    if !matches!(last, Err(Error::TimedOut)) && turns.is_over() =>
                {
                    break;
                }
                Some(outcome) => return outcome.map(|(check, ..)| check),
            }
        }
        last
    }

    async fn look(&self, pool: &P) -> Result<KeyState> {
        let (call, _) = self.call()?;
        let (full_in, _): (Vec<PgInterval>, _) = ask(pool, None, &sql::look(&[call])).await?;
        let full_in = full_in.first().copied().map_or(0, difference);
        Ok(KeyState::new(self.name, self.quota, call.quota, full_in))
    }

    #[cfg(feature = "testing")]
    pub(crate) async fn use_up(&self, pool: &P) -> Result<()> {
        let remaining = self.look(pool).await?.remaining;
        if remaining > 0 {
            let _ = self.cost(remaining).check_within(pool, None).await?;
        }
        Ok(())
    }

    async fn check_within(&self, pool: &P, deadline: Option<Instant>) -> Result<Check> {
        let (check, ..) = self.try_check(pool, deadline).await?;
        Ok(check)
    }

    /// Checks once. Also returns the database of a denial, and when the statement was sent.
    async fn try_check(
        &self,
        pool: &P,
        deadline: Option<Instant>,
    ) -> Result<(Check, Database, Instant)> {
        let (call, lead) = self.call()?;
        let check = call.check(self.commit(), lead, deadline.is_some());
        let (row, sent) = self.ask(pool, deadline, &check).await?;
        let database = Database(row.database.unwrap_or_default());
        Ok((self.read(&call, &row), database, sent))
    }

    /// Sends a statement that gives units back, and wakes the oldest waiter of this key in this
    /// process.
    async fn change(&self, pool: &P, statement: Statement<BigInt>) -> Result<bool> {
        let (count, _): (i64, _) = self.ask(pool, None, &statement).await?;
        waiting::wake_oldest(&self.units());
        Ok(count > 0)
    }

    async fn decide<S: Session>(&self, session: &mut S, commit: Commit) -> Result<Check> {
        let (call, lead) = self.call()?;
        let row = ask_on(session, &call.check(commit, lead, false)).await?;
        Ok(self.read(&call, &row))
    }

    /// Asks. After an error of unknown kind, which may be that of a lock wait that timed out, asks
    /// again without a wait for the row.
    async fn ask<T, U>(
        &self,
        pool: &P,
        deadline: Option<Instant>,
        question: &impl Question<T, U>,
    ) -> Result<(U, Instant)>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send + 'static,
    {
        let mut reply = ask(pool, deadline, question).await;
        for _ in 0..RETRIES {
            if !reply.as_ref().is_err_and(may_be_locked) {
                break;
            }
            reply = self.ask_unless_locked(pool, deadline, question).await;
        }
        reply
    }

    /// Asks in a transaction that has locked the row, unless another transaction has.
    async fn ask_unless_locked<T, U>(
        &self,
        pool: &P,
        deadline: Option<Instant>,
        question: &impl Question<T, U>,
    ) -> Result<(U, Instant)>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send + 'static,
    {
        let mut checkout = Checkout::new(pool, deadline).await?;
        let asked = async {
            let transaction = Own::begin_pooled(checkout.conn()).await?;
            let asked = async {
                self.lock(transaction.conn).await?;
                let sent = Instant::now();
                Ok((ask_on(transaction.conn, question).await?, sent))
            };
            let asked = asked.await;
            transaction.end(asked).await
        };
        let asked = asked.await;
        checkout.give_back();
        asked
    }

    /// Locks the row, unless another transaction has: then it fails, and does not wait. Nothing is
    /// locked if there is no row.
    async fn lock<S: Session>(&self, session: &mut S) -> Result<()> {
        let (call, _) = self.call()?;
        match ask_on(session, &call.lock()).await? {
            true => Err(Error::KeyLocked(self.name)),
            false => Ok(()),
        }
    }

    fn read(&self, call: &Call<'_>, row: &Row) -> Check {
        let state = KeyState::new(self.name, self.quota, call.quota, row.full_in(call));
        match row.spent_at {
            Some(at) => Check::Allowed(Spent::new(at, self.cost, state)),
            None => Check::Limited(Limited::new(state, call.quota, self.cost)),
        }
    }

    /// What waiters for this key wait for.
    fn units(&self) -> What {
        What::Units(self.name, self.key.as_ref().into())
    }

    /// Returns the checked call, and the lead of its cost.
    fn call(&self) -> Result<(Call<'_>, i64)> {
        input::name(self.name)?;
        input::text(&self.key)?;
        let quota = self.quota.exact()?;
        if self.cost == 0 {
            return Err(Error::input("a call must cost at least one unit"));
        }
        let lead = quota.lead(self.cost).ok_or(Error::input(
            "a call that costs more units than the burst of its quota is never allowed: split it, \
             or raise the burst",
        ))?;
        let (name, key, cost) = (self.name, &*self.key, self.cost);
        Ok((
            Call {
                name,
                key,
                quota,
                cost,
            },
            lead,
        ))
    }

    const fn commit(&self) -> Commit {
        if self.is_durable {
            Commit::Durable
        } else {
            Commit::Async
        }
    }

    const fn subject(&self) -> Subject {
        Subject {
            primitive: "rate limit",
            name: self.name,
        }
    }
}

impl_debug!(
    RateLimit | this | name = this.name,
    key = this.key,
    quota = this.quota,
    cost = this.cost,
    is_durable = this.is_durable
);

#[cfg(all(test, feature = "r2d2"))]
mod tests {
    use diesel::r2d2::{ConnectionManager, Pool};

    use super::*;
    use crate::PgPool;

    #[test]
    fn what_is_refused_is_not_kept() {
        let nowhere = ConnectionManager::new("postgresql://nobody@/nothing?host=/nowhere");
        let pool: PgPool = Pool::builder().min_idle(Some(0)).build_unchecked(nowhere);
        let limit = RateLimit::named("local", Quota::per_day(10));
        let local = limit.local(pool.clone(), 5);
        for i in 0..1000 {
            let key = format!("{i} {}", "x".repeat(10_000));
            assert!(matches!(local.check(&key), Err(Error::Input(_))));
        }
        assert_eq!(local.len(), 0);
        let bad = RateLimit::named("", Quota::per_day(10)).local(pool, 5);
        assert!(matches!(bad.check("key"), Err(Error::Input(_))));
        assert_eq!(bad.len(), 0);
    }
}
