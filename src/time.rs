//! Conversions between PostgreSQL's times and Rust's.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::deserialize::{self, FromSql, FromSqlRow, Queryable};
use diesel::expression::AsExpression;
use diesel::pg::{Pg, PgValue};
use diesel::serialize::{self, Output, ToSql};
use diesel::sql_types::{Interval, Nullable, Timestamptz};

/// The microseconds from the epoch of Unix, 1970-01-01, to that of PostgreSQL, 2000-01-01.
const EPOCH: i64 = 946_684_800_000_000;

/// A `timestamptz`, which may be infinite. Loading `-infinity` or `infinity` as a `DateTime` is an error.
///
/// Timestamps sort as in SQL. In a model, `#[diesel(deserialize_as = Timestamp)]` on an `Option<DateTime<Utc>>` loads both
/// infinities as `None`.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::Timestamp;
/// use diesel_interlock::schema::resource_control::throttled_resource;
///
/// // The resources that were granted at least once.
/// let taken = throttled_resource::table
///     .filter(throttled_resource::last_locked.gt(Timestamp::NegInfinity));
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// # assert_eq!(taken.count().get_result(conn), Ok(0));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, AsExpression, FromSqlRow)]
#[diesel(sql_type = Timestamptz)]
pub enum Timestamp {
    /// `-infinity`, before all times. A throttled resource with this time was never granted.
    NegInfinity,
    /// A finite time.
    At(DateTime<Utc>),
    /// `infinity`, after all times, or a time after the year 262142, which is the last that chrono represents. A throttled
    /// resource with this time was closed by hand.
    Infinity,
}

impl Timestamp {
    /// Returns the time. `None` for both infinities.
    pub fn at(self) -> Option<DateTime<Utc>> {
        match self {
            Timestamp::At(time) => Some(time),
            Timestamp::NegInfinity | Timestamp::Infinity => None,
        }
    }
}

impl From<PgTimestamp> for Timestamp {
    fn from(timestamp: PgTimestamp) -> Self {
        if timestamp.0 == i64::MIN {
            return Timestamp::NegInfinity;
        }
        // PostgreSQL's times start within the range of chrono, and end after it.
        timestamp
            .0
            .checked_add(EPOCH)
            .and_then(DateTime::from_timestamp_micros)
            .map_or(Timestamp::Infinity, Timestamp::At)
    }
}

impl From<Timestamp> for Option<DateTime<Utc>> {
    fn from(timestamp: Timestamp) -> Self {
        timestamp.at()
    }
}

impl FromSql<Timestamptz, Pg> for Timestamp {
    fn from_sql(value: PgValue<'_>) -> deserialize::Result<Self> {
        <PgTimestamp as FromSql<Timestamptz, Pg>>::from_sql(value).map(Self::from)
    }
}

impl ToSql<Timestamptz, Pg> for Timestamp {
    fn to_sql<'b>(&'b self, out: &mut Output<'b, '_, Pg>) -> serialize::Result {
        let microseconds = match self {
            Timestamp::NegInfinity => i64::MIN,
            Timestamp::At(time) => time.timestamp_micros().saturating_sub(EPOCH),
            Timestamp::Infinity => i64::MAX,
        };
        ToSql::<Timestamptz, Pg>::to_sql(&PgTimestamp(microseconds), &mut out.reborrow())
    }
}

/// Converts an interval to elapsed time, in which a day is 24 hours and a month 30 days. A negative interval becomes zero.
pub(crate) fn elapsed(interval: PgInterval) -> Duration {
    const DAY: i128 = 24 * 60 * 60 * 1_000_000;
    let days = i128::from(interval.months) * 30 + i128::from(interval.days);
    let microseconds = days * DAY + i128::from(interval.microseconds);
    Duration::from_micros(microseconds.clamp(0, i128::from(i64::MAX)) as u64)
}

/// An interval as elapsed time, in which a day is 24 hours and a month 30 days.
///
/// In a model, put `#[diesel(deserialize_as = Elapsed)]` on a `Duration`, or
/// `#[diesel(deserialize_as = Elapsed<Option<Duration>>)]` on an `Option<Duration>`. A negative interval loads as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed<T = Duration>(pub T);

impl Queryable<Interval, Pg> for Elapsed {
    type Row = PgInterval;

    fn build(interval: PgInterval) -> deserialize::Result<Self> {
        Ok(Self(elapsed(interval)))
    }
}

impl Queryable<Nullable<Interval>, Pg> for Elapsed<Option<Duration>> {
    type Row = Option<PgInterval>;

    fn build(interval: Option<PgInterval>) -> deserialize::Result<Self> {
        Ok(Self(interval.map(elapsed)))
    }
}

impl From<Elapsed> for Duration {
    fn from(loaded: Elapsed) -> Self {
        loaded.0
    }
}

impl From<Elapsed<Option<Duration>>> for Option<Duration> {
    fn from(loaded: Elapsed<Option<Duration>>) -> Self {
        loaded.0
    }
}

/// The longest interval and timeout: a thousand years of 360 days.
const LONGEST: Duration = Duration::from_secs(1000 * 360 * 24 * 60 * 60);

/// Converts to whole microseconds, rounded up. `None` for a duration that is zero or longer than a thousand years.
///
/// The unit is not days, because a day has 23 or 25 hours where the clocks change.
pub(crate) fn microseconds(duration: Duration) -> Option<i64> {
    if duration.is_zero() || duration > LONGEST {
        return None;
    }
    i64::try_from(duration.as_nanos().div_ceil(1000)).ok()
}

/// Converts to whole seconds, rounded up, for the HTTP header `Retry-After`. At least 1.
pub(crate) fn whole_seconds(duration: Duration) -> u64 {
    let up = u64::from(duration.subsec_nanos() > 0);
    duration.as_secs().saturating_add(up).max(1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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
    fn microseconds_are_rounded_up_and_bounded() {
        assert_eq!(microseconds(Duration::ZERO), None);
        assert_eq!(microseconds(Duration::from_nanos(1)), Some(1));
        assert_eq!(microseconds(Duration::from_nanos(1001)), Some(2));
        assert_eq!(microseconds(LONGEST), Some(31_104_000_000_000_000));
        assert_eq!(microseconds(LONGEST + Duration::from_nanos(1)), None);
        assert_eq!(microseconds(Duration::MAX), None);
    }

    #[test]
    fn intervals_are_elapsed_time() {
        let of = |months, days, microseconds| elapsed(PgInterval::new(microseconds, days, months));
        assert_eq!(of(0, 1, 5), Duration::from_micros(86_400_000_005));
        assert_eq!(of(1, 0, 0), Duration::from_secs(30 * 86_400));
        assert_eq!(of(0, 0, -7), Duration::ZERO);
        assert_eq!(
            of(i32::MAX, i32::MAX, i64::MAX),
            Duration::from_micros(i64::MAX as u64)
        );
    }

    #[test]
    fn infinities_are_no_time_and_sort_at_the_ends() {
        let of = |microseconds| Timestamp::from(PgTimestamp(microseconds));
        assert_eq!(of(i64::MIN), Timestamp::NegInfinity);
        assert_eq!(of(i64::MAX), Timestamp::Infinity);
        assert_eq!(of(i64::MAX).at(), None);
        assert_eq!(of(0).at().unwrap().timestamp(), 946_684_800);
        // The first and the last that PostgreSQL has: 4714-11-24 BC and 294276-12-31.
        assert!(of(-211_813_488_000_000_000).at().is_some());
        assert_eq!(of(9_223_371_331_199_999_999), Timestamp::Infinity);
        assert!(Timestamp::NegInfinity < of(0) && of(0) < Timestamp::Infinity);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_duration_is_sent_rounded_up_or_refused(seconds: u64, nanos in 0..1_000_000_000_u32, shift in 0..64) {
            let duration = Duration::new(seconds >> shift, nanos);
            match microseconds(duration) {
                Some(sent) => {
                    let sent = elapsed(PgInterval::from_microseconds(sent));
                    prop_assert!(sent >= duration && sent - duration < Duration::from_micros(1));
                    prop_assert!(Duration::ZERO < duration && duration <= LONGEST);
                }
                None => prop_assert!(duration.is_zero() || duration > LONGEST),
            }
            let up = whole_seconds(duration);
            prop_assert!(up > 0 && Duration::from_secs(up) >= duration || up == u64::MAX);
            prop_assert!(up == 1 || Duration::from_secs(up - 1) < duration);
        }

        #[test]
        fn any_interval_is_a_duration(months: i32, days: i32, microseconds: i64) {
            const DAY: i128 = 86_400_000_000;
            let sum = i128::from(months) * 30 * DAY + i128::from(days) * DAY + i128::from(microseconds);
            let loaded = elapsed(PgInterval::new(microseconds, days, months));
            prop_assert_eq!(loaded.as_micros() as i128, sum.clamp(0, i64::MAX.into()));
        }

        #[test]
        fn any_timestamp_of_postgresql_is_a_time_or_an_infinity(
            // From 4714 BC on, or -infinity.
            microseconds in prop_oneof![-211_813_488_000_000_000..=i64::MAX, Just(i64::MIN)],
        ) {
            match Timestamp::from(PgTimestamp(microseconds)) {
                Timestamp::At(time) => {
                    prop_assert_eq!(i128::from(time.timestamp_micros()), i128::from(microseconds) + i128::from(EPOCH));
                }
                Timestamp::NegInfinity => prop_assert_eq!(microseconds, i64::MIN),
                Timestamp::Infinity => prop_assert!(microseconds > 8_000_000_000_000_000_000),
            }
        }
    }
}
