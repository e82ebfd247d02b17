//! What an attempt at a throttle answers.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::query::Attempted;
use crate::time::{self, Timestamp, elapsed};

/// The database's decision on an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a grant that is overlooked is spent: nobody else gets the resource for its interval"]
pub enum Decision {
    /// The resource is ours for this interval.
    Granted(Grant),
    /// Not now.
    Denied(Denial),
}

impl Decision {
    /// The grant, if it is one.
    #[must_use = "a grant that is overlooked is spent"]
    pub fn granted(self) -> Option<Grant> {
        match self {
            Decision::Granted(grant) => Some(grant),
            Decision::Denied(_) => None,
        }
    }

    /// The denial, if it is one.
    #[must_use = "a grant that is overlooked is spent"]
    pub fn denied(self) -> Option<Denial> {
        match self {
            Decision::Granted(_) => None,
            Decision::Denied(denial) => Some(denial),
        }
    }
}

/// A resource that was handed out, by the database's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// When it was handed out.
    pub granted_at: DateTime<Utc>,
    /// From when on it is due again.
    pub until: DateTime<Utc>,
}

/// Why a resource was not handed out, and when to ask again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denial {
    /// Why.
    pub reason: DenialReason,
    /// How long until it is due, by the database's clock: always above zero. Where the resource is
    /// being taken right now, the whole interval, as a hint.
    pub retry_after: Duration,
    /// When it is due; `None` if it was closed by hand, with a `last_locked` of `infinity`.
    pub next_at: Option<DateTime<Utc>>,
    /// Who took it last, in their own words (`last_locker_details`); `None` while it is being taken.
    pub holder: Option<String>,
    /// When they took it; `None` while it is being taken.
    pub held_since: Option<DateTime<Utc>>,
}

impl Denial {
    /// Whole seconds until it is due, rounded up: what HTTP's `Retry-After` wants. At least 1.
    pub fn retry_after_secs(&self) -> u64 {
        time::whole_seconds(self.retry_after)
    }
}

/// Why a resource was not handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DenialReason {
    /// The interval since the last grant has not passed.
    TooSoon,
    /// Another transaction takes it right now, and has not committed yet.
    BeingTaken,
}

/// What came of a closure that runs only if its throttle is granted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the work may not have run"]
pub enum Outcome<T> {
    /// The work ran, and answered this.
    Done(T),
    /// The work did not run.
    Denied(Denial),
}

pub(super) fn from_row(row: Attempted) -> Decision {
    let next_at = Timestamp::from(row.next_at).at();
    if row.granted {
        let granted_at = Timestamp::from(row.decided_at).at().unwrap_or_default();
        return Decision::Granted(Grant {
            granted_at,
            until: next_at.unwrap_or(granted_at),
        });
    }
    Decision::Denied(Denial {
        reason: if row.being_taken {
            DenialReason::BeingTaken
        } else {
            DenialReason::TooSoon
        },
        retry_after: row
            .retry_after
            .map_or(Duration::ZERO, elapsed)
            .max(Duration::from_micros(1)),
        next_at,
        holder: row.holder,
        held_since: row.held_since.and_then(|since| Timestamp::from(since).at()),
    })
}
