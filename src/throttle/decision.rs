//! What an attempt at a throttle answers.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};

use super::query::Attempted;

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
        let up = u64::from(self.retry_after.subsec_nanos() > 0);
        self.retry_after.as_secs().saturating_add(up).max(1)
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
    let next_at = finite(row.next_at);
    if row.granted {
        let granted_at = finite(row.decided_at).unwrap_or_default();
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
        retry_after: row.retry_after.map_or(Duration::ZERO, elapsed),
        next_at,
        holder: row.holder,
        held_since: row.held_since.and_then(finite),
    })
}

/// PostgreSQL counts microseconds from 2000-01-01, and the ends of the scale are its infinities,
/// which chrono does not know.
fn finite(timestamp: PgTimestamp) -> Option<DateTime<Utc>> {
    const EPOCH: i64 = 946_684_800_000_000;
    DateTime::from_timestamp_micros(timestamp.0.checked_add(EPOCH)?)
}

/// The functions answer elapsed time: a day is 24 hours. Below a microsecond is a microsecond.
fn elapsed(interval: PgInterval) -> Duration {
    const DAY: i128 = 24 * 60 * 60 * 1_000_000;
    let days = i128::from(interval.months) * 30 + i128::from(interval.days);
    let microseconds = days * DAY + i128::from(interval.microseconds);
    Duration::from_micros(microseconds.clamp(1, i128::from(i64::MAX)) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denial(retry_after: Duration) -> Denial {
        Denial {
            reason: DenialReason::TooSoon,
            retry_after,
            next_at: None,
            holder: None,
            held_since: None,
        }
    }

    #[test]
    fn retry_after_is_rounded_up_and_never_zero() {
        for (nanos, secs) in [
            (1, 1),
            (999_999_999, 1),
            (1_000_000_000, 1),
            (1_000_000_001, 2),
            (59_000_000_001, 60),
        ] {
            assert_eq!(denial(Duration::from_nanos(nanos)).retry_after_secs(), secs);
        }
        assert_eq!(denial(Duration::ZERO).retry_after_secs(), 1);
        assert_eq!(denial(Duration::MAX).retry_after_secs(), u64::MAX);
    }

    #[test]
    fn intervals_are_elapsed_time() {
        let of = |months, days, microseconds| elapsed(PgInterval::new(microseconds, days, months));
        assert_eq!(of(0, 1, 5), Duration::from_micros(86_400_000_005));
        assert_eq!(of(1, 0, 0), Duration::from_secs(30 * 86_400));
        assert_eq!(of(0, 0, -7), Duration::from_micros(1));
        assert_eq!(
            of(i32::MAX, i32::MAX, i64::MAX),
            Duration::from_micros(i64::MAX as u64)
        );
    }

    #[test]
    fn infinities_are_none() {
        assert_eq!(finite(PgTimestamp(i64::MAX)), None);
        assert_eq!(finite(PgTimestamp(i64::MIN)), None);
        assert_eq!(finite(PgTimestamp(0)).unwrap().timestamp(), 946_684_800);
    }
}
