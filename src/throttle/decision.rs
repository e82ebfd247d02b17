//! The outcome of an attempt.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::sql::Row;
use crate::event::Outcome;
use crate::input::{microseconds, time, whole_seconds};

/// The outcome of an attempt. [`Throttle::run`](super::Throttle::run) returns the value of its work
/// in place of the [`Granted`].
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use diesel_interlock::{Error, PgPool, Throttle};
/// fn refresh(throttle: &Throttle, pool: &PgPool) -> Result<(), Error> {
///     throttle.attempt(pool)?; // the outcome is ignored
///     Ok(())
/// }
/// ```
#[must_use = "the attempt may be denied, and an ignored grant still spends the interval"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision<T = Granted> {
    /// The throttle was granted.
    Granted(T),
    /// The throttle is not due, or another transaction is taking it. Nothing was changed.
    Denied(Denied),
}

/// A grant of a throttle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Granted {
    /// When it was granted, by the database's clock.
    pub granted_at: DateTime<Utc>,
    /// How long until the throttle is due again.
    pub due_in: Duration,
}

/// A denial, with a hint when to try again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denied {
    /// How long until the throttle is due, by the database's clock. Never zero. While another
    /// transaction is taking the throttle the hint is at most a second, because that transaction
    /// may be rolled back.
    pub retry_after: Duration,
    /// The last grant. `None` while another transaction is taking the throttle.
    pub last: Option<LastGrant>,
}

/// The last grant of a throttle.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LastGrant {
    /// The [details](super::Throttle::details) of the caller that was granted it.
    pub by: String,
    /// When it was granted, by the database's clock.
    pub at: DateTime<Utc>,
}

impl<T> Decision<T> {
    /// Returns the grant or the value of the work, and `None` if it was denied.
    pub fn granted(self) -> Option<T> {
        match self {
            Self::Granted(value) => Some(value),
            Self::Denied(_) => None,
        }
    }

    /// Returns the denial, and `None` if it was granted.
    pub fn denied(self) -> Option<Denied> {
        match self {
            Self::Granted(_) => None,
            Self::Denied(denied) => Some(denied),
        }
    }

    /// Returns whether it was granted.
    pub const fn is_granted(&self) -> bool {
        matches!(self, Self::Granted(_))
    }

    /// Returns whether it was denied.
    pub const fn is_denied(&self) -> bool {
        !self.is_granted()
    }
}

impl Denied {
    /// Returns `retry_after` in whole seconds, rounded up, for the header field `Retry-After`.
    pub fn retry_after_secs(&self) -> u64 {
        whole_seconds(self.retry_after)
    }
}

impl Decision {
    /// Reads the row of an attempt. `None` for a resource without a row, which has no interval.
    pub(super) fn new(row: Row) -> Option<Self> {
        const SECOND: Duration = Duration::from_secs(1);
        let every = row.every?.microseconds.max(1);
        if let Some(granted_at) = row.granted_at {
            return Some(Self::Granted(Granted {
                granted_at: time(granted_at).unwrap_or_default(),
                due_in: microseconds(every),
            }));
        }
        let due = row.last_granted.0.saturating_add(every);
        let rest = due.saturating_sub(row.now.0);
        Some(Self::Denied(match time(row.last_granted) {
            Some(at) if rest > 0 => Denied {
                retry_after: microseconds(rest),
                last: Some(LastGrant {
                    by: row.details,
                    at,
                }),
            },
            // The throttle is due and yet was not granted, so another transaction is taking it.
            _ => Denied {
                retry_after: microseconds(every).min(SECOND),
                last: None,
            },
        }))
    }
}

impl<T> Outcome for Decision<T> {
    fn word(&self) -> &'static str {
        match self {
            Self::Granted(_) => "granted",
            Self::Denied(_) => "denied",
        }
    }
}
