//! Limits of the texts that are sent, and names as they are sent.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::sync::Arc;

#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

use crate::input::Input;

/// The longest service, name of a rate limit or a fence, and key of a throttle or a rate limit, in bytes. They are indexed,
/// and index entries have a limit.
pub(crate) const LONGEST_NAME: usize = 1000;

/// The longest label of an enumerated type, in bytes.
pub(crate) const LONGEST_LABEL: usize = 63;

/// The longest details, in bytes.
pub(crate) const LONGEST_DETAILS: usize = 8192;

/// Checks a text. PostgreSQL's `text` stores every character except NUL.
pub(crate) fn check(text: &str, what: &'static str, longest: usize) -> Result<(), Input> {
    if text.contains('\0') {
        return Err(Input::NulCharacter);
    }
    if text.len() > longest {
        return Err(Input::TooLong { what, longest });
    }
    Ok(())
}

/// Returns the first characters of a text that is shown, and an ellipsis if more follow.
pub(crate) fn shown(text: &str, characters: usize) -> (&str, &'static str) {
    match text.char_indices().nth(characters) {
        Some((end, _)) => (&text[..end], "…"),
        None => (text, ""),
    }
}

/// Formats a value of the caller. `None` if its `Display` returns an error, for which `to_string` would panic.
pub(crate) fn formatted(value: impl fmt::Display) -> Option<String> {
    let mut text = String::new();
    write!(text, "{value}").is_ok().then_some(text)
}

/// Appends a part of a name, in which no space is left that could separate two parts.
pub(crate) fn push_part(name: &mut String, part: &str) {
    for character in part.chars() {
        if matches!(character, '\\' | ' ') {
            name.push('\\');
        }
        name.push(character);
    }
}

/// A name as it is sent: that of a service, a throttled key, a rate limit or a fence, with the prefix of a test if there is one.
///
/// [`Session::name`](crate::session::Session::name) makes it, so that no statement can be sent without the prefix.
#[derive(Debug, Clone)]
pub(crate) struct Name<'a>(Cow<'a, str>);

impl<'a> Name<'a> {
    /// The name for a connection that is not known yet, with the prefix of the thread or the process.
    pub(crate) fn anywhere(name: &'a str) -> Self {
        Self(prefixed(name))
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn on(conn: &mut PgConnection, name: &'a str) -> Self {
        let _names = names_on(conn);
        Self::anywhere(name)
    }

    /// Returns the name if it can be stored and indexed.
    pub(crate) fn checked(self, what: &'static str) -> Result<Self, Input> {
        check(&self.0, what, LONGEST_NAME)?;
        Ok(self)
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// A name as it was sent, for what is done to it later, perhaps on another thread. Without the feature `testing` none is kept,
/// because a name is sent as it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct SentName(Option<Arc<str>>);

impl SentName {
    /// Nothing was sent yet.
    pub(crate) const NONE: Self = Self(None);

    pub(crate) fn of(name: &Name<'_>) -> Self {
        Self(cfg!(feature = "testing").then(|| name.as_str().into()))
    }

    pub(crate) fn get(&self) -> Option<Name<'_>> {
        self.0.as_deref().map(|name| Name(name.into()))
    }
}

#[cfg(not(feature = "testing"))]
pub(crate) fn prefixed(name: &str) -> Cow<'_, str> {
    Cow::Borrowed(name)
}

/// Returns a name as it is sent, with the prefix of this thread or this process. Use it in your own queries and with the
/// expressions of [`monitor`](crate::monitor), which do not add a prefix.
///
/// # Examples
///
/// ```
/// use diesel_interlock::testing;
///
/// assert_eq!(testing::prefixed("geocoder"), "geocoder");
/// let _prefix = testing::key_prefix("this test");
/// assert_eq!(testing::prefixed("geocoder"), r"this\ test geocoder");
/// ```
#[cfg(feature = "testing")]
pub fn prefixed(name: &str) -> Cow<'_, str> {
    if name.is_empty() {
        return name.into();
    }
    let Some(prefix) = crate::prefix::current() else {
        return name.into();
    };
    let mut prefixed = String::new();
    push_part(&mut prefixed, prefix.as_str());
    prefixed.push(' ');
    prefixed.push_str(name);
    prefixed.into()
}

/// Names get the prefix of that connection until the returned value is dropped.
#[cfg(not(feature = "testing"))]
#[cfg(feature = "postgres")]
pub(crate) fn names_on(_: &mut PgConnection) -> Names {
    Names {}
}

/// Names get the prefix of that connection until the returned value is dropped. The connections of a test's pool may carry
/// a prefix, which then reaches the threads of handlers.
#[cfg(feature = "testing")]
#[cfg(feature = "postgres")]
pub(crate) fn names_on(conn: &mut PgConnection) -> Names {
    Names {
        _entered: crate::prefix::enter_carried(conn),
    }
}

#[cfg(feature = "postgres")]
#[must_use = "if unused the names have no prefix of the connection"]
pub(crate) struct Names {
    #[cfg(feature = "testing")]
    _entered: Option<crate::prefix::EnteredPrefix>,
}
