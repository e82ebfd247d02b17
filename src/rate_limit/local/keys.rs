//! What a process knows of the keys of a limit: units that it has taken, and calls that were limited. No connection.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::{Moment, monotonic};
use crate::rate_limit::kept::Kept;
use crate::rate_limit::reply::Reply;
use crate::rate_limit::{Check, Limited, LimitedReason, Quota, RateLimit, Spent};

/// How many keys are remembered.
const MOST_KEYS: usize = 10_000;

/// How long a limited call is remembered at most, so that resets, units that are given back and raised overrides take effect.
const MEMORY: Duration = Duration::from_secs(1);

/// The keys that were used last.
#[derive(Debug, Default)]
pub(super) struct Keys {
    by_name: HashMap<Arc<str>, Entry>,
    /// In the order in which they were first used.
    oldest_first: VecDeque<Arc<str>>,
}

/// What is known without a round trip.
#[derive(Debug)]
pub(super) enum Known {
    Outcome(Check),
    /// So many units are to be taken.
    Missing(u32),
}

/// Units that were taken and not used.
#[derive(Debug)]
pub(super) struct Unused {
    pub(super) spent: Spent,
    pub(super) units: u32,
}

impl Keys {
    pub(super) fn decide(&mut self, key: &str, cost: u32) -> Known {
        match self.by_name.get_mut(key) {
            Some(entry) => entry.decide(cost),
            None => Known::Missing(cost),
        }
    }

    pub(super) fn entry(&mut self, key: &str, limit: &RateLimit) -> &mut Entry {
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

    /// Returns what was taken, was not used and may still be.
    pub(super) fn into_unused(self, now: Moment) -> Vec<Unused> {
        let chunks = self.by_name.into_values().flat_map(|entry| entry.chunks);
        chunks
            .filter(|chunk| chunk.left > 0 && chunk.is_usable(now))
            .map(|Chunk { spent, left, .. }| Unused { spent, units: left })
            .collect()
    }
}

/// A key.
#[derive(Debug)]
pub(super) struct Entry {
    limit: Arc<RateLimit>,
    /// What was taken, the oldest first.
    chunks: VecDeque<Chunk>,
    limited: Option<Remembered>,
}

impl Entry {
    fn decide(&mut self, cost: u32) -> Known {
        // Reading the clocks is half of the work.
        let now = (!self.chunks.is_empty()).then(Moment::now);
        if let Some(now) = now {
            self.forget_void(now);
        }
        let left = self.left();
        if left >= u64::from(cost) {
            return Known::Outcome(Check::Allowed(self.spend(cost)));
        }
        let missing = cost - left as u32;
        let Some(limited) = self.still_limited(missing) else {
            return Known::Missing(missing);
        };
        let limited = match now {
            Some(now) if self.is_void_after(now, limited.retry_after) => {
                // Without what is here, a cost above the burst is never allowed.
                self.still_limited(cost).unwrap_or(Limited {
                    retry_after: None,
                    ..limited
                })
            }
            _ => limited,
        };
        Known::Outcome(Check::Limited(limited))
    }

    /// Returns whether some of what is left here is void after that time, so that a call would need more units by then.
    fn is_void_after(&self, now: Moment, time: Option<Duration>) -> bool {
        let is_void =
            |chunk: &Chunk, time| now.since(chunk.sent).saturating_add(time) >= chunk.lasts;
        time.is_some_and(|time| self.chunks.iter().any(|chunk| is_void(chunk, time)))
    }

    fn forget_void(&mut self, now: Moment) {
        self.chunks
            .retain(|chunk| chunk.left > 0 && chunk.is_usable(now));
    }

    fn left(&self) -> u64 {
        self.chunks.iter().map(|chunk| u64::from(chunk.left)).sum()
    }

    /// Adds what the server replied, and decides the call. `None` if the call needs more, because another one has used what was
    /// here before.
    ///
    /// The units that the call itself has taken count for it even if they are void already, as they do for a call without local
    /// units. Otherwise a quota that is refilled faster than a round trip would allow nothing.
    pub(super) fn learn(
        &mut self,
        reply: &Reply,
        asked: &RateLimit,
        missing: u32,
        cost: u32,
        sent: Moment,
    ) -> Option<Check> {
        let now = Moment::now();
        self.forget_void(now);
        let Some(spent) = reply.spent(asked) else {
            let mut limited = reply.limited(asked, missing);
            self.limited = Some(Remembered {
                since: now.monotonic(),
                reason: limited.reason,
                retry_after: limited.retry_after,
                debt: limited.full_in,
                quota: limited.quota,
            });
            if missing < cost && self.is_void_after(now, limited.retry_after) {
                limited = reply.limited(asked, cost);
            }
            limited.remaining = self.with_left(limited.remaining, limited.quota);
            return Some(Check::Limited(limited));
        };
        // Fewer than were asked for: the key is used up, as if a call for one more had been limited.
        self.limited = (spent.units < asked.cost).then_some(Remembered {
            since: now.monotonic(),
            reason: LimitedReason::Spent,
            retry_after: None,
            debt: spent.full_in,
            quota: spent.quota,
        });
        let lasts = u64::try_from(spent.quota.floor_of(spent.units)).unwrap_or(u64::MAX);
        self.chunks.push_back(Chunk {
            left: spent.units,
            spent,
            sent,
            lasts: Duration::from_micros(lasts),
        });
        (self.left() >= u64::from(cost)).then(|| Check::Allowed(self.spend(cost)))
    }

    /// Spends units that are there.
    fn spend(&mut self, cost: u32) -> Spent {
        let mut missing = cost;
        let first = &self.chunks[0];
        let (at, quota, full_in) = (first.spent.at, first.spent.quota, first.spent.full_in);
        let limit = Arc::clone(&first.spent.limit);
        for chunk in &mut self.chunks {
            let part = missing.min(chunk.left);
            chunk.left -= part;
            missing -= part;
        }
        let last = &self.chunks[self.chunks.len() - 1];
        Spent {
            at,
            units: cost,
            remaining: self.with_left(last.spent.remaining, quota),
            full_in,
            quota,
            limit,
            kept: Kept::all(cost),
            wait_us: 0,
        }
    }

    /// What is left in the database and here.
    fn with_left(&self, remaining: u32, quota: Quota) -> u32 {
        let remaining = u64::from(remaining) + self.left();
        u32::try_from(remaining)
            .unwrap_or(u32::MAX)
            .min(quota.burst)
    }

    /// Returns the hint of a call for so many units that the last reply limits.
    fn still_limited(&self, units: u32) -> Option<Limited> {
        let remembered = self.limited.as_ref()?;
        let (reason, retry_after, debt) = remembered.still(units)?;
        let quota = remembered.quota;
        let remaining = if reason == LimitedReason::Spent && units == 1 {
            0 // less than one unit, which saves a division
        } else {
            let owed = u32::try_from(quota.units_owed(debt.as_micros())).unwrap_or(u32::MAX);
            quota.burst.saturating_sub(owed)
        };
        Some(Limited {
            reason,
            retry_after,
            remaining: self.with_left(remaining, quota),
            full_in: debt,
            quota,
            limit: Arc::clone(&self.limit),
        })
    }
}

/// Units that were taken in one call.
#[derive(Debug)]
struct Chunk {
    spent: Spent,
    left: u32,
    sent: Moment,
    /// How long they may be used.
    lasts: Duration,
}

impl Chunk {
    fn is_usable(&self, now: Moment) -> bool {
        now.since(self.sent) < self.lasts
    }
}

/// A reply that limits calls. Only the monotonic clock is read, which is faster. After a suspension, calls are limited, and
/// told too long a wait, for at most a second.
#[derive(Debug)]
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
        let passed = monotonic().saturating_duration_since(self.since);
        if passed >= MEMORY {
            return None;
        }
        let debt = self.debt.saturating_sub(passed);
        let Some(room) = self.quota.room_for(units) else {
            // Above the burst that was in force. The database tells an override from the program's own quota.
            return (self.reason == LimitedReason::AboveBurst).then_some((self.reason, None, debt));
        };
        let (reason, wait) = match self.reason {
            LimitedReason::Contended => (
                LimitedReason::Contended,
                self.retry_after?.saturating_sub(passed),
            ),
            LimitedReason::Spent | LimitedReason::AboveBurst => {
                let room = Duration::from_micros(u64::try_from(room).unwrap_or(u64::MAX));
                (LimitedReason::Spent, debt.saturating_sub(room))
            }
        };
        (!wait.is_zero()).then_some((reason, Some(wait), debt))
    }
}

#[cfg(test)]
mod tests {
    use diesel::data_types::PgTimestamp;

    use super::*;
    use crate::clock::{pass, suspend};
    use crate::text::SentName;

    const API: RateLimit = RateLimit::named("api", Quota::per_second(10).burst(100));

    /// The reply to a call of which so many units were spent, after which so many are owed.
    fn reply(units: i64, reason: Option<&str>, owed: i64) -> Reply {
        let row = (
            units,
            reason.map(str::to_owned),
            PgTimestamp(0),
            PgTimestamp(owed * 100_000),
            None,
            None,
            None,
        );
        Reply::of(row, API.quota, SentName::NONE)
    }

    /// Keys of which one has these units of a chunk, while others have spent the rest up to what is owed.
    fn keys(units: u32, owed: i64) -> Keys {
        let mut keys = Keys::default();
        let reply = reply(units.into(), None, owed);
        let learnt = keys
            .entry("7", &API)
            .learn(&reply, &API.cost(units), 1, 1, Moment::now());
        assert!(matches!(learnt, Some(Check::Allowed(_))));
        keys
    }

    fn decide(keys: &mut Keys, cost: u32) -> Known {
        keys.decide("7", cost)
    }

    #[track_caller]
    fn allowed(known: Known) -> Spent {
        match known {
            Known::Outcome(Check::Allowed(spent)) => spent,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn limited(known: Known) -> Limited {
        match known {
            Known::Outcome(Check::Limited(limited)) => limited,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn missing(known: Known) -> u32 {
        match known {
            Known::Missing(missing) => missing,
            other @ Known::Outcome(_) => panic!("{other:?}"),
        }
    }

    #[test]
    fn units_are_spent_until_the_call_needs_more_or_they_are_void() {
        let mut keys = keys(50, 50);
        assert_eq!(allowed(decide(&mut keys, 9)).remaining, 90);
        assert_eq!(missing(decide(&mut keys, 41)), 1);
        assert_eq!(missing(keys.decide("8", 3)), 3);
        suspend(Duration::from_millis(4900));
        assert_eq!(allowed(decide(&mut keys, 1)).units, 1);
        suspend(Duration::from_millis(100));
        assert_eq!(missing(decide(&mut keys, 1)), 1);
    }

    #[test]
    fn a_reply_with_fewer_units_than_a_chunk_limits_the_calls_after_them() {
        let mut keys = Keys::default();
        let reply = reply(3, None, 100);
        let entry = keys.entry("7", &API);
        let learnt = entry.learn(&reply, &API.cost(10), 1, 1, Moment::now());
        assert!(learnt.unwrap().is_allowed());
        assert_eq!(allowed(decide(&mut keys, 2)).remaining, 0);
        let denied = limited(decide(&mut keys, 1));
        assert_eq!((denied.reason, denied.remaining), (LimitedReason::Spent, 0));
        // A unit comes back in a tenth of a second.
        pass(Duration::from_millis(100));
        assert_eq!(missing(decide(&mut keys, 1)), 1);
        assert_eq!(limited(decide(&mut keys, 20)).reason, LimitedReason::Spent);
        pass(MEMORY);
        assert_eq!(missing(decide(&mut keys, 20)), 20);
    }

    #[test]
    fn what_is_left_here_counts_as_left_for_a_call_that_is_limited() {
        let mut keys = keys(10, 100);
        let reply = reply(0, Some("spent"), 100);
        let entry = keys.entry("7", &API);
        let learnt = entry.learn(&reply, &API.cost(20), 11, 20, Moment::now());
        assert_eq!(learnt.unwrap().limited().unwrap().remaining, 9);
        let denied = limited(decide(&mut keys, 20));
        assert_eq!(denied.remaining, 9);
        assert_eq!(allowed(decide(&mut keys, 9)).remaining, 0);
    }

    #[test]
    fn what_is_left_in_the_database_counts_for_a_call_that_needs_more() {
        let mut keys = Keys::default();
        // Two of the hundred are left there.
        let reply = reply(0, Some("spent"), 98);
        let entry = keys.entry("7", &API);
        let learnt = entry.learn(&reply, &API.cost(5), 5, 5, Moment::now());
        assert_eq!(learnt.unwrap().limited().unwrap().remaining, 2);
        assert_eq!(limited(decide(&mut keys, 5)).remaining, 2);
    }

    #[test]
    fn a_call_whose_units_were_used_by_another_one_needs_them_all_again() {
        let mut keys = keys(10, 10);
        assert_eq!(missing(decide(&mut keys, 12)), 3);
        // Meanwhile another call uses the nine that were left.
        let _ = allowed(decide(&mut keys, 9));
        let first = reply(10, None, 20);
        let entry = keys.entry("7", &API);
        let learnt = entry.learn(&first, &API.cost(10), 3, 12, Moment::now());
        assert!(learnt.is_none());
        let second = reply(12, None, 32);
        let learnt = entry.learn(&second, &API.cost(12), 12, 12, Moment::now());
        assert_eq!(learnt.unwrap().allowed().unwrap().units, 12);
        assert_eq!(entry.left(), 10);
    }

    #[test]
    fn units_that_are_void_when_they_arrive_count_for_their_own_call_alone() {
        let mut keys = Keys::default();
        let sent = Moment::now();
        suspend(Duration::from_secs(60));
        let entry = keys.entry("7", &API);
        let learnt = entry.learn(&reply(10, None, 10), &API.cost(10), 4, 4, sent);
        assert!(learnt.unwrap().is_allowed());
        assert_eq!(missing(decide(&mut keys, 1)), 1);
        assert_eq!(keys.into_unused(Moment::now()).len(), 0);
    }

    #[test]
    fn a_check_without_a_round_trip_allocates_nothing_for_its_outcome() {
        let mut keys = keys(50, 50);
        let spent = allowed(decide(&mut keys, 1));
        let chunk = &keys.by_name["7"].chunks[0];
        assert!(Arc::ptr_eq(&spent.limit, &chunk.spent.limit));
        assert!(!spent.kept.is_shared());
    }

    #[test]
    fn the_oldest_key_is_forgotten() {
        let mut keys = keys(50, 50);
        for key in 0..MOST_KEYS {
            keys.entry(&format!("key {key}"), &API);
        }
        assert_eq!(keys.by_name.len(), MOST_KEYS);
        assert_eq!(keys.oldest_first.len(), MOST_KEYS);
        assert_eq!(missing(decide(&mut keys, 1)), 1);
    }
}
