//! What came of a claim.

use std::time::Duration;

use diesel::data_types::PgInterval;

use super::permit::Permit;
use crate::error::{Error, Result};
use crate::event::Outcome;
use crate::input;
#[cfg(feature = "async")]
use crate::pool::Pool;

/// What came of a claim of a slot.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use diesel_interlock::{Error, PgPool, Semaphore};
/// fn call(semaphore: &Semaphore, pool: &PgPool) -> Result<(), Error> {
///     semaphore.try_acquire(pool)?; // and the call below is one too many
///     Ok(())
/// }
/// ```
#[must_use = "all slots may be taken"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission<T> {
    /// A slot is taken, or was taken while work ran.
    Admitted(T),
    /// All slots are taken, and nothing was changed.
    Full(Full),
}

/// When a full semaphore is worth another try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Full {
    /// How long until the first permit expires, by the clock of the database, and a few
    /// milliseconds if others are claiming or freeing the slots just now. Never zero. Most permits
    /// are released before they expire, and some are renewed.
    pub retry_after: Duration,
}

impl<T> Admission<T> {
    /// Returns what was admitted, unless the semaphore is full.
    pub fn admitted(self) -> Option<T> {
        match self {
            Self::Admitted(value) => Some(value),
            Self::Full(_) => None,
        }
    }

    /// Returns when to try again if the semaphore is full. What was admitted is dropped.
    pub fn full(self) -> Option<Full> {
        match self {
            Self::Admitted(_) => None,
            Self::Full(full) => Some(full),
        }
    }

    /// Returns whether a slot was taken.
    pub const fn is_admitted(&self) -> bool {
        matches!(self, Self::Admitted(_))
    }

    /// Returns whether all slots are taken.
    pub const fn is_full(&self) -> bool {
        !self.is_admitted()
    }
}

impl Full {
    pub(super) fn new(retry_after: Option<PgInterval>) -> Self {
        let microseconds = retry_after.map_or(0, input::difference).max(1);
        Self {
            retry_after: input::microseconds(microseconds),
        }
    }

    /// Returns [`retry_after`](Self::retry_after) in whole seconds, rounded up and at least 1, for
    /// the HTTP header `Retry-After`.
    pub const fn retry_after_secs(&self) -> u64 {
        input::whole_seconds(self.retry_after)
    }
}

#[cfg(feature = "r2d2")]
impl Admission<Permit<crate::pool::PgPool>> {
    /// Runs `work` if a slot was taken, and releases it.
    pub fn run<T, E: From<Error>>(
        self,
        work: impl FnOnce(&Permit<crate::pool::PgPool>) -> Result<T, E>,
    ) -> Result<Admission<T>, E> {
        match self {
            Self::Admitted(permit) => permit.run(work).map(Admission::Admitted),
            Self::Full(full) => Ok(Admission::Full(full)),
        }
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Admission<Permit<P>> {
    /// Runs `work` if a slot was taken, and releases it.
    pub async fn run<T, E: From<Error>>(
        self,
        work: impl AsyncFnOnce(&Permit<P>) -> Result<T, E>,
    ) -> Result<Admission<T>, E> {
        match self {
            Self::Admitted(permit) => permit.run(work).await.map(Admission::Admitted),
            Self::Full(full) => Ok(Admission::Full(full)),
        }
    }
}

impl<T> Outcome for Admission<T> {
    fn word(&self) -> &'static str {
        match self {
            Self::Admitted(_) => "admitted",
            Self::Full(_) => "full",
        }
    }
}

/// Whether a request was in flight.
pub(super) struct WasInFlight(pub(super) bool);

impl Outcome for WasInFlight {
    fn word(&self) -> &'static str {
        if self.0 { "in flight" } else { "ended" }
    }
}
