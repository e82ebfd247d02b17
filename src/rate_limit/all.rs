//! Checking several limits at once.

use diesel::data_types::{PgInterval, PgTimestamp};

use super::check::{Check, KeyState, Limited, Spent};
use super::sql::{self, Commit};
use super::{RETRIES, RateLimit, may_be_locked};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::input::difference;
use crate::mode::Mode;
use crate::pool::{Checkout, Pool, Reply};
use crate::session::Session;
use crate::transaction::Own;

impl<P: Pool> RateLimit<P> {
    /// Checks several limits, and spends either the units of all of them or none.
    ///
    /// ```
    /// use diesel_interlock::{Check, Error, PgPool, Quota, RateLimit};
    ///
    /// static ALL: RateLimit = RateLimit::named("api", Quota::per_second(500));
    /// static CUSTOMER: RateLimit = RateLimit::named("customer", Quota::per_minute(100).burst(20));
    ///
    /// fn status(pool: &PgPool, customer: i64) -> Result<u16, Error> {
    ///     Ok(match RateLimit::check_all(&[&ALL, &CUSTOMER.key(customer)], pool)? {
    ///         Check::Allowed(_) => 200,
    ///         Check::Limited(limited) if limited.index == 0 => 503,
    ///         Check::Limited(_) => 429,
    ///     })
    /// }
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(1);
    /// # diesel_interlock::migrations::install(&pool)?;
    /// # assert_eq!(status(&pool, 7)?, 200);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// A denial takes one round trip and only reads. A grant takes one more for each key, and two
    /// for its transaction. The keys are checked in the order of their names and keys, so
    /// concurrent callers do not deadlock.
    ///
    /// A limit that is listed twice costs twice. Two quotas for one key are an [`Error::Input`],
    /// and so are more than 1,000 limits. If any of the limits is [durable](Self::durable), all
    /// are.
    pub fn check_all<'a>(limits: &'a [&'a Self], pool: &'a P) -> Reply<'a, P, Check<Vec<Spent>>> {
        let subject = Subject {
            primitive: "rate limit",
            name: limits.first().map_or("", |limit| limit.name),
        };
        P::Mode::drive(subject.observe("check_all", async move {
            let keys = merge(limits)?;
            if let Some(limited) = look(&keys, pool).await? {
                return Ok(Check::Limited(limited));
            }
            let mut reply = spend(&keys, pool, Locked::Waits).await;
            if matches!(reply, Err(Unspent::Failed(Error::Standby))) {
                // The server has refused, so nothing was spent, and its connection is discarded.
                reply = spend(&keys, pool, Locked::Waits).await;
            }
            for _ in 0..RETRIES {
                match &reply {
                    Err(Unspent::Failed(error)) if may_be_locked(error) => {}
                    _ => break,
                }
                reply = spend(&keys, pool, Locked::Fails).await;
            }
            match reply {
                Ok(spent) => Ok(Check::Allowed(in_order(limits, &keys, &spent))),
                Err(Unspent::Limited(limited)) => Ok(Check::Limited(limited)),
                Err(Unspent::Failed(error)) => Err(error),
            }
        }))
    }
}

/// The bound exists because each key takes a round trip while the transaction holds its rows.
const MOST: usize = 1000;

/// A key, with the cost of all limits that are for it, and their positions in the caller's list.
struct Key<P: Pool> {
    limit: RateLimit<P>,
    places: Vec<usize>,
}

impl<P: Pool> Key<P> {
    /// The refusal of this key, with its place in the caller's list.
    fn refusal(&self, limited: Limited) -> Limited {
        Limited {
            index: self.places.first().copied().unwrap_or_default(),
            ..limited
        }
    }
}

/// Merges limits of the same key, and sorts the keys.
fn merge<P: Pool>(limits: &[&RateLimit<P>]) -> Result<Vec<Key<P>>> {
    if limits.len() > MOST {
        return Err(Error::input(
            "at most 1,000 limits can be checked at once: check them in several calls",
        ));
    }
    let mut order: Vec<usize> = (0..limits.len()).collect();
    order.sort_by_key(|i| (limits[*i].name, &limits[*i].key));
    let mut keys: Vec<Key<P>> = Vec::new();
    for i in order {
        let limit = limits[i];
        limit.call()?;
        match keys.last_mut() {
            Some(key) if (key.limit.name, &key.limit.key) == (limit.name, &limit.key) => {
                if key.limit.quota != limit.quota {
                    return Err(Error::input(
                        "several limits with the same name and key must have the same quota",
                    ));
                }
                key.limit.cost = key.limit.cost.saturating_add(limit.cost);
                key.limit.is_durable |= limit.is_durable;
                key.places.push(i);
            }
            _ => keys.push(Key {
                limit: limit.clone(),
                places: vec![i],
            }),
        }
    }
    Ok(keys)
}

/// Returns the refusal of the first key that is limited now. Locks nothing.
async fn look<P: Pool>(keys: &[Key<P>], pool: &P) -> Result<Option<Limited>> {
    if keys.is_empty() {
        return Ok(None);
    }
    let calls: Result<Vec<_>> = keys.iter().map(|key| key.limit.call()).collect();
    let calls = calls?;
    let asked: Vec<_> = calls.iter().map(|(call, _)| *call).collect();
    let (full_in, _): (Vec<PgInterval>, _) = ask(pool, None, &sql::look(&asked)).await?;
    let mut looked = keys.iter().zip(calls).zip(full_in);
    Ok(looked.find_map(|((key, (call, lead)), full_in)| {
        let full_in = difference(full_in);
        let state = KeyState::new(key.limit.name, key.limit.quota, call.quota, full_in);
        (full_in > lead).then(|| key.refusal(Limited::new(state, call.quota, call.cost)))
    }))
}

/// Why nothing was spent.
enum Unspent {
    Limited(Limited),
    Failed(Error),
}

impl From<Error> for Unspent {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// What spending does about a row that another transaction has locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Locked {
    Waits,
    Fails,
}

type Spending = Result<Vec<(PgTimestamp, KeyState)>, Unspent>;

/// Spends all costs in one transaction.
async fn spend<P: Pool>(keys: &[Key<P>], pool: &P, locked: Locked) -> Spending {
    let mut checkout = Checkout::new(pool, None).await?;
    let spent = async {
        let transaction = Own::begin_pooled(checkout.conn()).await?;
        let spent = spend_on(keys, transaction.conn, locked).await;
        transaction.end(spent).await
    };
    let spent = spent.await;
    checkout.give_back();
    spent
}

async fn spend_on<P: Pool, S: Session>(
    keys: &[Key<P>],
    session: &mut S,
    locked: Locked,
) -> Spending {
    let commit = if keys.iter().any(|key| key.limit.is_durable) {
        Commit::Durable
    } else {
        Commit::Async
    };
    let mut all = Vec::new();
    for key in keys {
        if locked == Locked::Fails {
            key.limit.lock(session).await?;
        }
        match key.limit.decide(session, commit).await? {
            Check::Allowed(spent) => all.push((spent.at, spent.state)),
            Check::Limited(limited) => return Err(Unspent::Limited(key.refusal(limited))),
        }
    }
    Ok(all)
}

/// Returns what was spent of each limit, in the order of the caller's list.
fn in_order<P: Pool>(
    limits: &[&RateLimit<P>],
    keys: &[Key<P>],
    spent: &[(PgTimestamp, KeyState)],
) -> Vec<Spent> {
    let mut all: Vec<_> = keys
        .iter()
        .zip(spent)
        .flat_map(|(key, (at, state))| {
            let of = |i: &usize| (*i, Spent::new(*at, limits[*i].cost, *state));
            key.places.iter().map(of).collect::<Vec<_>>()
        })
        .collect();
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, spent)| spent).collect()
}
