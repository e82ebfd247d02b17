//! Intervals that load as elapsed time.

use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::deserialize::{self, Queryable};
use diesel::pg::Pg;
use diesel::sql_types::{Interval, Nullable};

use crate::time;

/// An interval as elapsed time, in which a day is 24 hours and a month 30 days.
///
/// For models: `#[diesel(deserialize_as = Elapsed)]` on a `Duration`, or
/// `#[diesel(deserialize_as = Elapsed<Option<Duration>>)]` on an `Option<Duration>`. What is negative
/// loads as zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Elapsed<T = Duration>(pub T);

impl Queryable<Interval, Pg> for Elapsed {
    type Row = PgInterval;

    fn build(interval: PgInterval) -> deserialize::Result<Self> {
        Ok(Self(time::elapsed(interval)))
    }
}

impl Queryable<Nullable<Interval>, Pg> for Elapsed<Option<Duration>> {
    type Row = Option<PgInterval>;

    fn build(interval: Option<PgInterval>) -> deserialize::Result<Self> {
        Ok(Self(interval.map(time::elapsed)))
    }
}

impl From<Elapsed> for Duration {
    fn from(elapsed: Elapsed) -> Self {
        elapsed.0
    }
}

impl From<Elapsed<Option<Duration>>> for Option<Duration> {
    fn from(elapsed: Elapsed<Option<Duration>>) -> Self {
        elapsed.0
    }
}
