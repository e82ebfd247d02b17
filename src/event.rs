//! Events: how each operation ended, reported once, in one place.

use std::time::{Duration, Instant};

#[cfg(feature = "tracing")]
use crate::error::with_causes;
use crate::error::{Error, Result};
pub(crate) use crate::metrics::Subject;
use crate::metrics::{self, Raised};

/// How an operation on a primitive ended.
#[derive(Debug)]
#[cfg_attr(not(all(feature = "metrics", feature = "tracing")), allow(dead_code))]
pub(crate) struct Event<'a> {
    pub(crate) subject: Subject,
    /// The method, or `drop`.
    pub(crate) operation: &'static str,
    /// The word of the outcome's type, `failed`, or what happened to a holder: `released`, `lost`.
    pub(crate) outcome: &'static str,
    /// How long the operation took, its wait included.
    pub(crate) took: Duration,
    /// Whether the operation may wait.
    pub(crate) waits: bool,
    /// How long something was held, at its end.
    pub(crate) held: Option<Duration>,
    pub(crate) error: Option<&'a Error>,
    /// Whether the caller gets the error. Otherwise only the log has it.
    pub(crate) is_returned: bool,
}

/// An outcome with a word for it.
pub(crate) trait Outcome {
    fn word(&self) -> &'static str;
}

/// The word for whether an operation has changed anything.
pub(crate) const fn changed(is_changed: &bool) -> &'static str {
    if *is_changed { "changed" } else { "unchanged" }
}

impl Subject {
    pub(crate) const fn event<'a>(
        self,
        operation: &'static str,
        outcome: &'static str,
    ) -> Event<'a> {
        Event {
            subject: self,
            operation,
            outcome,
            took: Duration::ZERO,
            waits: false,
            held: None,
            error: None,
            is_returned: true,
        }
    }

    /// Runs an operation, and reports how it ended. A future that is dropped reports nothing.
    pub(crate) async fn observe<T: Outcome>(
        self,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.observe_any(operation, false, T::word, work).await
    }

    /// As [`observe`](Self::observe), for a result without a word of its own.
    pub(crate) async fn observe_as<T>(
        self,
        operation: &'static str,
        word: fn(&T) -> &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        self.observe_any(operation, false, word, work).await
    }

    /// As [`observe`](Self::observe), for an operation that may wait.
    pub(crate) async fn observe_wait<T: Outcome>(
        self,
        operation: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let _waiting = Raised::waiting(self);
        self.observe_any(operation, true, T::word, work).await
    }

    async fn observe_any<T>(
        self,
        operation: &'static str,
        waits: bool,
        word: fn(&T) -> &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let began = Instant::now();
        let result = work.await;
        self.report(operation, waits, began, result.as_ref().map(word));
        result
    }

    /// The part of [`observe_any`](Self::observe_any) that a program compiles once.
    fn report(
        self,
        operation: &'static str,
        waits: bool,
        began: Instant,
        result: Result<&'static str, &Error>,
    ) {
        Event {
            took: began.elapsed(),
            waits,
            error: result.err(),
            ..self.event(operation, result.unwrap_or("failed"))
        }
        .emit();
    }

    /// Whether a holder begins after its claim: a leader or a run does, and a permit does not.
    pub(crate) fn begins_later(self) -> bool {
        matches!(self.primitive, "leader" | "schedule")
    }

    /// Reports how a holding ended: `released`, `resigned` for a leader, `overran` if `longest` has
    /// ended it, or with an error.
    pub(crate) fn end(
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
            Err(Error::PermitLost(_)) if operation == "longest" => "overran",
            Err(Error::LockLost(_) | Error::PermitLost(_)) => "lost",
            Err(_) => "failed",
        };
        Event {
            took: began.elapsed(),
            held: Some(since.elapsed()),
            error: result.as_ref().err(),
            // A drop returns nothing.
            is_returned: operation != "drop",
            ..self.event(operation, outcome)
        }
        .emit();
    }
}

/// The errors of a loop that retries. The first one is logged at `WARN`, and the next ones at
/// `DEBUG`, until a try succeeds.
#[derive(Debug, Default)]
pub(crate) struct Trouble {
    /// Whether the caller gets the errors.
    is_returned: bool,
    is_known: bool,
}

impl Trouble {
    /// For a single call, which returns its error.
    pub(crate) const fn returned() -> Self {
        Self {
            is_returned: true,
            is_known: true,
        }
    }

    /// Notes that a try has succeeded.
    pub(crate) const fn end(&mut self) {
        self.is_known = self.is_returned;
    }

    /// Reports that a try has failed.
    pub(crate) fn report(&mut self, subject: Subject, operation: &'static str, error: &Error) {
        Event {
            error: Some(error),
            is_returned: std::mem::replace(&mut self.is_known, true),
            ..subject.event(operation, "failed")
        }
        .emit();
    }
}

impl Event<'_> {
    /// The one place where events leave this crate.
    pub(crate) fn emit(self) {
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

    /// Whether a holder has lost what it held.
    fn is_lost(&self) -> bool {
        matches!(self.outcome, "lost" | "deposed" | "overran")
    }

    /// Logs at `WARN` what nobody else hears of, and what was lost; at `INFO` that a schedule was
    /// edited; and at `DEBUG` the rest. Times are whole microseconds.
    #[cfg(feature = "tracing")]
    fn log(self) {
        let is_lost = self.is_lost();
        let Subject { primitive, name } = self.subject;
        let Self {
            operation, outcome, ..
        } = self;
        let took_us = self.took.as_micros() as u64;
        let held_us = self.held.map(|held| held.as_micros() as u64);
        let error = self.error.map(|error| with_causes(error));
        let error = error.as_ref().map(tracing::field::display);
        macro_rules! event {
            ($level:ident) => {
                tracing::$level!(
                    target: "diesel_interlock",
                    primitive, name, operation, outcome, took_us, held_us, error,
                    "{primitive} {name:?} {operation}: {outcome}"
                )
            };
        }
        let has_failed = self.error.is_some() && !self.is_returned || outcome == "crashed";
        if has_failed || is_lost {
            event!(warn)
        } else if outcome == "edited" {
            event!(info)
        } else {
            event!(debug)
        }
    }
}
