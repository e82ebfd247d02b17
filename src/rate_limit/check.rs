//! The outcome of a check.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::PgTimestamp;

use super::quota::{Exact, Quota};
use crate::alarm::lock;
use crate::event::Outcome;
use crate::input::{microseconds, time, whole_seconds};

/// The outcome of a check. A check of several limits has what was spent of each, in the order of
/// the caller's list.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check<T = Spent> {
    /// The call is allowed, and its units were spent.
    Allowed(T),
    /// The units are not available yet. Nothing was spent.
    Limited(Limited),
}

/// Units that a check has spent. Pass this to [`refund`](super::RateLimit::refund) to give some
/// back. Clones share the count of what was refunded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Spent {
    pub(super) at: PgTimestamp,
    /// How many units were spent.
    pub units: u32,
    refunded: Arc<Mutex<Refunded>>,
    /// The state of the key after the check.
    pub state: KeyState,
}

/// How many of the units were refunded. A caller may refund in several parts.
#[derive(Debug, Default)]
struct Refunded {
    units: u32,
    /// How many microseconds of refill since the check were already deducted from refunds.
    refilled: i64,
    /// The refund of a part has no reply yet. Another part at the same time deducts the whole
    /// refill, because it cannot know how much this one deducts.
    is_under_way: bool,
}

/// A refusal, with a hint when to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limited {
    /// How long until the units are available, if nobody else takes them. Never zero.
    pub retry_after: Duration,
    /// Which limit of the caller's list has refused. Other limits may be used up, too. 0 in a check
    /// of one limit.
    pub index: usize,
    /// The state of the key.
    pub state: KeyState,
}

/// The state of a key at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyState {
    /// The name of the limit.
    pub name: &'static str,
    /// The quota of the call.
    pub quota: Quota,
    /// How many units are available.
    pub remaining: u32,
    /// How long until the key is full, if nobody takes any units.
    pub full_in: Duration,
}

impl<T> Check<T> {
    /// Returns what was spent, and `None` if the call was limited.
    pub fn allowed(self) -> Option<T> {
        match self {
            Self::Allowed(spent) => Some(spent),
            Self::Limited(_) => None,
        }
    }

    /// Returns the refusal, and `None` if the call was allowed.
    pub fn limited(self) -> Option<Limited> {
        match self {
            Self::Allowed(_) => None,
            Self::Limited(limited) => Some(limited),
        }
    }

    /// Returns whether the call was allowed.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }

    /// Returns whether the call was limited.
    pub const fn is_limited(&self) -> bool {
        !self.is_allowed()
    }
}

impl Check {
    /// Returns the state of the key after the check.
    pub const fn state(&self) -> &KeyState {
        match self {
            Self::Allowed(spent) => &spent.state,
            Self::Limited(limited) => &limited.state,
        }
    }
}

impl KeyState {
    /// Makes the state of a key that is full in this many microseconds.
    pub(super) fn new(name: &'static str, quota: Quota, exact: Exact, full_in: i64) -> Self {
        Self {
            name,
            quota,
            remaining: exact.remaining(full_in),
            full_in: microseconds(full_in.max(0)),
        }
    }
}

impl Spent {
    pub(super) fn new(at: PgTimestamp, units: u32, state: KeyState) -> Self {
        Self {
            at,
            units,
            refunded: Arc::default(),
            state,
        }
    }

    /// Starts a refund of this many units, or of as many as may still be refunded. Returns that
    /// number, and how much of the refill was deducted before.
    pub(super) fn begin_part(&self, units: u32) -> (u32, i64) {
        let mut refunded = lock(&self.refunded);
        let units = units.min(self.units - refunded.units);
        refunded.units += units;
        let was_under_way = refunded.is_under_way;
        // A part of no units is not sent, and never ends.
        refunded.is_under_way |= units > 0;
        (units, if was_under_way { 0 } else { refunded.refilled })
    }

    /// Notes how much of the refill the part has deducted.
    pub(super) fn end_part(&self, refilled: i64) {
        let mut refunded = lock(&self.refunded);
        refunded.is_under_way = false;
        refunded.refilled = refunded.refilled.saturating_add(refilled);
    }

    /// Returns when the units were spent, by the database's clock.
    pub fn at(&self) -> DateTime<Utc> {
        time(self.at).unwrap_or_default()
    }
}

impl PartialEq for Spent {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.units, self.state) == (other.at, other.units, other.state)
    }
}

impl Eq for Spent {}

impl Limited {
    pub(super) fn new(state: KeyState, exact: Exact, cost: u32) -> Self {
        let lead = exact.lead(cost).map_or(Duration::ZERO, microseconds);
        let retry_after = state.full_in.saturating_sub(lead);
        Self {
            retry_after: retry_after.max(Duration::from_micros(1)),
            index: 0,
            state,
        }
    }

    /// Returns `retry_after` in whole seconds, rounded up, for the header field `Retry-After`.
    pub fn retry_after_secs(&self) -> u64 {
        whole_seconds(self.retry_after)
    }
}

impl<T> Outcome for Check<T> {
    fn word(&self) -> &'static str {
        if self.is_allowed() {
            "allowed"
        } else {
            "limited"
        }
    }
}
