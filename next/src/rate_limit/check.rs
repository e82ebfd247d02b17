//! What came of a check.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::PgTimestamp;

use super::quota::{Exact, Quota};
use super::sql::Row;
use crate::event::Outcome;
use crate::time::{difference, microseconds, time, whole_seconds};

/// What came of a check.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone, Copy)]
pub enum Check {
    /// The units were spent.
    Allowed(Spent),
    /// The units are not there, and nothing was spent.
    Limited(Limited),
}

/// What came of a check of several limits.
#[must_use = "the call may be limited"]
#[derive(Debug, Clone)]
pub enum CheckAll {
    /// All were spent, in the order of the limits.
    Allowed(Vec<Spent>),
    /// The limit with this index is used up, and nothing was spent.
    Limited(usize, Limited),
}

/// Units that were spent.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Spent {
    pub(super) at: PgTimestamp,
    /// The key afterwards.
    pub state: State,
}

/// Why a call was not allowed.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Limited {
    /// After how long the units are there, if nobody else takes them; above zero.
    pub retry_after: Duration,
    /// The key.
    pub state: State,
}

/// A key at a moment.
#[derive(Debug, Clone, Copy)]
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
    pub const fn allowed(self) -> Option<Spent> {
        match self {
            Self::Allowed(spent) => Some(spent),
            Self::Limited(_) => None,
        }
    }

    /// Returns why it was not allowed.
    pub const fn limited(self) -> Option<Limited> {
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

    pub(super) fn new(name: &'static str, quota: Quota, exact: Exact, cost: u32, row: Row) -> Self {
        let (is_allowed, at, full_in) = row;
        let owed = difference(full_in).max(0);
        let state = State {
            name,
            quota,
            remaining: exact.remaining(owed),
            full_in: microseconds(owed),
        };
        if is_allowed {
            return Self::Allowed(Spent { at, state });
        }
        let lead = exact.lead(cost).unwrap_or_default();
        Self::Limited(Limited {
            retry_after: microseconds((owed - lead).max(1)),
            state,
        })
    }
}

impl CheckAll {
    /// Returns whether all were allowed.
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed(_))
    }
}

impl Spent {
    /// Returns when the units were spent, by the database's clock.
    pub fn at(&self) -> DateTime<Utc> {
        time(self.at).unwrap_or_default()
    }
}

impl Limited {
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
