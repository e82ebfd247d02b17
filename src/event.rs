//! Events: what each operation came to, told once, in one place.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::metrics::{self, Raised};
pub(crate) use crate::subject::Subject;

/// What an operation on a primitive came to. The labels are constants of the program, never keys.
#[derive(Debug)]
#[cfg_attr(not(all(feature = "metrics", feature = "tracing")), allow(dead_code))]
struct Event<'a> {
    subject: Subject,
    /// The method, or `drop`.
    operation: &'static str,
    /// The word of the outcome's type, `failed`, or what happened to a holder: `released`, `lost`.
    outcome: &'static str,
    /// How long the operation took, its wait included.
    took: Duration,
    /// Whether it is one of those that may wait.
    waits: bool,
    /// For how long it was held, at its end.
    held: Option<Duration>,
    error: Option<&'a Error>,
    /// Whether the caller hears of the error. Otherwise nobody does who does not read the log.
    is_returned: bool,
}

/// What a loop that tries again tells of its errors: the first in the log, until it goes well again.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    /// Whether the caller hears of the errors.
    is_returned: bool,
    is_told: bool,
}

impl Trouble {
    /// Of a single call, which returns its error.
    pub(crate) const fn returned() -> Self {
        Self {
            is_returned: true,
            is_told: true,
        }
    }

    /// It went well.
    pub(crate) const fn is_over(&mut self) {
        self.is_told = self.is_returned;
    }
}

/// An outcome with a word for it.
pub(crate) trait Outcome {
    fn word(&self) -> &'static str;
}

impl Subject {
    /// Does an operation, and tells what it came to. A future that is dropped tells nothing.
    pub(crate) fn tell<T: Outcome>(
        self,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> impl Future<Output = Result<T>> {
        self.told(operation, false, work)
    }

    /// As [`tell`](Self::tell), for an operation that may wait.
    pub(crate) fn wait<T: Outcome>(
        self,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> impl Future<Output = Result<T>> {
        self.told(operation, true, work)
    }

    async fn told<T: Outcome>(
        self,
        operation: &'static str,
        waits: bool,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let began = Instant::now();
        let result = {
            let _waiting = waits.then(|| Raised::waiting(self));
            work.await
        };
        let (outcome, error) = match &result {
            Ok(outcome) => (outcome.word(), None),
            Err(error) => ("failed", Some(error)),
        };
        let took = began.elapsed();
        let event = self.of(operation, outcome, took, error);
        let is_returned = true;
        Event {
            waits,
            is_returned,
            ..event
        }
        .emit();
        result
    }

    /// Waits, as the gauge shows.
    pub(crate) async fn waiting<T>(self, work: impl Future<Output = T>) -> T {
        let _waiting = Raised::waiting(self);
        work.await
    }

    /// Tells what an operation came to that has waited for so long.
    pub(crate) fn waited(
        self,
        operation: &'static str,
        outcome: &'static str,
        took: Duration,
        error: Option<&Error>,
    ) {
        let event = self.of(operation, outcome, took, error);
        Event {
            waits: true,
            is_returned: true,
            ..event
        }
        .emit();
    }

    /// Tells how a holding ended: `released`, `resigned` for a leader, or with an error.
    pub(crate) fn ended(
        self,
        operation: &'static str,
        began: Instant,
        since: Instant,
        result: &Result<()>,
    ) {
        let is_leader = self.primitive == "leader";
        let outcome = match result {
            Ok(()) if is_leader => "resigned",
            Ok(()) => "released",
            Err(Error::PermitLost(_)) if is_leader => "deposed",
            Err(Error::LockLost(_) | Error::PermitLost(_)) => "lost",
            Err(_) => "failed",
        };
        let event = self.of(operation, outcome, began.elapsed(), result.as_ref().err());
        Event {
            held: Some(since.elapsed()),
            // A drop returns nothing.
            is_returned: operation != "drop",
            ..event
        }
        .emit();
    }

    /// Tells that a look or a campaign has failed, which is tried again.
    pub(crate) fn fail(self, operation: &'static str, error: &Error, trouble: &mut Trouble) {
        let event = self.of(operation, "failed", Duration::ZERO, Some(error));
        let is_returned = std::mem::replace(&mut trouble.is_told, true);
        Event {
            is_returned,
            ..event
        }
        .emit();
    }

    /// Tells of a long wait for a lock, and of a session that holds it.
    #[cfg_attr(not(feature = "tracing"), allow(unused_variables))]
    pub(crate) fn waits_for(self, holder: Option<i32>, took: Duration) {
        #[cfg(feature = "tracing")]
        {
            let Self { primitive, name } = self;
            let took_us = took.as_micros() as u64;
            tracing::warn!(
                target: "diesel_interlock", primitive, name, outcome = "waiting", took_us, holder,
                "waiting for the {primitive} {name:?}, which the session with pid {holder:?} holds"
            );
        }
    }

    /// Tells what happened.
    pub(crate) fn event(
        self,
        operation: &'static str,
        outcome: &'static str,
        took: Duration,
        held: Option<Duration>,
        error: Option<&Error>,
    ) {
        let event = self.of(operation, outcome, took, error);
        Event { held, ..event }.emit();
    }

    const fn of<'a>(
        self,
        operation: &'static str,
        outcome: &'static str,
        took: Duration,
        error: Option<&'a Error>,
    ) -> Event<'a> {
        Event {
            subject: self,
            operation,
            outcome,
            took,
            waits: false,
            held: None,
            error,
            is_returned: false,
        }
    }
}

impl Event<'_> {
    /// The one place where events leave this crate.
    fn emit(self) {
        let waited = self.waits.then_some(self.took);
        metrics::count(
            self.subject,
            self.outcome,
            self.is_lost(),
            waited,
            self.held,
        );
        #[cfg(feature = "tracing")]
        self.log();
    }

    /// Whether something that was held is held no longer, without its holder's doing.
    fn is_lost(&self) -> bool {
        matches!(self.outcome, "lost" | "deposed")
    }

    /// `WARN` for what nobody else hears of, and what was lost; `DEBUG` for the rest. Times are whole microseconds.
    #[cfg(feature = "tracing")]
    fn log(self) {
        let is_lost = self.is_lost();
        let Subject { primitive, name } = self.subject;
        let Self {
            operation, outcome, ..
        } = self;
        let took_us = self.took.as_micros() as u64;
        let held_us = self.held.map(|held| held.as_micros() as u64);
        let error = self.error.map(tracing::field::display);
        macro_rules! event {
            ($level:ident) => {
                tracing::$level!(
                    target: "diesel_interlock", primitive, name, operation, outcome, took_us, held_us, error,
                    "{primitive} {name:?} {operation}: {outcome}"
                )
            };
        }
        let has_failed = self.error.is_some() && !self.is_returned || outcome == "crashed";
        if has_failed || is_lost {
            event!(warn)
        } else {
            event!(debug)
        }
    }
}
