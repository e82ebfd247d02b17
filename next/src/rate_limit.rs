//! Rate limits: so many units per period and key, on all instances together.

mod check;
mod headers;
mod local;
mod quota;
mod sql;

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

pub use self::check::{Check, CheckAll, Limited, Spent, State};
pub use self::local::{LocalCheck, LocalRateLimit};
pub use self::quota::Quota;
use self::sql::{Call, Commit, Row};
use crate::call::{ask, ask_lent};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input;
use crate::mode::Mode;
use crate::pool::{Borrowed, Connection, Pool, Reply};
use crate::session::{Session, is_unknown};
use crate::transaction::Own;
use crate::waiting::{Topic, Turns, What};

/// A limit of N units per period for each key, and [`burst`](Quota::burst) of them at once: never more than burst + N in a period, on
/// all instances together, by the database's clock.
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
/// A key has a row from its first call on, until it is [pruned](Self::prune). A denial only reads. A changed quota applies from the
/// key's next call on, and what the key owes is kept.
///
/// A grant commits asynchronously: a crash of the server may forget those of the last second, unless the limit is
/// [`durable`](Self::durable). A check on a lent connection commits as its transaction does.
///
/// A check waits for another transaction that has checked the same key and has not ended, and over a pool it fails after 250 ms.
///
/// # Errors
///
/// [`Error::Input`], also for a cost above the burst, [`Error::Pool`], [`Error::KeyLocked`], [`Error::NotInstalled`],
/// [`Error::LentInTransaction`] and [`Error::Database`].
#[must_use = "a rate limit decides nothing until it is checked"]
pub struct RateLimit<P: Pool> {
    name: &'static str,
    key: Cow<'static, str>,
    quota: Quota,
    cost: u32,
    is_durable: bool,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> RateLimit<P> {
    /// Makes a limit by its name.
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

    /// Returns the limit of one caller, tenant or address. Each key has the quota for itself.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        Self {
            key: Cow::Owned(input::shown(key)),
            ..*self
        }
    }

    /// Returns the limit with another quota, for a key that has one of its own.
    pub fn quota(&self, quota: Quota) -> Self {
        Self {
            quota,
            ..self.clone()
        }
    }

    /// Returns the limit for calls that take so many units at once.
    pub fn cost(&self, units: u32) -> Self {
        Self {
            cost: units,
            ..self.clone()
        }
    }

    /// Returns the limit whose grants survive a crash of the server. Each then waits for a flush of the server's log.
    pub const fn durable(mut self) -> Self {
        self.is_durable = true;
        self
    }

    /// Spends the units if they are there. One round trip, and two for a key's first call or another quota.
    pub fn check<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Result<Check>> {
        P::Mode::drive(self.subject().tell("check", self.check_within(pool, None)))
    }

    /// As [`check`](Self::check), in the transaction of a connection, which gives the units back if it is rolled back. All other
    /// checks of the key wait until it has ended.
    pub fn check_on<'a>(&'a self, conn: &'a mut Connection<P>) -> Reply<'a, P, Result<Check>> {
        P::Mode::drive(
            self.subject()
                .tell("check_on", self.decide(conn, Commit::Callers)),
        )
    }

    /// Waits until the units are there, and spends them: checks, pauses for `retry_after`, and checks again. Returns that it is
    /// limited at once if the pause would end after `timeout`.
    ///
    /// It reserves nothing, so whoever gives up takes nothing with him. No order is promised. Fails with [`Error::TimedOut`] if not
    /// even the first check had a reply in time.
    pub fn acquire_timeout<'a>(
        &'a self,
        pool: &'a P,
        timeout: Duration,
    ) -> Reply<'a, P, Result<Check>> {
        let deadline = Instant::now().checked_add(timeout);
        P::Mode::drive(
            self.subject()
                .tell("acquire_timeout", self.wait(pool, deadline)),
        )
    }

    /// Checks several limits: either all are spent, or none.
    ///
    /// In one transaction: a round trip for each limit, and two more. The limits are checked in the order of their names and keys,
    /// so that callers do not deadlock.
    pub fn check_all<'a>(limits: &'a [&'a Self], pool: &'a P) -> Reply<'a, P, Result<CheckAll>> {
        let name = limits.first().map_or("", |limit| limit.name);
        let subject = Subject {
            primitive: "rate limit",
            name,
        };
        P::Mode::drive(subject.tell("check_all", async move {
            for limit in limits {
                limit.call()?;
            }
            let mut borrowed = Borrowed::new(pool, None).await?;
            let transaction = Own::begin(borrowed.conn()).await?;
            let spent = spend_all(limits, transaction.conn).await;
            match transaction.end(spent).await {
                Ok(spent) => Ok(CheckAll::Allowed(spent)),
                Err(Unspent::Limited(i, limited)) => Ok(CheckAll::Limited(i, limited)),
                Err(Unspent::Failed(i, error)) => {
                    drop(borrowed);
                    Err(match limits.get(i) {
                        Some(limit) => limit.explained(pool, error).await,
                        None => error,
                    })
                }
            }
        }))
    }

    /// Returns a limit that decides in memory, out of chunks of so many units that it takes from the row: see [`LocalRateLimit`].
    pub fn local(&self, pool: P, chunk: u32) -> LocalRateLimit<P> {
        LocalRateLimit::new(self.clone(), pool, chunk)
    }

    /// Reads what is there, and spends nothing. One round trip.
    pub fn peek<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Result<State>> {
        P::Mode::drive(async move {
            let (call, _) = self.call()?;
            let (row, _) = ask(pool, None, [call.peek()]).await?;
            Ok(*self.read(&call, row).state())
        })
    }

    /// Makes the key full. Returns whether it was not. One round trip.
    pub fn reset<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Result<bool>> {
        P::Mode::drive(async move {
            let (call, _) = self.call()?;
            let (count, _): (i64, _) = ask(pool, None, [call.reset()]).await?;
            Ok(count > 0)
        })
    }

    /// Gives back units that a check of this key has spent, less what was refilled since. Returns whether there was anything to give
    /// back: not if the key was reset, or its quota was changed. One round trip.
    pub fn give_back<'a>(
        &'a self,
        pool: &'a P,
        spent: &'a Spent,
        units: u32,
    ) -> Reply<'a, P, Result<bool>> {
        P::Mode::drive(async move {
            let (call, _) = self.call()?;
            let give_back = call.give_back(units.min(self.cost), spent.at);
            let (count, _): (i64, _) = ask(pool, None, [give_back]).await?;
            Ok(count > 0)
        })
    }

    /// Deletes keys, of all limits, that are full, at most 10,000 at a time, and skips those in use. Returns how many. One round trip.
    pub fn prune(pool: &P) -> Reply<'_, P, Result<i64>> {
        P::Mode::drive(async move { Ok(ask(pool, None, [sql::prune()]).await?.0) })
    }

    async fn wait(&self, pool: &P, deadline: Option<Instant>) -> Result<Check> {
        let topic = Topic::of::<P>(What::Units(self.name, self.key.as_ref().into()));
        let mut turns = Turns::new(topic, deadline);
        let mut last = None;
        while turns.next::<P::Mode>().await {
            let check = P::Mode::within(deadline, self.check_within(pool, deadline)).await;
            let Some(check) = check.transpose()? else {
                break;
            };
            let Check::Limited(limited) = check else {
                return Ok(check);
            };
            last = Some(check);
            let due = Instant::now().checked_add(limited.retry_after);
            if deadline.is_some() && due > deadline {
                break;
            }
            turns.not_before(limited.retry_after);
        }
        last.ok_or(Error::TimedOut)
    }

    #[cfg(feature = "testing")]
    pub(crate) async fn use_up(&self, pool: &P) -> Result<()> {
        let (call, _) = self.call()?;
        let (row, _) = ask(pool, None, [call.peek()]).await?;
        let remaining = self.read(&call, row).state().remaining;
        if remaining > 0 {
            let _ = self.cost(remaining).check_within(pool, None).await?;
        }
        Ok(())
    }

    async fn check_within(&self, pool: &P, deadline: Option<Instant>) -> Result<Check> {
        let limit = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let (call, lead) = self.call()?;
        match ask(pool, limit, call.check(self.commit(), lead)).await {
            Ok((row, _)) => Ok(self.read(&call, row)),
            Err(error) => Err(self.explained(pool, error).await),
        }
    }

    async fn decide<S: Session>(&self, session: &mut S, commit: Commit) -> Result<Check> {
        let (call, lead) = self.call()?;
        let row = ask_lent(session, &call.check(commit, lead)).await?;
        Ok(self.read(&call, row))
    }

    /// Diesel has no kind for a wait that has timed out, so whether the row is locked is looked up.
    async fn explained(&self, pool: &P, error: Error) -> Error {
        let (Error::Database(cause), Ok((call, _))) = (&error, self.call()) else {
            return error;
        };
        if !is_unknown(cause) {
            return error;
        }
        match ask(pool, None, [call.is_locked()]).await {
            Ok((true, _)) => Error::KeyLocked(self.name),
            _ => error,
        }
    }

    fn read(&self, call: &Call<'_>, row: Row) -> Check {
        Check::new(self.name, self.quota, call.quota, self.cost, row)
    }

    /// The call, and the lead of its cost.
    fn call(&self) -> Result<(Call<'_>, i64)> {
        input::name(self.name)?;
        input::text(&self.key)?;
        let quota = self.quota.checked()?;
        if self.cost == 0 {
            return Err(Error::Input("a call costs at least one unit"));
        }
        let lead = quota.lead(self.cost).ok_or(Error::Input(
            "a call that costs more units than the burst of its quota is never allowed: split it, or raise the burst",
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

/// Why several limits were not spent: which of them, and what it said.
enum Unspent {
    Limited(usize, Limited),
    Failed(usize, Error),
}

impl From<Error> for Unspent {
    fn from(error: Error) -> Self {
        Self::Failed(usize::MAX, error)
    }
}

async fn spend_all<P: Pool, S: Session>(
    limits: &[&RateLimit<P>],
    session: &mut S,
) -> Result<Vec<Spent>, Unspent> {
    let commit = if limits.iter().any(|limit| limit.is_durable) {
        Commit::Durable
    } else {
        Commit::Async
    };
    let mut order: Vec<usize> = (0..limits.len()).collect();
    order.sort_by_key(|i| (limits[*i].name, &limits[*i].key));
    let mut all = vec![None; limits.len()];
    for i in order {
        match limits[i].decide(session, commit).await {
            Ok(Check::Allowed(spent)) => all[i] = Some(spent),
            Ok(Check::Limited(limited)) => return Err(Unspent::Limited(i, limited)),
            Err(error) => return Err(Unspent::Failed(i, error)),
        }
    }
    Ok(all.into_iter().flatten().collect())
}

impl<P: Pool> Clone for RateLimit<P> {
    fn clone(&self) -> Self {
        Self {
            key: self.key.clone(),
            ..*self
        }
    }
}

impl<P: Pool> fmt::Debug for RateLimit<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit")
            .field("name", &self.name)
            .field("key", &self.key)
            .field("quota", &self.quota)
            .field("cost", &self.cost)
            .field("is_durable", &self.is_durable)
            .finish()
    }
}
