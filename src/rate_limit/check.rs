//! The outcomes of a check.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::headers::Told;
use super::kept::Kept;
use super::{Quota, RateLimit};
use crate::events::Outcome;
use crate::headers::Headers;
use crate::time;

/// The outcome of a check: whether the call is allowed.
#[derive(Debug, Clone)]
#[must_use = "a check that nobody looks at limits nothing"]
pub enum Check {
    /// The call is allowed, and its units are spent.
    Allowed(Spent),
    /// The call is not allowed. Nothing was spent.
    Limited(Limited),
}

impl Check {
    /// Returns what was spent, and drops the hint of a limited call.
    #[must_use = "a check that nobody looks at limits nothing"]
    pub fn allowed(self) -> Option<Spent> {
        match self {
            Check::Allowed(spent) => Some(spent),
            Check::Limited(_) => None,
        }
    }

    /// Returns the hint of a limited call. `None` if the call is allowed.
    #[must_use = "a check that nobody looks at limits nothing"]
    pub fn limited(self) -> Option<Limited> {
        match self {
            Check::Allowed(_) => None,
            Check::Limited(limited) => Some(limited),
        }
    }

    /// Returns whether the call is allowed.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Check::Allowed(_))
    }

    /// Returns whether the call is limited.
    #[must_use]
    pub const fn is_limited(&self) -> bool {
        matches!(self, Check::Limited(_))
    }

    /// Returns the header fields of the response.
    pub fn headers(&self) -> Headers {
        match self {
            Check::Allowed(spent) => spent.headers(),
            Check::Limited(limited) => limited.headers(),
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Check::Allowed(_) => Outcome::Allowed,
            Check::Limited(limited) => limited.outcome(),
        }
    }
}

/// Units of a key that were spent, by the database's clock.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Spent {
    /// When they were spent, by the database's clock. If the call waited for another transaction that was then rolled back, this is
    /// from before the wait.
    pub at: DateTime<Utc>,
    /// How many units were spent.
    pub units: u32,
    /// How many units are left.
    pub remaining: u32,
    /// How long until the key is full again if nothing more is spent.
    pub full_in: Duration,
    /// The quota in force: that of an override if there is one, else that of the program.
    pub quota: Quota,
    pub(super) limit: Arc<RateLimit>,
    /// How many units were not given back yet.
    pub(super) kept: Kept,
    /// How long after `at` the units may be used.
    pub(super) wait_us: i64,
}

impl Spent {
    /// Returns the header fields of the response.
    pub fn headers(&self) -> Headers {
        Told {
            name: &self.limit.name,
            partition_key: self.limit.partition_key.as_deref(),
            quota: self.quota,
            remaining: self.remaining,
            full_in: self.full_in,
            limited: None,
        }
        .headers()
    }
}

/// A limited call: why, and when to try again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limited {
    /// Why the call was limited.
    pub reason: LimitedReason,
    /// How long until the call may be repeated, by the database's clock. Never zero. `None` if it never may under the quota
    /// in force, because its cost is above the burst. If the reason is [`Contended`](LimitedReason::Contended), it is 250
    /// milliseconds, as a hint. It is an estimate while a reservation under another quota is pending. For a reservation, it is the
    /// time until a plain check would be allowed.
    pub retry_after: Option<Duration>,
    /// How many units are left. Fewer than the cost of the call, unless the reason is
    /// [`Contended`](LimitedReason::Contended).
    pub remaining: u32,
    /// How long until the key is full again.
    pub full_in: Duration,
    /// The quota in force: that of an override if there is one, else that of the program.
    pub quota: Quota,
    pub(super) limit: Arc<RateLimit>,
}

impl Limited {
    /// The time until the call may be repeated in whole seconds, rounded up and at least 1, for the HTTP header
    /// `Retry-After`.
    pub fn retry_after_secs(&self) -> Option<u64> {
        self.retry_after.map(time::whole_seconds)
    }

    /// Returns the header fields of the response.
    pub fn headers(&self) -> Headers {
        Told {
            name: &self.limit.name,
            partition_key: self.limit.partition_key.as_deref(),
            quota: self.quota,
            remaining: self.remaining,
            full_in: self.full_in,
            limited: Some(self.retry_after),
        }
        .headers()
    }

    pub(super) fn outcome(&self) -> Outcome {
        Outcome::Limited {
            retry_after: self.retry_after,
        }
    }
}

/// Why a call was limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LimitedReason {
    /// Too few units are left.
    Spent,
    /// Another transaction has locked the key for 250 milliseconds (25 for each key after the first of several), and it is not
    /// known yet whether that transaction spends units.
    Contended,
    /// The cost is above the burst of the override that is in force. Without an override, a cost above the burst of the program's
    /// quota is an error, [`Input::CostAboveBurst`](crate::error::Input::CostAboveBurst).
    AboveBurst,
}

/// The outcome of a check of several limits: all limits allow the call, or nothing is spent.
#[derive(Debug, Clone)]
#[must_use = "a check that nobody looks at limits nothing"]
pub enum CheckAll {
    /// All limits allow the call, and its units are spent. The values are in the order of the given limits.
    Allowed(Vec<Spent>),
    /// A limit does not allow the call. Nothing was spent.
    Limited {
        /// Which of the given limits refuses the call, from 0 on: the one with the longest wait, or the first one that refuses
        /// while the units are being spent.
        by: usize,
        /// Its hint.
        limited: Limited,
    },
}

impl CheckAll {
    /// Returns what was spent, and drops the hint of a limited call.
    #[must_use = "a check that nobody looks at limits nothing"]
    pub fn allowed(self) -> Option<Vec<Spent>> {
        match self {
            CheckAll::Allowed(spent) => Some(spent),
            CheckAll::Limited { .. } => None,
        }
    }

    /// Returns the hint of a limited call. `None` if the call is allowed.
    #[must_use = "a check that nobody looks at limits nothing"]
    pub fn limited(self) -> Option<Limited> {
        match self {
            CheckAll::Allowed(_) => None,
            CheckAll::Limited { limited, .. } => Some(limited),
        }
    }

    /// Returns whether the call is allowed.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, CheckAll::Allowed(_))
    }

    /// Returns whether the call is limited.
    #[must_use]
    pub const fn is_limited(&self) -> bool {
        matches!(self, CheckAll::Limited { .. })
    }

    /// Returns the header fields of the response: of all limits, or of the one that limits the call. `None` if no limit was
    /// given.
    pub fn headers(&self) -> Option<Headers> {
        match self {
            CheckAll::Allowed(spent) => Headers::joined(spent.iter().map(Spent::headers)),
            CheckAll::Limited { limited, .. } => Some(limited.headers()),
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        match self {
            CheckAll::Allowed(_) => Outcome::Allowed,
            CheckAll::Limited { limited, .. } => limited.outcome(),
        }
    }
}

/// The outcome of a reservation.
#[derive(Debug, Clone)]
#[must_use = "the units of an unused reservation stay spent"]
pub enum Reserve {
    /// The units are spent, and may be used after the wait.
    Reserved(Reservation),
    /// The wait would be too long. Nothing was spent.
    Limited(Limited),
}

impl Reserve {
    /// Returns the reservation, and drops the hint of a limited call.
    #[must_use = "the units of an unused reservation stay spent"]
    pub fn reserved(self) -> Option<Reservation> {
        match self {
            Reserve::Reserved(reservation) => Some(reservation),
            Reserve::Limited(_) => None,
        }
    }

    /// Returns the hint of a limited call. `None` if the units are reserved.
    #[must_use = "the units of an unused reservation stay spent"]
    pub fn limited(self) -> Option<Limited> {
        match self {
            Reserve::Reserved(_) => None,
            Reserve::Limited(limited) => Some(limited),
        }
    }

    /// Returns whether the units are reserved.
    #[must_use]
    pub const fn is_reserved(&self) -> bool {
        matches!(self, Reserve::Reserved(_))
    }

    /// Returns whether the call is limited.
    #[must_use]
    pub const fn is_limited(&self) -> bool {
        matches!(self, Reserve::Limited(_))
    }

    pub(super) fn into_result(self) -> Result<Reservation, Limited> {
        match self {
            Reserve::Reserved(reservation) => Ok(reservation),
            Reserve::Limited(limited) => Err(limited),
        }
    }

    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Reserve::Reserved(_) => Outcome::Allowed,
            Reserve::Limited(limited) => limited.outcome(),
        }
    }
}

/// Units that are spent already, and may be used after a wait.
///
/// Dropping a reservation gives nothing back. [`cancel`](Self::cancel) does.
#[derive(Debug, Clone)]
#[must_use = "the units of an unused reservation stay spent"]
#[non_exhaustive]
pub struct Reservation {
    /// What was spent. Its `at` is the moment of the reservation.
    pub spent: Spent,
    /// How long to wait, from [`Spent::at`] on by the database's clock. A caller that waits for this time from the moment at
    /// which it received the reservation never comes too early.
    pub wait: Duration,
}

impl Reservation {
    /// When the units may be used, by the database's clock.
    pub fn usable_at(&self) -> DateTime<Utc> {
        let wait = TimeDelta::from_std(self.wait).ok();
        let at = wait.and_then(|wait| self.spent.at.checked_add_signed(wait));
        at.unwrap_or(DateTime::<Utc>::MAX_UTC)
    }
}

/// What is left of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RateLimitState {
    /// How many units are left.
    pub remaining: u32,
    /// How long until the key is full again if nothing more is spent.
    pub full_in: Duration,
    /// The quota in force: that of an override if there is one, else that of the program.
    pub quota: Quota,
}
