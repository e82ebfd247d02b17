//! The checks of an attempt and of a declaration, before anything is sent.

use super::{DeclaredResources, Throttle, ThrottledResource};
use crate::error::{Error, Input, Result};
use crate::text::{self, Name};
use crate::time;

/// An attempt that passed every check that needs no database.
#[derive(Debug)]
pub(crate) struct Attempt<'a> {
    pub(crate) label: &'a str,
    pub(crate) key: Option<Name<'a>>,
    pub(super) details: &'a str,
}

impl<R: ThrottledResource> Throttle<R> {
    /// Checks what is to be sent. `name` turns the key into a name as it is sent on a session.
    pub(crate) fn checked<'a>(
        &'a self,
        name: impl FnOnce(&'a str) -> Name<'a>,
    ) -> Result<Attempt<'a>> {
        let label = self.resource.label();
        text::check(label, "the label", text::LONGEST_LABEL)?;
        let key = match &self.key {
            Some(key) => {
                let key = key.as_deref().ok_or(Input::Unformatted)?;
                if key.is_empty() {
                    return Err(Input::EmptyKey.into());
                }
                Some(name(key).checked("the key")?)
            }
            None => None,
        };
        Ok(Attempt {
            label,
            key,
            details: &self.details,
        })
    }

    /// As [`checked`](Self::checked), for what is to be granted, where the details show operators who took it.
    pub(super) fn checked_with_details<'a>(
        &'a self,
        name: impl FnOnce(&'a str) -> Name<'a>,
    ) -> Result<Attempt<'a>> {
        let attempt = self.checked(name)?;
        text::check(attempt.details, "the details", text::LONGEST_DETAILS)?;
        if attempt.details.trim_matches(' ').is_empty() {
            return Err(Error::Input(Input::EmptyDetails));
        }
        Ok(attempt)
    }
}

/// A declared resource that PostgreSQL can store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Declared {
    pub(super) label: String,
    /// The interval, rounded up.
    pub(super) microseconds: i64,
}

/// Checks every declared resource.
pub(super) fn declared<R: DeclaredResources>() -> Result<Vec<Declared>> {
    R::ALL.iter().map(declaration).collect()
}

fn declaration<R: DeclaredResources>(resource: &R) -> Result<Declared> {
    let label = resource.label().to_owned();
    if label.contains('\0') {
        return Err(Error::Input(Input::NulCharacter));
    }
    if label.is_empty() || label.len() > text::LONGEST_LABEL {
        return Err(Error::Input(Input::BadLabel { label }));
    }
    match time::microseconds(resource.interval()) {
        Some(microseconds) => Ok(Declared {
            label,
            microseconds,
        }),
        None => Err(Error::Input(Input::BadInterval { label })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ResourceLabel;

    fn check(label: &str, key: Option<&str>, details: &str) -> Result<(), Error> {
        let mut throttle =
            Throttle::of(ResourceLabel(label.to_owned())).details(details.to_owned());
        if let Some(key) = key {
            throttle = throttle.key(key);
        }
        throttle.checked_with_details(Name::anywhere).map(|_| ())
    }

    #[test]
    fn what_is_sent_is_within_its_limits() {
        let (long, longest) = ("x".repeat(1001), "x".repeat(1000));
        let (long_label, long_details) = ("x".repeat(64), "x".repeat(8193));
        let too_long = |what, longest| Err(Input::TooLong { what, longest });
        for (label, key, details, expected) in [
            ("rebuild", None, "web-3", Ok(())),
            ("rebuild", Some("7"), "web-3", Ok(())),
            ("rebuild", Some(&*longest), "web-3", Ok(())),
            ("rebuild", Some(&*long), "web-3", too_long("the key", 1000)),
            ("rebuild", Some(""), "web-3", Err(Input::EmptyKey)),
            ("rebuild", Some("\0"), "web-3", Err(Input::NulCharacter)),
            ("rebuild", None, "", Err(Input::EmptyDetails)),
            ("rebuild", None, "  ", Err(Input::EmptyDetails)),
            ("rebuild", None, "\0", Err(Input::NulCharacter)),
            (
                "rebuild",
                None,
                &long_details,
                too_long("the details", 8192),
            ),
            ("re\0build", None, "web-3", Err(Input::NulCharacter)),
            (&long_label, None, "web-3", too_long("the label", 63)),
        ] {
            let result = check(label, key, details).map_err(|error| match error {
                Error::Input(input) => input,
                other => panic!("{other}"),
            });
            assert_eq!(result, expected, "{label:?} {key:?}");
        }
    }
}
