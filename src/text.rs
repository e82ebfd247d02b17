//! What a text must be like before it is sent.

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
