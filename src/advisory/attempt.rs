//! The outcome of an attempt to take a lock.

use crate::error::{Error, Result};
use crate::event::Outcome;

/// The outcome of an attempt to take a lock.
#[must_use = "the lock may be held by another session"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attempt<T> {
    /// The lock is held.
    Acquired(T),
    /// Another session holds the lock, and nothing was changed.
    Busy,
}

impl<T> Attempt<T> {
    /// Returns what was acquired, or `None` if the lock is busy.
    pub fn acquired(self) -> Option<T> {
        match self {
            Self::Acquired(value) => Some(value),
            Self::Busy => None,
        }
    }

    /// Returns whether the lock was acquired.
    pub const fn is_acquired(&self) -> bool {
        matches!(self, Self::Acquired(_))
    }

    /// Returns whether another session holds the lock.
    pub const fn is_busy(&self) -> bool {
        !self.is_acquired()
    }
}

impl<T> Attempt<T> {
    /// What a wait without a deadline has acquired: it has no other outcome.
    pub(crate) fn of_endless_wait(self) -> Result<T> {
        self.acquired().ok_or(Error::TimedOut)
    }
}

impl<T> Outcome for Attempt<T> {
    fn word(&self) -> &'static str {
        match self {
            Self::Acquired(_) => "acquired",
            Self::Busy => "busy",
        }
    }
}
