//! Rate limits that are checked in memory, against chunks of units taken from the row.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::check::{Check, Limited};
use super::{Quota, RateLimit};
use crate::alarm::{Alarm, Sleepers, lock};
use crate::error::{Error, Result};
use crate::event::Outcome;
use crate::input::whole_seconds;
use crate::metrics::Counters;
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Pool, Reply, impl_debug};
use crate::sync::{Instant, Mutex, MutexGuard};

/// How many keys are kept before those without units are looked for and removed.
const KEYS: usize = 1024;
const SECOND: Duration = Duration::from_secs(1);

/// A [`RateLimit`] that decides in memory. Each instance takes chunks of units from the row, and
/// goes back to the row when a chunk is used up.
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
/// Make one per process. Clones share the chunks. A key stays in memory while its units or its last
/// denial count, and the others are removed each time the number of keys has doubled, from 1,024
/// keys on.
///
/// **Accuracy.** In no period do all instances together allow more than burst + N units plus one
/// chunk per instance. The extra chunk is what an instance took before the period and had not used.
/// Unused units are forgotten after the time in which a chunk refills, and after a second at the
/// earliest. A changed quota and a reset take effect with the next chunk.
///
/// **Round trips.** After a denial, the row is not read again before `retry_after`. For each key,
/// one caller at a time takes a chunk while the others wait for it. A chunk on its way still
/// arrives if the future that takes it is dropped, unless the server is silent for seconds.
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

/// The outcome of a check in memory.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalCheck {
    /// The call is allowed, and its unit was spent.
    Allowed,
    /// No unit is available. Nothing was spent.
    Limited {
        /// How long until a unit is available, if nobody else takes it. Never zero.
        retry_after: Duration,
    },
}

impl LocalCheck {
    /// Returns whether the call was allowed.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed)
    }

    /// Returns whether the call was limited.
    pub const fn is_limited(&self) -> bool {
        !self.is_allowed()
    }

    /// Returns `retry_after` in whole seconds, rounded up, and `None` if the call was allowed.
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

#[derive(Default)]
struct Keys {
    by_name: HashMap<Box<str>, Key>,
    /// The number of keys at which keys without units are removed next.
    bound: usize,
}

#[derive(Default)]
struct Key {
    units: u32,
    /// If there are units: until when they count. If there are none: until when the denial counts.
    until: Option<Instant>,
    /// The caller that is taking a chunk.
    taking: Option<Arc<Chunk>>,
}

/// A chunk that is on its way. The other callers of the key wait for it.
#[derive(Default)]
struct Chunk {
    /// Set when the row has replied, or failed with this error. The callers that wait get the same
    /// error, because a try of their own would take as long and fail in the same way.
    ended: OnceLock<Option<Error>>,
    sleepers: Sleepers,
}

impl Chunk {
    async fn wait<M: Mode>(&self) -> Result<()> {
        let sleeper = self.sleepers.join_with(Arc::new(Alarm::unset()));
        if self.ended.get().is_none() {
            M::sleep(&sleeper.alarm, None).await;
        }
        let failure = self.ended.get().and_then(Option::as_ref);
        failure
            .and_then(Error::copy_unavailable)
            .map_or(Ok(()), Err)
    }
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

/// What to do about a key.
enum Look<P: Pool> {
    Decided(LocalCheck),
    Take(Taking<P>),
    Wait(Arc<Chunk>),
}

impl<P: Pool> RateLimit<P> {
    /// Returns a limit that decides in memory and takes `chunk` units from the row at a time: see
    /// [`LocalRateLimit`]. A chunk is at least one unit and at most the burst. Each call costs one
    /// unit.
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
    /// Spends a unit of a key if one is available.
    ///
    /// No round trip while a chunk lasts or the last denial counts. A new chunk or a denial takes
    /// one round trip; if the row has less than a chunk left, taking the rest takes two.
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
        loop {
            match self.look(key)? {
                Look::Decided(check) => return Ok(check),
                Look::Take(taking) => {
                    return P::Mode::run_detached(
                        &P::Mode::runtime()?,
                        Some(PATIENCE),
                        taking.take(),
                    )
                    .await;
                }
                Look::Wait(chunk) => chunk.wait::<P::Mode>().await?,
            }
        }
    }

    fn look(self: &Arc<Self>, key: &str) -> Result<Look<P>> {
        let now = Instant::now();
        let mut keys = self.keys();
        let found = match keys.by_name.get_mut(key) {
            Some(found) => found,
            None => {
                // What the row would refuse is not kept.
                self.limit.key(key).call()?;
                keys.make_room(now);
                keys.by_name.entry(key.into()).or_default()
            }
        };
        if let Some(check) = found.decide(now) {
            return Ok(Look::Decided(check));
        }
        Ok(match &found.taking {
            Some(chunk) => Look::Wait(chunk.clone()),
            None => {
                let chunk = found.taking.insert(Arc::default()).clone();
                Look::Take(Taking {
                    local: self.clone(),
                    key: key.into(),
                    chunk,
                })
            }
        })
    }

    /// Spends units of the row, and reports an event: checks that memory decides are only counted.
    /// Also returns when the operation began.
    async fn spend(&self, key: &str, units: u32) -> Result<(Check, Instant)> {
        let limit = self.limit.key(key).cost(units);
        let began = Instant::now();
        let check = limit.check_within(&self.pool, None);
        let word = |check: &Check| {
            if check.is_allowed() {
                "chunk"
            } else {
                "no chunk"
            }
        };
        let check = limit.subject().observe_as("local", word, check).await?;
        Ok((check, began))
    }

    /// How long a chunk counts: the time in which it refills, and at least a second.
    fn lasting(&self) -> Duration {
        let Quota { units, period, .. } = self.limit.quota;
        period
            .mul_f64(f64::from(self.chunk) / f64::from(units.max(1)))
            .max(SECOND)
    }

    fn keys(&self) -> MutexGuard<'_, Keys> {
        lock(&self.keys)
    }
}

impl Keys {
    /// Removes keys without units, each time the number of keys has doubled.
    fn make_room(&mut self, now: Instant) {
        if self.by_name.len() >= self.bound.max(KEYS) {
            let has_something =
                |key: &Key| key.taking.is_some() || key.until.is_some_and(|until| until > now);
            self.by_name.retain(|_, key| has_something(key));
            self.bound = 2 * self.by_name.len();
        }
    }
}

/// The right to take a chunk of a key. Dropping it wakes the callers that wait.
struct Taking<P: Pool> {
    local: Arc<Local<P>>,
    key: Box<str>,
    chunk: Arc<Chunk>,
}

impl<P: Pool> Taking<P> {
    /// Takes a chunk, or as much as the row has left, and spends a unit of it.
    async fn take(self) -> Result<LocalCheck> {
        let taken = self.take_chunk().await;
        let failure = taken.as_ref().err().and_then(Error::copy_unavailable);
        self.chunk.ended.get_or_init(|| failure);
        taken
    }

    async fn take_chunk(&self) -> Result<LocalCheck> {
        let Self { local, key, .. } = self;
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
        }
        Ok(outcome)
    }
}

impl<P: Pool> Drop for Taking<P> {
    fn drop(&mut self) {
        if let Some(key) = self.local.keys().by_name.get_mut(&self.key) {
            key.taking = None;
        }
        self.chunk.ended.get_or_init(|| None);
        self.chunk.sleepers.wake();
    }
}

impl_debug!(
    LocalRateLimit | this | limit = this.0.limit,
    chunk = this.0.chunk
);

#[cfg(all(test, feature = "r2d2"))]
impl<P: Pool> LocalRateLimit<P> {
    /// How many keys are in memory.
    pub(super) fn len(&self) -> usize {
        self.0.keys().by_name.len()
    }
}

#[cfg(all(test, feature = "r2d2"))]
mod tests {
    use super::*;

    #[test]
    fn keys_with_units_or_with_a_chunk_on_its_way_stay_when_others_make_room() {
        let now = Instant::now();
        let mut keys = Keys::default();
        let mut add = |name: &str, until, taking| {
            let key = Key {
                until,
                taking,
                ..Key::default()
            };
            keys.by_name.insert(name.into(), key);
        };
        add("has units", Some(now + SECOND), None);
        add("takes a chunk", None, Some(Arc::default()));
        for over in 0..KEYS {
            add(&over.to_string(), Some(now), None);
        }
        keys.make_room(now);
        let mut left: Vec<_> = keys.by_name.into_keys().collect();
        left.sort();
        assert_eq!(
            left,
            ["has units".into(), "takes a chunk".into()] as [Box<str>; 2]
        );
    }
}
