//! What a text must be like before it is sent, and what is sent for a name.

use std::borrow::Cow;

use crate::error::{Error, Result};

/// What names a throttled key or a service: it is indexed, and an index entry has a limit.
pub(crate) const LONGEST_NAME: usize = 1000;

/// A label of an enumerated type, as PostgreSQL has it.
pub(crate) const LONGEST_LABEL: usize = 63;

/// What operators read about who took something.
pub(crate) const LONGEST_DETAILS: usize = 8192;

/// PostgreSQL's `text` holds any character but one.
pub(crate) fn check(text: &str, what: &'static str, longest: usize) -> Result<()> {
    if text.contains('\0') {
        return Err(Error::NulCharacter);
    }
    if text.len() > longest {
        return Err(Error::TooLong { what, longest });
    }
    Ok(())
}

/// The name of a lock, a service or a throttled key as it is sent.
#[cfg(not(feature = "testing"))]
pub(crate) fn name(name: &str) -> Cow<'_, str> {
    Cow::Borrowed(name)
}

/// The names of a test may carry a prefix, so that they do not meet those of another test.
#[cfg(feature = "testing")]
pub(crate) fn name(name: &str) -> Cow<'_, str> {
    crate::testing::prefixed(name)
}
