//! The answer of everything that may find a lock taken.

use crate::events::Outcome;

/// What came of an attempt that does not wait for ever: the thing, or the news that somebody
/// else has it.
///
/// An enum of its own and not an `Option`, because rustc does not warn about an `Option` that is
/// dropped: the lock would be released at once and the code below would run unprotected.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// use diesel_interlock::{AdvisoryLock, Error, PgPool};
///
/// fn nightly(pool: &PgPool) -> Result<(), Error> {
///     AdvisoryLock::named("nightly report").try_acquire(pool)?; // released on this very line
///     Ok(())
/// }
/// ```
///
/// What differs below is the answer's being looked at, and it compiles:
/// ```
/// #![deny(unused_must_use)]
/// use diesel_interlock::{AdvisoryLock, Error, PgPool};
///
/// fn nightly(pool: &PgPool) -> Result<(), Error> {
///     let Some(_guard) = AdvisoryLock::named("nightly report").try_acquire(pool)?.acquired() else {
///         return Ok(());
///     };
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "if the lock was acquired, dropping the answer releases it at once"]
pub enum Attempt<G> {
    /// It is ours, for as long as the value inside says.
    Acquired(G),
    /// Another session has it. Nothing was changed, and nothing is held.
    Busy,
}

impl<G> Attempt<G> {
    /// Turns the answer into an `Option`, for `let … else` and combinators.
    ///
    /// ```compile_fail
    /// #![deny(unused_must_use)]
    /// # use diesel_interlock::{AdvisoryLock, Error, PgPool};
    /// # fn nightly(pool: &PgPool) -> Result<(), Error> {
    /// AdvisoryLock::named("nightly report").try_acquire(pool)?.acquired(); // released here
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "if the lock was acquired, dropping the answer releases it at once"]
    pub fn acquired(self) -> Option<G> {
        match self {
            Attempt::Acquired(inner) => Some(inner),
            Attempt::Busy => None,
        }
    }

    /// Answers whether another session has it.
    ///
    /// It says nothing of whether the lock is kept: `attempt.is_busy()` on a temporary drops what
    /// was acquired with it, and so does a pattern `Attempt::Acquired(_)`. Bind it to a name, be it
    /// `_guard`.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Attempt::Busy)
    }

    /// How an event names it.
    pub(crate) const fn outcome(&self) -> Outcome {
        match self {
            Attempt::Acquired(_) => Outcome::Acquired,
            Attempt::Busy => Outcome::Busy,
        }
    }

    /// Applies `f` to what was acquired and leaves [`Busy`](Attempt::Busy) as it is.
    pub fn map<T>(self, f: impl FnOnce(G) -> T) -> Attempt<T> {
        match self {
            Attempt::Acquired(inner) => Attempt::Acquired(f(inner)),
            Attempt::Busy => Attempt::Busy,
        }
    }
}
