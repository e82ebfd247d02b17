//! The outcome of a claim.

use std::time::Duration;

use diesel::data_types::PgInterval;

use super::permit::Permit;
use crate::error::{Error, Result};
use crate::event::Outcome;
use crate::input;
#[cfg(feature = "async")]
use crate::pool::Pool;

/// The outcome of a claim of a slot.
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
    /// This caller has a slot, or had one while its work ran.
    Admitted(T),
    /// All slots are taken. Nothing was changed.
    Full(Full),
}

/// A refusal, with a hint when to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Full {
    /// How long until the first permit expires, by the clock of the database; or a few
    /// milliseconds, if others are claiming or freeing slots just now. Never zero. It is only a
    /// hint: most permits are released before they expire, and some are renewed.
    pub retry_after: Duration,
}

impl<T> Admission<T> {
    /// Returns the permit or the value of the work, and `None` if the semaphore is full.
    pub fn admitted(self) -> Option<T> {
        match self {
            Self::Admitted(value) => Some(value),
            Self::Full(_) => None,
        }
    }

    /// Returns the refusal, and `None` if a slot was taken. A permit is then dropped, which
    /// releases it.
    pub fn full(self) -> Option<Full> {
        match self {
            Self::Admitted(_) => None,
            Self::Full(full) => Some(full),
        }
    }

    /// Returns whether this caller got a slot.
    pub const fn is_admitted(&self) -> bool {
        matches!(self, Self::Admitted(_))
    }

    /// Returns whether all slots were taken.
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
impl<M> Admission<Permit<diesel::r2d2::Pool<M>>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Runs `work` if there is a permit, and then releases the permit.
    pub fn run<T, E: From<Error>>(
        self,
        work: impl FnOnce(&Permit<diesel::r2d2::Pool<M>>) -> Result<T, E>,
    ) -> Result<Admission<T>, E> {
        match self {
            Self::Admitted(permit) => permit.run(work).map(Admission::Admitted),
            Self::Full(full) => Ok(Admission::Full(full)),
        }
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> Admission<Permit<P>> {
    /// Runs `work` if there is a permit, and then releases the permit.
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
