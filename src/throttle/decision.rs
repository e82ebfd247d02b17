//! The outcome of an attempt at a throttle.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::events;
use crate::time;

/// The database's decision on an attempt: a [`Grant`] or a [`Denial`].
///
/// [`Throttle::run`](crate::Throttle::run) returns the value of its closure in place of the grant.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an unused grant is spent: nobody else gets the resource for its interval"]
pub enum Decision<T = Grant> {
    /// The resource was granted for this interval.
    Granted(T),
    /// The resource was not granted. Nothing was changed.
    Denied(Denial),
}

impl<T> Decision<T> {
    /// Returns what was granted, and drops a denial.
    #[must_use = "an unused grant is spent"]
    pub fn granted(self) -> Option<T> {
        match self {
            Decision::Granted(inner) => Some(inner),
            Decision::Denied(_) => None,
        }
    }

    /// Returns the denial, and drops a grant.
    #[must_use = "an unused grant is spent"]
    pub fn denied(self) -> Option<Denial> {
        match self {
            Decision::Granted(_) => None,
            Decision::Denied(denial) => Some(denial),
        }
    }

    /// Returns whether the resource was granted.
    #[must_use]
    pub const fn is_granted(&self) -> bool {
        matches!(self, Decision::Granted(_))
    }

    /// Returns whether the resource was denied.
    #[must_use]
    pub const fn is_denied(&self) -> bool {
        matches!(self, Decision::Denied(_))
    }

    /// Applies `f` to what was granted, and leaves a denial as it is.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Decision<U> {
        match self {
            Decision::Granted(inner) => Decision::Granted(f(inner)),
            Decision::Denied(denial) => Decision::Denied(denial),
        }
    }

    pub(super) fn outcome(&self) -> events::Outcome {
        match self {
            Decision::Granted(_) => events::Outcome::Granted,
            Decision::Denied(denial) => events::Outcome::Denied {
                retry_after: denial.retry_after,
            },
        }
    }
}

/// A grant, by the database's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Grant {
    /// When it was granted.
    pub granted_at: DateTime<Utc>,
    /// When the resource is due again.
    pub until: DateTime<Utc>,
}

/// A denial: why, and when to try again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denial {
    /// Why the resource was denied.
    pub reason: DenialReason,
    /// How long until the resource is due, by the database's clock. Never zero. While another transaction is taking the
    /// resource, it is the whole interval, as a hint.
    pub retry_after: Duration,
    /// When the resource is due. `None` if an operator closed it, with a `last_locked` of `infinity`.
    pub next_at: Option<DateTime<Utc>>,
    /// The details of the last grant (`last_locker_details`). `None` while another transaction is taking the resource.
    pub holder: Option<String>,
    /// When the last grant was made. `None` while another transaction is taking the resource.
    pub held_since: Option<DateTime<Utc>>,
}

impl Denial {
    /// The time until the resource is due in whole seconds, rounded up and at least 1, for the HTTP header `Retry-After`.
    pub fn retry_after_secs(&self) -> u64 {
        time::whole_seconds(self.retry_after)
    }
}

/// Why a resource was denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DenialReason {
    /// The interval since the last grant has not passed.
    TooSoon,
    /// Another transaction is taking the resource, and has not committed yet.
    BeingTaken,
}
