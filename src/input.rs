//! Checks of input, before anything is sent; and times and durations as the database stores them,
//! in microseconds.

use std::fmt::{Display, Write};
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};

use crate::error::{Error, Result};

/// The most bytes that fit into an index together with other columns.
const LONGEST_TEXT: usize = 1000;

/// Refuses a name, with or without a key, that is empty or that PostgreSQL could not store or
/// index.
pub(crate) fn name(name: &str) -> Result<()> {
    match name {
        "" => Err(Error::input("a name or a key must not be empty")),
        name => text(name),
    }
}

/// As [`name`], for details, and for the key of a column of its own, which is empty without a key.
pub(crate) fn text(text: &str) -> Result<()> {
    if text.len() > LONGEST_TEXT {
        Err(Error::input(
            "a name, a key or details must not be longer than 1,000 bytes",
        ))
    } else if text.contains('\0') {
        Err(Error::input(
            "a name, a key or details must not contain the character NUL",
        ))
    } else {
        Ok(())
    }
}

/// The microseconds of a duration from one to `longest`, or else the error `otherwise`.
pub(crate) fn check_duration(
    duration: Duration,
    longest: Duration,
    otherwise: &'static str,
) -> Result<i64> {
    match i64::try_from(duration.as_micros()) {
        Ok(microseconds) if microseconds > 0 && duration <= longest => Ok(microseconds),
        _ => Err(Error::input(otherwise)),
    }
}

/// The text of a key. A `Display` that fails leaves a NUL character, which is then refused.
pub(crate) fn show(key: impl Display) -> String {
    let mut text = String::new();
    if write!(text, "{key}").is_err() {
        text.push('\0');
    }
    text
}

/// Joins parts into one name, by spaces. In each part, `\` and a space are escaped, so that
/// different lists of parts have different names.
pub(crate) fn join<T: Display>(parts: impl IntoIterator<Item = T>) -> String {
    let escaped: Vec<String> = parts
        .into_iter()
        .map(|part| show(part).replace('\\', r"\\").replace(' ', r"\ "))
        .collect();
    escaped.join(" ")
}

/// Joins a name, of one part or more, and a key. An empty key makes the result empty, which
/// [`name`] refuses.
pub(crate) fn with_key(name: &[&str], key: &str) -> String {
    match key {
        "" => String::new(),
        key => join(name.iter().chain([&key])),
    }
}

/// Microseconds from 1970, where chrono counts from, to 2000, where PostgreSQL does.
const EPOCH: i64 = 946_684_800_000_000;

/// An interval of microseconds only, because months and days differ in length.
pub(crate) fn interval(duration: Duration) -> PgInterval {
    PgInterval::from_microseconds(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX))
}

/// `None` for `infinity` and `-infinity`, and for what chrono cannot represent.
pub(crate) fn time(at: PgTimestamp) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp_micros(at.0.checked_add(EPOCH)?)
}

/// The time as the database stores it: `infinity` for `None`.
pub(crate) fn timestamp(at: Option<DateTime<Utc>>) -> PgTimestamp {
    PgTimestamp(at.map_or(i64::MAX, |at| at.timestamp_micros() - EPOCH))
}

/// The magnitude of a number of microseconds.
pub(crate) fn microseconds(number: i64) -> Duration {
    Duration::from_micros(number.unsigned_abs())
}

/// The microseconds of the difference of two times, which has days of 24 hours and no months.
pub(crate) fn difference(interval: PgInterval) -> i64 {
    i64::from(interval.days) * 86_400_000_000 + interval.microseconds
}

/// The longest duration: a thousand years of 360 days, as PostgreSQL compares intervals.
pub(crate) const LONGEST: Duration = Duration::from_secs(1000 * 360 * 24 * 60 * 60);

/// Whole seconds, rounded up, and at least one.
pub(crate) const fn whole_seconds(duration: Duration) -> u64 {
    match (duration.as_secs(), duration.subsec_nanos()) {
        (0, _) => 1,
        (seconds, 0) => seconds,
        (seconds, _) => seconds.saturating_add(1),
    }
}
