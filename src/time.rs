//! Times and durations as the database stores them: in microseconds.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};

/// Microseconds between 1970, where chrono counts from, and 2000, where PostgreSQL does.
const EPOCH: i64 = 946_684_800_000_000;

/// Without months and days, whose length differs.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    PgInterval::from_microseconds(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX))
}

/// `None` for `-infinity`, and for what chrono cannot represent.
pub(crate) fn time(at: PgTimestamp) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_micros(at.0.checked_add(EPOCH)?)
}

/// The magnitude of a number of microseconds.
pub(crate) fn microseconds(number: i64) -> Duration {
    Duration::from_micros(number.unsigned_abs())
}

/// The microseconds of the difference of two times, which has days of 24 hours and no months.
pub(crate) fn difference(interval: PgInterval) -> i64 {
    i64::from(interval.days) * 86_400_000_000 + interval.microseconds
}

/// A thousand years of 360 days, as PostgreSQL compares intervals.
pub(crate) const LONGEST: Duration = Duration::from_secs(1000 * 360 * 24 * 60 * 60);

/// Rounded up, and one at least.
pub(crate) const fn whole_seconds(duration: Duration) -> u64 {
    match (duration.as_secs(), duration.subsec_nanos()) {
        (0, _) => 1,
        (seconds, 0) => seconds,
        (seconds, _) => seconds.saturating_add(1),
    }
}
