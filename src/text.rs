//! What a text must be like before it is sent, and what is sent for a name.

use std::borrow::Cow;
use std::fmt::{self, Write};

use diesel::pg::PgConnection;

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

/// What the caller's `Display` writes; `None` if it returns an error, at which `to_string` would panic.
pub(crate) fn formatted(value: impl fmt::Display) -> Option<String> {
    let mut text = String::new();
    write!(text, "{value}").is_ok().then_some(text)
}

/// The name of a lock, a service, a throttled key or a fence as it is sent.
#[cfg(not(feature = "testing"))]
pub(crate) fn name(name: &str) -> Cow<'_, str> {
    Cow::Borrowed(name)
}

/// The names of a test may carry a prefix, so that they do not meet those of another test.
#[cfg(feature = "testing")]
pub(crate) fn name(name: &str) -> Cow<'_, str> {
    crate::testing::prefixed(name)
}

/// While it lives, `name` returns what a name is to be on that connection. Where a name is sent on a
/// connection, it is asked for under this.
#[cfg(not(feature = "testing"))]
pub(crate) fn names_on(_: &mut PgConnection) -> Names {
    Names {}
}

/// The connections of a test's pool may carry a prefix, so that it reaches threads which are not the
/// test's own.
#[cfg(feature = "testing")]
pub(crate) fn names_on(conn: &mut PgConnection) -> Names {
    Names {
        _entered: crate::testing::enter_carried(conn),
    }
}

#[must_use = "if unused names are as on any connection"]
pub(crate) struct Names {
    #[cfg(feature = "testing")]
    _entered: Option<crate::testing::EnteredPrefix>,
}
