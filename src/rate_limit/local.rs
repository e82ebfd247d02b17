//! Checks from memory, which take units from the row by the chunk.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::check::{Check, Limited};
use super::{Quota, RateLimit};
use crate::alarm::{Alarm, lock};
use crate::error::{Error, Result};
use crate::event::Outcome;
use crate::input::whole_seconds;
use crate::metrics::Counters;
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Pool, Reply, debug};

/// How many keys are kept before those that have nothing are looked for.
const KEYS: usize = 1024;
const SECOND: Duration = Duration::from_secs(1);

/// A [`RateLimit`] that decides from memory: each instance takes chunks of units from the row, and
/// asks it again when a chunk is used up.
///
/// ```
/// use std::sync::OnceLock;
///
/// use diesel_interlock::{Error, LocalRateLimit, PgPool, Quota, RateLimit};
///
/// static API: RateLimit = RateLimit::named("api", Quota::per_second(1000));
/// static LOCAL: OnceLock<LocalRateLimit> = OnceLock::new();
///
/// fn is_allowed(pool: &PgPool, customer: &str) -> Result<bool, Error> {
///     let local = LOCAL.get_or_init(|| API.local(pool.clone(), 100));
///     Ok(local.check(customer)?.is_allowed())
/// }
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # diesel_interlock::migrations::install(&pool)?;
/// # assert!(is_allowed(&pool, "7")?);
/// # Ok::<(), Error>(())
/// ```
///
/// Make one per instance. Clones share what was taken.
///
/// In a period all instances together allow at most burst + N, and a chunk more for each instance:
/// what it took before and had not used. What is not used is forgotten after the time in which a
/// chunk refills, and a second at least. A changed quota and a reset count from the next chunk on.
/// After a denial the row is not asked before `retry_after`. One caller at a time takes a chunk of
/// a key, and the others wait for it. A chunk that is on its way arrives also if the future that
/// takes it is dropped, unless the server is silent for seconds.
#[must_use = "a rate limit decides nothing until it is checked"]
#[derive(Clone)]
pub struct LocalRateLimit<P: Pool>(Arc<Local<P>>);

struct Local<P: Pool> {
    limit: RateLimit<P>,
    pool: P,
    chunk: u32,
    keys: Mutex<Keys>,
    counters: Counters,
}

/// What came of a check in memory.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalCheck {
    /// A unit was spent.
    Allowed,
    /// There is none, and nothing was spent.
    Limited {
        /// After how long there is one, if nobody else takes it; above zero.
        retry_after: Duration,
    },
}

impl LocalCheck {
    /// Returns whether it was allowed.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed)
    }

    /// Returns whether it was limited.
    pub const fn is_limited(&self) -> bool {
        !self.is_allowed()
    }

    /// Returns `retry_after` in whole seconds, rounded up, if it was limited.
    pub fn retry_after_secs(&self) -> Option<u64> {
        match self {
            Self::Allowed => None,
            Self::Limited { retry_after } => Some(whole_seconds(*retry_after)),
        }
    }
}

impl Outcome for LocalCheck {
    fn word(&self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Limited { .. } => "limited",
        }
    }
}

/// What the row said, which is an event. What is decided in memory is only counted.
struct Chunk(Check);

impl Outcome for Chunk {
    fn word(&self) -> &'static str {
        if self.0.is_allowed() {
            "chunk"
        } else {
            "no chunk"
        }
    }
}

#[derive(Default)]
struct Keys {
    by_name: HashMap<Box<str>, Key>,
    /// The number of keys at which they are looked through.
    bound: usize,
}

#[derive(Default)]
struct Key {
    units: u32,
    /// Until when the units count, or until when there are none.
    until: Option<Instant>,
    /// Those who wait for the one who asks the row. `None` if nobody does.
    taking: Option<Vec<Arc<Alarm>>>,
    /// How often the row has replied.
    replies: u64,
    /// How the last look at the row has failed, for those who waited for it: they would wait as
    /// long for the same.
    failure: Option<Arc<str>>,
}

impl Key {
    fn decide(&mut self, now: Instant) -> Option<LocalCheck> {
        let retry_after = self.until?.saturating_duration_since(now);
        if retry_after.is_zero() {
            return None;
        }
        let Some(units) = self.units.checked_sub(1) else {
            return Some(LocalCheck::Limited { retry_after });
        };
        self.units = units;
        if units == 0 {
            self.until = None;
        }
        Some(LocalCheck::Allowed)
    }
}

/// What a look at a key says.
enum Look<P: Pool> {
    Decided(LocalCheck),
    Take(Taking<P>),
    /// Until the row has replied more often than so many times.
    Wait(Arc<Alarm>, u64),
    /// The wait was in vain.
    Alone,
    /// The one who asked the row has found the database away.
    Away(Arc<str>),
}

impl<P: Pool> RateLimit<P> {
    /// Returns a limit that decides in memory, out of chunks of so many units that it takes from
    /// the row, between one and the burst: see [`LocalRateLimit`]. Its calls cost a unit each.
    pub fn local(&self, pool: P, chunk: u32) -> LocalRateLimit<P> {
        LocalRateLimit(Arc::new(Local {
            chunk: chunk.clamp(1, self.quota.burst.max(1)),
            limit: self.clone(),
            pool,
            keys: Mutex::default(),
            counters: Counters::default(),
        }))
    }
}

impl<P: Pool> LocalRateLimit<P> {
    /// Spends a unit of a key. No round trip while a chunk lasts, or the last denial counts; one
    /// for a chunk or a denial, and two for the rest of what the row has.
    pub fn check<'a>(&'a self, key: &'a str) -> Reply<'a, P, LocalCheck> {
        P::Mode::drive(async move {
            let check = self.0.check(key).await?;
            let subject = self.0.limit.subject();
            self.0
                .counters
                .count(subject, check.is_allowed(), check.word());
            Ok(check)
        })
    }
}

impl<P: Pool> Local<P> {
    async fn check(self: &Arc<Self>, key: &str) -> Result<LocalCheck> {
        let mut waited = None;
        loop {
            match self.look(key, waited) {
                Look::Decided(check) => return Ok(check),
                Look::Take(taking) => {
                    return P::Mode::surely(&P::Mode::runtime()?, Some(PATIENCE), taking.take())
                        .await;
                }
                Look::Wait(alarm, replies) => {
                    P::Mode::sleep(&alarm, None).await;
                    waited = Some(replies);
                }
                Look::Away(failure) => return Err(Error::Pool((*failure).into())),
                Look::Alone => {
                    let (check, _) = self.spend(key, 1).await?;
                    return Ok(match check {
                        Check::Allowed(_) => LocalCheck::Allowed,
                        Check::Limited(Limited { retry_after, .. }) => {
                            LocalCheck::Limited { retry_after }
                        }
                    });
                }
            }
        }
    }

    fn look(self: &Arc<Self>, key: &str, waited: Option<u64>) -> Look<P> {
        let now = Instant::now();
        let mut keys = self.keys();
        let found = match keys.by_name.get_mut(key) {
            Some(found) => found,
            None => {
                keys.make_room(now);
                keys.by_name.entry(key.into()).or_default()
            }
        };
        if let Some(check) = found.decide(now) {
            return Look::Decided(check);
        }
        if let (Some(failure), true) = (&found.failure, waited == Some(found.replies)) {
            return Look::Away(failure.clone());
        }
        match &mut found.taking {
            None => {
                found.taking = Some(Vec::new());
                found.failure = None;
                Look::Take(Taking {
                    local: self.clone(),
                    key: key.into(),
                })
            }
            Some(_) if waited == Some(found.replies) => Look::Alone,
            Some(waiting) => {
                let alarm = Arc::new(Alarm::new(now + 30 * SECOND));
                waiting.push(alarm.clone());
                Look::Wait(alarm, found.replies)
            }
        }
    }

    /// Spends units of the row, and tells it. Also returns when that began.
    async fn spend(&self, key: &str, units: u32) -> Result<(Check, Instant)> {
        let limit = self.limit.key(key).cost(units);
        let began = Instant::now();
        let chunk = async { Ok(Chunk(limit.check_within(&self.pool, None).await?)) };
        let Chunk(check) = limit.subject().observe("local", chunk).await?;
        Ok((check, began))
    }

    /// How long a chunk counts: as long as it takes to refill, and a second at least.
    fn lasting(&self) -> Duration {
        let Quota { n, period, .. } = self.limit.quota;
        period
            .mul_f64(f64::from(self.chunk) / f64::from(n.max(1)))
            .max(SECOND)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        lock(&self.keys)
    }
}

impl Keys {
    /// Forgets keys that have nothing, once in a while.
    fn make_room(&mut self, now: Instant) {
        if self.by_name.len() >= self.bound.max(KEYS) {
            let has_something =
                |key: &Key| key.taking.is_some() || key.until.is_some_and(|until| until > now);
            self.by_name.retain(|_, key| has_something(key));
            self.bound = 2 * self.by_name.len();
        }
    }
}

/// The right to ask the row for a key. Its drop wakes those who wait.
struct Taking<P: Pool> {
    local: Arc<Local<P>>,
    key: Box<str>,
}

impl<P: Pool> Taking<P> {
    /// Takes a chunk, or what is there, and spends a unit of it.
    async fn take(self) -> Result<LocalCheck> {
        let taken = self.take_chunk().await;
        if let (Err(error), Some(found)) = (&taken, self.local.keys().by_name.get_mut(&self.key)) {
            found.failure = match error {
                Error::Pool(cause) => Some(cause.to_string().into()),
                error if error.is_unavailable() => Some(error.to_string().into()),
                _ => None,
            };
        }
        taken
    }

    async fn take_chunk(&self) -> Result<LocalCheck> {
        let Self { local, key } = self;
        let mut units = local.chunk;
        let (mut check, mut began) = local.spend(key, units).await?;
        if let Check::Limited(Limited { state, .. }) = check {
            if state.remaining > 0 {
                units = state.remaining.min(units);
                (check, began) = local.spend(key, units).await?;
            }
        }
        let (units, until, outcome) = match check {
            Check::Allowed(_) => (units - 1, began + local.lasting(), LocalCheck::Allowed),
            Check::Limited(Limited { state, .. }) => {
                let exact = local.limit.quota.exact()?;
                let retry_after = Limited::new(state, exact, 1).retry_after;
                let until = Instant::now() + retry_after;
                (0, until, LocalCheck::Limited { retry_after })
            }
        };
        if let Some(found) = local.keys().by_name.get_mut(key) {
            found.units = units;
            found.until = (units > 0 || outcome.is_limited()).then_some(until);
            found.replies += 1;
        }
        Ok(outcome)
    }
}

impl<P: Pool> Drop for Taking<P> {
    fn drop(&mut self) {
        let taking = {
            let mut keys = self.local.keys();
            keys.by_name
                .get_mut(&self.key)
                .and_then(|key| key.taking.take())
        };
        for alarm in taking.into_iter().flatten() {
            alarm.set(Instant::now());
        }
    }
}

debug!(
    LocalRateLimit | this | limit = this.0.limit,
    chunk = this.0.chunk
);
