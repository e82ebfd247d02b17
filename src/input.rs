//! What is refused before anything is sent.

use std::fmt::{Display, Write};
use std::time::Duration;

use crate::error::{Error, Result};

/// The bytes that fit into an index beside other columns.
const LONGEST: usize = 1000;

/// Refuses a name that is empty, or that PostgreSQL could not store or index.
pub(crate) fn name(name: &str) -> Result<()> {
    match name {
        "" => Err(Error::input("a name must not be empty")),
        name => text(name),
    }
}

/// As [`name`], for a key or details, which may be empty.
pub(crate) fn text(text: &str) -> Result<()> {
    if text.len() > LONGEST {
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

/// The microseconds of a duration between one and `longest`, or else this error.
pub(crate) fn microseconds(
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

/// Several parts as one name: in each, `\` and a space are escaped, and a space joins them, so that no two lists of parts are
/// written alike.
pub(crate) fn join<T: Display>(parts: impl IntoIterator<Item = T>) -> String {
    let escaped: Vec<String> = parts
        .into_iter()
        .map(|part| show(part).replace('\\', r"\\").replace(' ', r"\ "))
        .collect();
    escaped.join(" ")
}
