//! What operators read: the spans and events of the feature `tracing`, and nothing without it.

#[cfg(not(feature = "tracing"))]
mod off;
#[cfg(feature = "tracing")]
mod on;

#[cfg(not(feature = "tracing"))]
pub(crate) use self::off::*;
#[cfg(feature = "tracing")]
pub(crate) use self::on::*;
use crate::key::LockKey;

/// What an event is about.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "tracing"), allow(dead_code))]
pub(crate) enum What<'a> {
    Lock(&'a LockKey),
    Service(&'a str),
}
