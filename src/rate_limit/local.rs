//! Rate limits that a process checks for itself most of the time: it takes several units of a key in one round trip, and
//! remembers for a moment that a key is limited.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::operations;
use super::rules::Reply;
use super::{Check, Limited, LimitedReason, Quota, RateLimit, Spent};
use crate::clock::Moment;
use crate::error::Result;
use crate::events;
use crate::panics::{caught, lock};
use crate::pool::{self, PgPool};
use crate::session::{Blocking, now};
use crate::text::Name;

/// How many keys are remembered.
const MOST_KEYS: usize = 10_000;

/// How long a limited call is remembered at most, so that resets, units that are given back and raised overrides take effect.
const MEMORY: Duration = Duration::from_secs(1);

/// A rate limit of which this process takes several units of a key at a time, and hands them out without a round trip.
///
/// [`RateLimit::local`] makes it. Keep one value per process and limit, because what it has taken is of no use to others.
///
/// Over all processes, however many they are, at most `burst + chunk + W × N / period` units are allowed for a key in any span
/// W, where the cost of a call counts as the chunk if it is larger. For that, what was taken may be used for
/// `units × period / N` from before the call was sent, and is void after that. A process that takes units and does not use them
/// keeps others waiting, so use chunks that are well below the burst divided by the number of instances.
///
/// A limited call is remembered until the key may pass, for each cost, but for a second at most. At most 10,000 keys are known,
/// and the oldest is forgotten for a new one. Errors are not remembered.
///
/// Dropping the value gives back what was not used, if the pool has an idle connection. It never waits for one.
pub struct LocalRateLimit {
    limit: RateLimit,
    pool: PgPool,
    chunk: u32,
    keys: Mutex<Keys>,
}

impl RateLimit {
    /// Makes a limit that takes up to `chunk` units of a key at a time, fewer if fewer are left, and hands them out without a
    /// round trip.
    ///
    /// The key and the cost of this value do not count, because each [`check`](LocalRateLimit::check) has its own. Nothing is
    /// sent.
    ///
    /// # Errors
    ///
    /// [`Error::Input`](crate::Error::Input) for a name or a quota that is refused, and for a chunk of zero.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::{Error, LocalRateLimit, PgPool, Quota, RateLimit};
    ///
    /// static API: RateLimit = RateLimit::named("api", Quota::per_minute(6000).burst(1000));
    ///
    /// fn serve(local: &LocalRateLimit, customer: &str) -> Result<u16, Error> {
    ///     Ok(if local.check(customer, 1)?.is_allowed() { 200 } else { 429 })
    /// }
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.pool(1);
    /// let local = API.local(&pool, 50)?; // at start-up
    /// # for _ in 0..60 { assert_eq!(serve(&local, "7")?, 200); }
    /// # Ok::<(), Error>(())
    /// ```
    pub fn local(&self, pool: &PgPool, chunk: u32) -> Result<LocalRateLimit> {
        if chunk == 0 {
            return Err(self.bad_units(0, u32::MAX).into());
        }
        let limit = RateLimit {
            key: None,
            cost: 1,
            ..self.clone()
        };
        limit.checked(Duration::ZERO, Name::anywhere)?;
        Ok(LocalRateLimit {
            limit,
            pool: pool.clone(),
            chunk,
            keys: Mutex::default(),
        })
    }
}

impl LocalRateLimit {
    /// Spends the units of a call for the key, from those that this process has taken. If they are too few, takes more, in one
    /// round trip.
    ///
    /// The empty key is the limit without a key. The outcome tells what is left as far as this process knows.
    ///
    /// # Blocking
    ///
    /// Only if units must be taken, as [`RateLimit::check`].
    ///
    /// # Errors
    ///
    /// See [errors of checks](RateLimit#errors-of-checks).
    pub fn check(&self, key: &str, cost: u32) -> Result<Check> {
        if cost == 0 {
            return Err(self.limit.bad_units(0, u32::MAX).into());
        }
        let missing = match lock(&self.keys).decide(key, cost) {
            Known::Outcome(check) => return Ok(check),
            Known::Missing(missing) => missing,
        };
        let limit = if key.is_empty() {
            self.limit.clone()
        } else {
            self.limit.key(key)
        };
        let check = async { self.take(&limit, key, cost, missing) };
        now(events::observe(
            "check",
            limit.subject(),
            check,
            Check::outcome,
        ))
    }

    /// Takes units, and then spends those of the call.
    fn take(&self, limit: &RateLimit, key: &str, cost: u32, missing: u32) -> Result<Check> {
        limit.checked(Duration::ZERO, Name::anywhere)?; // before the pool is asked
        let mut conn = pool::check_out(&self.pool, None)?;
        let asked = limit.cost(self.chunk.max(missing));
        // Before the call is sent, so that the units are void here before they are refilled in the database.
        let sent = Moment::now();
        let session = &mut Blocking::pooled(&mut conn);
        let reply = now(operations::spend(
            session,
            &asked,
            Duration::ZERO,
            Some(missing),
        ))?;
        drop(conn);
        let mut keys = lock(&self.keys);
        let entry = keys.entry(key, limit);
        Ok(entry.learn(&reply, &asked, missing, cost, sent))
    }
}

impl fmt::Debug for LocalRateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalRateLimit")
            .field("limit", &self.limit)
            .field("chunk", &self.chunk)
            .finish_non_exhaustive()
    }
}

impl Drop for LocalRateLimit {
    fn drop(&mut self) {
        let keys = std::mem::take(&mut *lock(&self.keys));
        let left: Vec<_> = keys
            .by_name
            .into_values()
            .flat_map(|it| it.chunks)
            .collect();
        let mut left = left
            .iter()
            .filter(|it| it.left > 0 && it.is_usable())
            .peekable();
        if left.peek().is_none() {
            return;
        }
        // What cannot be given back comes back with time.
        let _ = caught(|| {
            let Some(mut conn) = self.pool.try_get() else {
                return;
            };
            for chunk in left {
                let session = &mut Blocking::pooled(&mut conn);
                if now(operations::give_back(session, &chunk.spent, chunk.left)).is_err() {
                    return;
                }
            }
        });
    }
}

/// What is known of the keys that were used last.
#[derive(Default)]
struct Keys {
    by_name: HashMap<Arc<str>, Entry>,
    /// In the order in which they were first used.
    oldest_first: VecDeque<Arc<str>>,
}

/// What is known without a round trip.
enum Known {
    Outcome(Check),
    /// So many units are to be taken.
    Missing(u32),
}

impl Keys {
    fn decide(&mut self, key: &str, cost: u32) -> Known {
        match self.by_name.get_mut(key) {
            Some(entry) => entry.decide(cost),
            None => Known::Missing(cost),
        }
    }

    fn entry(&mut self, key: &str, limit: &RateLimit) -> &mut Entry {
        if !self.by_name.contains_key(key) {
            if self.oldest_first.len() >= MOST_KEYS {
                if let Some(oldest) = self.oldest_first.pop_front() {
                    self.by_name.remove(&oldest);
                }
            }
            let name: Arc<str> = key.into();
            self.oldest_first.push_back(Arc::clone(&name));
            let entry = Entry {
                limit: Arc::new(limit.clone()),
                chunks: VecDeque::new(),
                limited: None,
            };
            self.by_name.insert(name, entry);
        }
        match self.by_name.get_mut(key) {
            Some(entry) => entry,
            None => unreachable!("it was inserted above"),
        }
    }
}

/// A key.
struct Entry {
    limit: Arc<RateLimit>,
    /// What was taken, the oldest first.
    chunks: VecDeque<Chunk>,
    limited: Option<Remembered>,
}

impl Entry {
    fn decide(&mut self, cost: u32) -> Known {
        if !self.chunks.is_empty() {
            self.chunks
                .retain(|chunk| chunk.left > 0 && chunk.is_usable());
            let left = self.left();
            if left >= u64::from(cost) {
                return Known::Outcome(Check::Allowed(self.spend(cost)));
            }
        }
        let missing = cost - self.left() as u32;
        match self.limited.as_ref().and_then(|it| it.still(missing)) {
            Some((reason, retry_after, debt)) => {
                Known::Outcome(Check::Limited(self.limited_by(reason, retry_after, debt)))
            }
            None => Known::Missing(missing),
        }
    }

    fn left(&self) -> u64 {
        self.chunks.iter().map(|chunk| u64::from(chunk.left)).sum()
    }

    /// Adds what the server replied, and decides the call.
    fn learn(
        &mut self,
        reply: &Reply,
        asked: &RateLimit,
        missing: u32,
        cost: u32,
        sent: Moment,
    ) -> Check {
        let Some((spent, _)) = reply.spent(asked) else {
            let limited = reply.limited(asked, missing);
            self.limited = Some(Remembered {
                since: Instant::now(),
                reason: limited.reason,
                retry_after: limited.retry_after,
                debt: limited.full_in,
                quota: limited.quota,
            });
            return Check::Limited(limited);
        };
        self.limited = None;
        let lasts = Duration::from_micros(
            u64::try_from(spent.quota.floor_of(spent.units)).unwrap_or(u64::MAX),
        );
        self.chunks.push_back(Chunk {
            left: spent.units,
            spent,
            sent,
            lasts,
        });
        // Another thread may have used what was there before the call.
        match self.decide(cost) {
            Known::Outcome(check) => check,
            Known::Missing(_) => Check::Limited(self.limited_by(
                LimitedReason::Contended,
                Some(Duration::from_millis(1)),
                Duration::ZERO,
            )),
        }
    }

    /// Spends units that are there.
    fn spend(&mut self, cost: u32) -> Spent {
        let mut missing = cost;
        let first = &self.chunks[0];
        let (at, quota, full_in) = (first.spent.at, first.spent.quota, first.spent.full_in);
        for chunk in &mut self.chunks {
            let part = missing.min(chunk.left);
            chunk.left -= part;
            missing -= part;
        }
        let last = &self.chunks[self.chunks.len() - 1];
        let remaining = self.left() + u64::from(last.spent.remaining);
        Spent {
            at,
            units: cost,
            remaining: u32::try_from(remaining)
                .unwrap_or(u32::MAX)
                .min(quota.burst),
            full_in,
            quota,
            limit: Arc::clone(&self.limit),
            kept: Arc::new(AtomicU32::new(cost)),
            wait_us: 0,
        }
    }

    fn limited_by(
        &self,
        reason: LimitedReason,
        retry_after: Option<Duration>,
        debt: Duration,
    ) -> Limited {
        let quota = self
            .limited
            .as_ref()
            .map_or(self.limit.quota, |it| it.quota);
        let owed = u32::try_from(quota.units_owed(debt.as_micros())).unwrap_or(u32::MAX);
        Limited {
            reason,
            retry_after,
            remaining: quota.burst.saturating_sub(owed),
            full_in: debt,
            quota,
            limit: Arc::clone(&self.limit),
        }
    }
}

/// Units that were taken in one call.
struct Chunk {
    spent: Spent,
    left: u32,
    sent: Moment,
    /// How long they may be used.
    lasts: Duration,
}

impl Chunk {
    fn is_usable(&self) -> bool {
        self.sent.elapsed() < self.lasts
    }
}

/// A limited call.
struct Remembered {
    since: Instant,
    reason: LimitedReason,
    retry_after: Option<Duration>,
    debt: Duration,
    quota: Quota,
}

impl Remembered {
    /// Returns why a call for so many units is still limited, for how long, and what is owed now. `None` if the database is to
    /// be asked.
    fn still(&self, units: u32) -> Option<(LimitedReason, Option<Duration>, Duration)> {
        let passed = self.since.elapsed();
        if passed >= MEMORY {
            return None;
        }
        let debt = self.debt.saturating_sub(passed);
        let Some(room) = self.quota.room_for(units) else {
            // Above the burst that was in force. The database tells an override from the program's own quota.
            return (self.reason == LimitedReason::AboveBurst).then_some((self.reason, None, debt));
        };
        let wait = match self.reason {
            LimitedReason::Contended => self.retry_after?.saturating_sub(passed),
            _ => debt.saturating_sub(Duration::from_micros(
                u64::try_from(room).unwrap_or(u64::MAX),
            )),
        };
        let reason = match self.reason {
            LimitedReason::Contended => LimitedReason::Contended,
            _ => LimitedReason::Spent,
        };
        (!wait.is_zero()).then_some((reason, Some(wait), debt))
    }
}
