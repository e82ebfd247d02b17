//! Nothing.

use super::What;
use crate::error::Result;
#[cfg(feature = "r2d2")]
use crate::key::LockKey;
use crate::throttle::{Decision, Difference};

/// No time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Since;

impl Since {
    pub(crate) fn now() -> Self {
        Self
    }
}

pub(crate) fn acquire<T>(
    _: What<'_>,
    call: impl FnOnce() -> Result<T>,
    _: impl FnOnce(&T) -> &'static str,
) -> Result<T> {
    call()
}

pub(crate) fn attempt(
    _: &str,
    _: Option<&str>,
    call: impl FnOnce() -> Result<Decision>,
) -> Result<Decision> {
    call()
}

pub(crate) fn different(_: &Difference) {}

#[cfg(feature = "r2d2")]
pub(crate) fn renewed<T>(_: What<'_>, _: &Result<T>) {}

pub(crate) fn released(_: What<'_>, _: Since, _: &Result<()>) {}

#[cfg(feature = "r2d2")]
pub(crate) fn release_deferred(_: What<'_>, _: Since) {}

#[cfg(feature = "r2d2")]
pub(crate) fn release_given_up(_: i64) {}

#[cfg(feature = "r2d2")]
pub(crate) fn lock_lost(_: &LockKey) {}

pub(crate) fn discarded(_: bool) {}
