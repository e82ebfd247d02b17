//! The outcome of an operation that may find a lock taken.

use crate::events::Outcome;

/// The outcome of an attempt to take a lock: either the lock, or [`Busy`](Attempt::Busy). Being busy is not an error.
///
/// This is an enum and not an `Option`, because rustc does not warn about a dropped `Option`: the lock would be released at
/// once, and the code below would run unprotected.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// use diesel_interlock::{AdvisoryLock, Error, PgPool};
///
/// fn nightly(pool: &PgPool) -> Result<(), Error> {
///     AdvisoryLock::named("nightly report").try_acquire(pool)?; // released on this line
///     Ok(())
/// }
/// ```
///
/// The following code differs only in that it uses the outcome, and it compiles:
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
///
/// [`run`](Attempt::run) runs some work under the guard inside, and releases it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "if the lock was acquired, dropping the outcome releases it at once"]
pub enum Attempt<G> {
    /// The lock was acquired, and is held as long as the value inside.
    Acquired(G),
    /// Another session holds the lock. Nothing was changed, and nothing is held.
    Busy,
}

impl<G> Attempt<G> {
    /// Returns what was acquired, for `let … else` and combinators.
    ///
    /// ```compile_fail
    /// #![deny(unused_must_use)]
    /// # use diesel_interlock::{AdvisoryLock, Error, PgPool};
    /// # fn nightly(pool: &PgPool) -> Result<(), Error> {
    /// AdvisoryLock::named("nightly report").try_acquire(pool)?.acquired(); // released here
    /// # Ok(())
    /// # }
    /// ```
    #[must_use = "if the lock was acquired, dropping the outcome releases it at once"]
    pub fn acquired(self) -> Option<G> {
        match self {
            Attempt::Acquired(inner) => Some(inner),
            Attempt::Busy => None,
        }
    }

    /// Returns whether the lock was acquired. As with [`is_busy`](Self::is_busy), a guard in a temporary is dropped.
    #[must_use]
    pub const fn is_acquired(&self) -> bool {
        matches!(self, Attempt::Acquired(_))
    }

    /// Returns whether another session holds the lock.
    ///
    /// The call does not keep the lock: `attempt.is_busy()` on a temporary drops the guard inside, and so does a pattern
    /// `Attempt::Acquired(_)`. Bind the guard to a name, such as `_guard`.
    #[must_use]
    pub const fn is_busy(&self) -> bool {
        matches!(self, Attempt::Busy)
    }

    /// The outcome that its event has.
    pub(crate) const fn outcome(&self) -> Outcome {
        match self {
            Attempt::Acquired(_) => Outcome::Acquired,
            Attempt::Busy => Outcome::Busy,
        }
    }

    /// Applies `f` to what was acquired, and leaves [`Busy`](Attempt::Busy) as it is.
    pub fn map<T>(self, f: impl FnOnce(G) -> T) -> Attempt<T> {
        match self {
            Attempt::Acquired(inner) => Attempt::Acquired(f(inner)),
            Attempt::Busy => Attempt::Busy,
        }
    }
}
