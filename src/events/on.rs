//! Events for `tracing`. Their target and the names of their fields are part of this crate's contract:
//! see the crate's documentation.

use std::error::Error as _;
use std::fmt;
use std::time::{Duration, Instant};

use tracing::field::{DisplayValue, display};
use tracing::{debug, debug_span, warn};

use super::What;
use crate::error::{Error, Result};
use crate::key::LockKey;
use crate::throttle::{Decision, Difference};

const TARGET: &str = "diesel_interlock";

/// When something began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Since(Instant);

impl Since {
    pub(crate) fn now() -> Self {
        Self(Instant::now())
    }

    fn ms(self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

impl<'a> What<'a> {
    fn key(self) -> Option<DisplayValue<&'a LockKey>> {
        match self {
            What::Lock(key) => Some(display(key)),
            What::Service(_) => None,
        }
    }

    fn service(self) -> Option<&'a str> {
        match self {
            What::Lock(_) => None,
            What::Service(service) => Some(service),
        }
    }
}

/// Makes the call in a span, and tells what came of it.
pub(crate) fn acquire<T>(
    what: What<'_>,
    call: impl FnOnce() -> Result<T>,
    outcome: impl FnOnce(&T) -> &'static str,
) -> Result<T> {
    let (key, service) = (what.key(), what.service());
    let span = debug_span!(target: TARGET, "acquire", key, service);
    span.in_scope(|| {
        let since = Since::now();
        let answer = call();
        let waited_ms = since.ms();
        match &answer {
            Ok(answer) => {
                let outcome = outcome(answer);
                debug!(target: TARGET, operation = "acquire", key, service, outcome, waited_ms);
            }
            Err(error) => {
                let error = display(Causes(error));
                warn!(target: TARGET, operation = "acquire", key, service, outcome = "error", waited_ms, error);
            }
        }
        answer
    })
}

/// Makes an attempt at a throttle in a span, and tells the decision.
pub(crate) fn attempt(
    resource: &str,
    key: Option<&str>,
    call: impl FnOnce() -> Result<Decision>,
) -> Result<Decision> {
    let span = debug_span!(target: TARGET, "attempt", resource, key);
    span.in_scope(|| {
        let decision = call();
        match &decision {
            Ok(Decision::Granted(_)) => {
                debug!(target: TARGET, operation = "attempt", resource, key, outcome = "granted");
            }
            Ok(Decision::Denied(denial)) => {
                let retry_after_ms = u64::try_from(denial.retry_after.as_millis()).unwrap_or(u64::MAX);
                debug!(target: TARGET, operation = "attempt", resource, key, outcome = "denied", retry_after_ms);
            }
            Err(error) => {
                let error = display(Causes(error));
                warn!(target: TARGET, operation = "attempt", resource, key, outcome = "error", error);
            }
        }
        decision
    })
}

/// Logs that the database has another interval than the program declares.
pub(crate) fn different(difference: &Difference) {
    let ms = |interval: Duration| u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
    let resource = &*difference.label;
    let (declared_ms, in_database_ms) = (ms(difference.declared), ms(difference.in_database));
    warn!(target: TARGET, operation = "sync", resource, outcome = "different", declared_ms, in_database_ms);
}

/// Tells what came of a renewal.
#[cfg(feature = "r2d2")]
pub(crate) fn renewed<T>(what: What<'_>, renewed: &Result<T>) {
    let service = what.service();
    match renewed {
        Ok(_) => debug!(target: TARGET, operation = "renew", service, outcome = "renewed"),
        Err(error) => {
            let (outcome, error) = (of_failure(error), display(Causes(error)));
            warn!(target: TARGET, operation = "renew", service, outcome, error);
        }
    }
}

/// Tells what came of a release.
pub(crate) fn released(what: What<'_>, held: Since, released: &Result<()>) {
    let (key, service, held_ms) = (what.key(), what.service(), held.ms());
    match released {
        Ok(()) => {
            debug!(target: TARGET, operation = "release", key, service, outcome = "released", held_ms);
        }
        Err(error) => {
            let (outcome, error) = (of_failure(error), display(Causes(error)));
            warn!(target: TARGET, operation = "release", key, service, outcome, held_ms, error);
        }
    }
}

/// Tells that a permit's release found no idle connection, and is left to the thread for late ones.
#[cfg(feature = "r2d2")]
pub(crate) fn release_deferred(what: What<'_>, held: Since) {
    let (service, held_ms) = (what.service(), held.ms());
    debug!(target: TARGET, operation = "release", service, outcome = "deferred", held_ms);
}

/// Tells that a late release came too late: the request has timed out.
#[cfg(feature = "r2d2")]
pub(crate) fn release_given_up(id: i64) {
    warn!(target: TARGET, operation = "release", id, outcome = "timed_out");
}

/// Tells that a watch has seen a lock gone.
#[cfg(feature = "r2d2")]
pub(crate) fn lock_lost(key: &LockKey) {
    warn!(target: TARGET, operation = "watch", key = %key, outcome = "lost");
}

/// Tells that a connection is given up, since it may hold a lock that no guard accounts for.
pub(crate) fn discarded(pooled: bool) {
    warn!(target: TARGET, operation = "discard", outcome = "discarded", pooled);
}

fn of_failure(error: &Error) -> &'static str {
    match error {
        Error::LockLost { .. } => "lost",
        Error::TimedOut { .. } => "timed_out",
        _ => "error",
    }
}

/// An error with its causes, in one line.
struct Causes<'a>(&'a Error);

impl fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
