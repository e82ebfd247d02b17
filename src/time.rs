//! Between PostgreSQL's times and Rust's.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};

/// The longest interval and time-out that are taken: a thousand years, as PostgreSQL counts them.
const LONGEST: Duration = Duration::from_secs(1000 * 360 * 24 * 60 * 60);

/// Whole microseconds, rounded up; `None` for what is zero or longer than a thousand years.
///
/// Microseconds and not days, which are 23 or 25 hours long where the clocks change.
pub(crate) fn microseconds(duration: Duration) -> Option<i64> {
    if duration.is_zero() || duration > LONGEST {
        return None;
    }
    i64::try_from(duration.as_nanos().div_ceil(1000)).ok()
}

/// PostgreSQL counts microseconds from 2000-01-01, and the ends of the scale are its infinities,
/// which chrono does not know.
pub(crate) fn finite(timestamp: PgTimestamp) -> Option<DateTime<Utc>> {
    const EPOCH: i64 = 946_684_800_000_000;
    DateTime::from_timestamp_micros(timestamp.0.checked_add(EPOCH)?)
}

/// The stored functions answer elapsed time: a day is 24 hours. Below a microsecond is a microsecond.
pub(crate) fn elapsed(interval: PgInterval) -> Duration {
    const DAY: i128 = 24 * 60 * 60 * 1_000_000;
    let days = i128::from(interval.months) * 30 + i128::from(interval.days);
    let microseconds = days * DAY + i128::from(interval.microseconds);
    Duration::from_micros(microseconds.clamp(1, i128::from(i64::MAX)) as u64)
}

/// Whole seconds, rounded up: what HTTP's `Retry-After` wants. At least 1.
pub(crate) fn whole_seconds(duration: Duration) -> u64 {
    let up = u64::from(duration.subsec_nanos() > 0);
    duration.as_secs().saturating_add(up).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_seconds_are_rounded_up_and_never_zero() {
        for (nanos, secs) in [
            (0, 1),
            (1, 1),
            (999_999_999, 1),
            (1_000_000_000, 1),
            (1_000_000_001, 2),
            (59_000_000_001, 60),
        ] {
            assert_eq!(whole_seconds(Duration::from_nanos(nanos)), secs);
        }
        assert_eq!(whole_seconds(Duration::MAX), u64::MAX);
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

    #[test]
    fn microseconds_are_rounded_up_and_bounded() {
        assert_eq!(microseconds(Duration::ZERO), None);
        assert_eq!(microseconds(Duration::from_nanos(1)), Some(1));
        assert_eq!(microseconds(Duration::from_nanos(1001)), Some(2));
        assert_eq!(microseconds(LONGEST), Some(31_104_000_000_000_000));
        assert_eq!(microseconds(LONGEST + Duration::from_nanos(1)), None);
        assert_eq!(microseconds(Duration::MAX), None);
    }
}
