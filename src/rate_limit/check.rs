//! What came of a check.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::PgTimestamp;

use super::quota::{Exact, Quota};
use crate::alarm::lock;
use crate::event::Outcome;
use crate::input::{microseconds, time, whole_seconds};

/// What came of a check.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// The units were spent.
    Allowed(Spent),
    /// The units are not there, and nothing was spent.
    Limited(Limited),
}

/// What came of a check of several limits.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckAll {
    /// All were spent, in the order of the limits.
    Allowed(Vec<Spent>),
    /// A limit is used up, and nothing was spent.
    Limited {
        /// Which of the limits, from 0 on.
        index: usize,
        /// Why the call was not allowed.
        limited: Limited,
    },
}

/// Units that were spent. Clones share what was refunded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Spent {
    pub(super) at: PgTimestamp,
    /// How many units were spent.
    pub units: u32,
    refunded: Arc<Mutex<Refunded>>,
    /// The key afterwards.
    pub state: State,
}

/// What of the units was refunded, in parts.
#[derive(Debug, Default)]
struct Refunded {
    units: u32,
    /// How many microseconds of the refill since then were taken into account.
    refilled: i64,
    /// A part has no reply yet. Another one at the same time takes the whole refill into account.
    is_under_way: bool,
}

/// Why a call was not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limited {
    /// After how long the units are there, if nobody else takes them; above zero.
    pub retry_after: Duration,
    /// The key.
    pub state: State,
}

/// A key at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct State {
    /// The name of the limit.
    pub name: &'static str,
    /// The quota of the call.
    pub quota: Quota,
    /// How many units are there.
    pub remaining: u32,
    /// After how long all units are there, if nobody takes any.
    pub full_in: Duration,
}

impl Check {
    /// Returns what was spent, if it was allowed.
    pub fn allowed(self) -> Option<Spent> {
        match self {
            Self::Allowed(spent) => Some(spent),
            Self::Limited(_) => None,
        }
    }

    /// Returns why it was not allowed.
    pub fn limited(self) -> Option<Limited> {
        match self {
            Self::Allowed(_) => None,
            Self::Limited(limited) => Some(limited),
        }
    }

    /// Returns whether it was allowed.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }

    /// Returns whether it was limited.
    pub const fn is_limited(&self) -> bool {
        !self.is_allowed()
    }

    /// Returns the key after the check.
    pub const fn state(&self) -> &State {
        match self {
            Self::Allowed(spent) => &spent.state,
            Self::Limited(limited) => &limited.state,
        }
    }

    pub(super) fn new(
        state: State,
        exact: Exact,
        cost: u32,
        is_allowed: bool,
        at: PgTimestamp,
    ) -> Self {
        if is_allowed {
            Self::Allowed(Spent::new(at, cost, state))
        } else {
            Self::Limited(Limited::new(state, exact, cost))
        }
    }
}

impl CheckAll {
    /// Returns what was spent of each limit, if all were allowed.
    pub fn allowed(self) -> Option<Vec<Spent>> {
        match self {
            Self::Allowed(spent) => Some(spent),
            Self::Limited { .. } => None,
        }
    }

    /// Returns why they were not allowed. The other limits may be used up, too.
    pub fn limited(self) -> Option<Limited> {
        match self {
            Self::Allowed(_) => None,
            Self::Limited { limited, .. } => Some(limited),
        }
    }

    /// Returns whether they were limited.
    pub const fn is_limited(&self) -> bool {
        !self.is_allowed()
    }

    /// Returns whether all were allowed.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }
}

impl State {
    /// A key that is full in so many microseconds.
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
    pub(super) fn new(at: PgTimestamp, units: u32, state: State) -> Self {
        Self {
            at,
            units,
            refunded: Arc::default(),
            state,
        }
    }

    /// Takes so many units out of those that may still be refunded, or all that are left of them.
    /// Also returns how much of the refill was taken into account before.
    pub(super) fn begin_part(&self, units: u32) -> (u32, i64) {
        let mut refunded = lock(&self.refunded);
        let units = units.min(self.units - refunded.units);
        refunded.units += units;
        let was_under_way = std::mem::replace(&mut refunded.is_under_way, true);
        (units, if was_under_way { 0 } else { refunded.refilled })
    }

    /// The part has taken so much of the refill into account.
    pub(super) fn end_part(&self, refilled: i64) {
        let mut refunded = lock(&self.refunded);
        refunded.is_under_way = false;
        refunded.refilled += refilled;
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
    pub(super) fn new(state: State, exact: Exact, cost: u32) -> Self {
        let lead = exact.lead(cost).map_or(Duration::ZERO, microseconds);
        let retry_after = state.full_in.saturating_sub(lead);
        Self {
            retry_after: retry_after.max(Duration::from_micros(1)),
            state,
        }
    }

    /// Returns `retry_after` in whole seconds, rounded up, for the header field `Retry-After`.
    pub fn retry_after_secs(&self) -> u64 {
        whole_seconds(self.retry_after)
    }
}

impl Outcome for Check {
    fn word(&self) -> &'static str {
        if self.is_allowed() {
            "allowed"
        } else {
            "limited"
        }
    }
}

impl Outcome for CheckAll {
    fn word(&self) -> &'static str {
        if self.is_allowed() {
            "allowed"
        } else {
            "limited"
        }
    }
}
