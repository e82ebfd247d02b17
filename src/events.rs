//! Events about the operations of this crate, for operators.
//!
//! Every event passes [`record`]. The feature `tracing` logs it there; without the feature nothing
//! happens. The target, the operations, the outcomes and the names of the fields are part of this crate's contract: see
//! the crate's documentation.

use std::future::Future;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::key::ShownKey;

/// An event.
#[cfg_attr(not(feature = "tracing"), allow(dead_code))] // read by the log
#[derive(Debug, Clone, Copy)]
pub(crate) struct Event<'a> {
    pub(crate) operation: &'static str,
    pub(crate) subject: Subject<'a>,
    pub(crate) outcome: Outcome,
    /// How long the operation took.
    pub(crate) waited: Option<Duration>,
    /// How long the lock or the slot was held.
    pub(crate) held: Option<Duration>,
    pub(crate) error: Option<&'a Error>,
}

/// The subject of an event.
#[cfg_attr(not(feature = "tracing"), allow(dead_code))] // read by the log
#[derive(Debug, Clone, Copy)]
pub(crate) enum Subject<'a> {
    Lock(ShownKey<'a>),
    Semaphore {
        service: &'a str,
        /// The id of the request. `None` before it is admitted.
        id: Option<i64>,
    },
    Throttle {
        resource: &'a str,
        key: Option<&'a str>,
    },
    RateLimit {
        name: &'a str,
    },
    Connection {
        pooled: bool,
    },
}

/// The outcome of an operation.
#[cfg_attr(not(all(feature = "tracing", feature = "r2d2")), allow(dead_code))] // some are of pools, and only the log reads them
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Acquired,
    Busy,
    /// A semaphore without a free slot. Logged as `busy`.
    Full {
        retry_after: Duration,
    },
    Released,
    /// The release is left to a background thread or a task, or queued on the connection.
    Deferred,
    Renewed,
    Lost,
    TimedOut,
    Granted,
    Denied {
        retry_after: Duration,
    },
    Allowed,
    Limited {
        /// `None` if the call never is allowed.
        retry_after: Option<Duration>,
    },
    Different {
        declared: Duration,
        in_database: Duration,
    },
    Discarded {
        /// Whether it is what a dropped wait comes to.
        is_expected: bool,
    },
    /// The future of the operation was dropped before it was ready.
    Dropped,
    Error,
}

impl<'a> Event<'a> {
    pub(crate) fn new(operation: &'static str, subject: Subject<'a>, outcome: Outcome) -> Self {
        Self {
            operation,
            subject,
            outcome,
            waited: None,
            held: None,
            error: None,
        }
    }

    /// The event of an operation that may have failed.
    pub(crate) fn of<T>(
        operation: &'static str,
        subject: Subject<'a>,
        result: &'a Result<T>,
        outcome: impl FnOnce(&T) -> Outcome,
    ) -> Self {
        let (outcome, error) = match result {
            Ok(value) => (outcome(value), None),
            Err(error) => (Outcome::of_failure(error), Some(error)),
        };
        Self {
            error,
            ..Self::new(operation, subject, outcome)
        }
    }

    pub(crate) fn held_since(self, since: Instant) -> Self {
        Self {
            held: Some(since.elapsed()),
            ..self
        }
    }
}

impl Outcome {
    fn of_failure(error: &Error) -> Self {
        match error {
            Error::LockLost { .. } => Self::Lost,
            Error::TimedOut { .. } => Self::TimedOut,
            _ => Self::Error,
        }
    }
}

/// Runs an operation in its own span, and records its outcome.
pub(crate) fn observe<T>(
    operation: &'static str,
    subject: Subject<'_>,
    run: impl Future<Output = Result<T>>,
    outcome: impl FnOnce(&T) -> Outcome,
) -> impl Future<Output = Result<T>> {
    observe_more(operation, subject, run, outcome, move |_| subject)
}

/// As [`observe`], for an operation whose result tells more about its subject.
pub(crate) async fn observe_more<'a, T>(
    operation: &'static str,
    subject: Subject<'a>,
    run: impl Future<Output = Result<T>>,
    outcome: impl FnOnce(&T) -> Outcome,
    found: impl FnOnce(&Result<T>) -> Subject<'a>,
) -> Result<T> {
    in_span(operation, subject, async move {
        let since = Instant::now();
        let result = run.await;
        let waited = Some(since.elapsed());
        record(&Event {
            waited,
            ..Event::of(operation, found(&result), &result, outcome)
        });
        result
    })
    .await
}

#[cfg(not(feature = "tracing"))]
pub(crate) fn record(_: &Event<'_>) {}

#[cfg(not(feature = "tracing"))]
fn in_span<F: Future>(_: &'static str, _: Subject<'_>, run: F) -> F {
    run
}

#[cfg(feature = "tracing")]
use self::traced::in_span;
#[cfg(feature = "tracing")]
pub(crate) use self::traced::record;

#[cfg(feature = "tracing")]
mod traced {
    use std::borrow::Cow;
    use std::error::Error as _;
    use std::fmt;
    use std::future::poll_fn;
    use std::pin::pin;

    use tracing::field::{DisplayValue, display};
    use tracing::{Span, debug_span, event};

    use super::*;
    use crate::panics::caught;
    use crate::text;

    const TARGET: &str = "diesel_interlock";

    /// Logs the event.
    pub(crate) fn record(event: &Event<'_>) {
        macro_rules! log {
            ($level:ident) => {
                event!(
                    target: TARGET,
                    tracing::Level::$level,
                    operation = event.operation,
                    kind = event.subject.kind(),
                    key = event.subject.lock(),
                    key = event.subject.throttled_key().as_deref(),
                    service = event.subject.service().as_deref(),
                    id = event.subject.id(),
                    resource = event.subject.resource().as_deref(),
                    limit = event.subject.limit().as_deref(),
                    pooled = event.subject.pooled(),
                    outcome = event.outcome.name(),
                    waited_ms = event.waited.map(ms),
                    held_ms = event.held.map(ms),
                    retry_after_ms = event.outcome.retry_after().map(ms),
                    declared_ms = event.outcome.intervals().map(|(declared, _)| ms(declared)),
                    in_database_ms = event.outcome.intervals().map(|(_, in_database)| ms(in_database)),
                    error = event.error.map(|error| display(Causes(error))),
                )
            };
        }
        if event.outcome.needs_attention() {
            log!(WARN);
        } else {
            log!(DEBUG);
        }
    }

    /// Runs an operation in its own span. Records an event if its future is dropped.
    ///
    /// Not by tracing's own wrapper of futures, because its drop enters the span again, and a subscriber that panics there
    /// while another panic unwinds would abort the process.
    pub(super) async fn in_span<F: Future>(
        operation: &'static str,
        subject: Subject<'_>,
        run: F,
    ) -> F::Output {
        let span = span(operation, subject);
        let mut run = pin!(run);
        // Declared after the operation, so it is dropped first, and its event precedes those of what the operation leaves.
        let mut unfinished = Unfinished {
            operation,
            subject,
            span: &span,
            since: Instant::now(),
            is_pending: false,
        };
        poll_fn(|context| {
            unfinished.is_pending = false; // An operation that panics was not dropped by its caller.
            let polled = span.in_scope(|| run.as_mut().poll(context));
            unfinished.is_pending = polled.is_pending();
            polled
        })
        .await
    }

    fn span(operation: &'static str, subject: Subject<'_>) -> Span {
        let (kind, lock) = (subject.kind(), subject.lock());
        let (resource, key) = (subject.resource(), subject.throttled_key());
        let (service, limit) = (subject.service(), subject.limit());
        let (resource, key) = (resource.as_deref(), key.as_deref());
        let (service, limit) = (service.as_deref(), limit.as_deref());
        match operation {
            "attempt" => debug_span!(target: TARGET, "attempt", kind, resource, key),
            "check" => debug_span!(target: TARGET, "check", kind, limit),
            "reserve" => debug_span!(target: TARGET, "reserve", kind, limit),
            _ => debug_span!(target: TARGET, "acquire", kind, key = lock, service),
        }
    }

    /// An operation whose future may be dropped between two polls. Dropping this records that.
    struct Unfinished<'a> {
        operation: &'static str,
        subject: Subject<'a>,
        span: &'a Span,
        since: Instant,
        is_pending: bool,
    }

    impl Drop for Unfinished<'_> {
        fn drop(&mut self) {
            if self.is_pending {
                let event = Event {
                    waited: Some(self.since.elapsed()),
                    ..Event::new(self.operation, self.subject, Outcome::Dropped)
                };
                caught(|| self.span.in_scope(|| record(&event)));
            }
        }
    }

    impl<'a> Subject<'a> {
        fn kind(self) -> &'static str {
            match self {
                Self::Lock(_) => "lock",
                Self::Semaphore { .. } => "semaphore",
                Self::Throttle { .. } => "throttle",
                Self::RateLimit { .. } => "rate_limit",
                Self::Connection { .. } => "connection",
            }
        }

        fn lock(self) -> Option<DisplayValue<ShownKey<'a>>> {
            match self {
                Self::Lock(key) => Some(display(key)),
                _ => None,
            }
        }

        fn throttled_key(self) -> Option<Cow<'a, str>> {
            match self {
                Self::Throttle { key, .. } => key.map(shown),
                _ => None,
            }
        }

        fn service(self) -> Option<Cow<'a, str>> {
            match self {
                Self::Semaphore { service, .. } => Some(shown(service)),
                _ => None,
            }
        }

        fn id(self) -> Option<i64> {
            match self {
                Self::Semaphore { id, .. } => id,
                _ => None,
            }
        }

        fn resource(self) -> Option<Cow<'a, str>> {
            match self {
                Self::Throttle { resource, .. } => Some(shown(resource)),
                _ => None,
            }
        }

        fn limit(self) -> Option<Cow<'a, str>> {
            match self {
                Self::RateLimit { name } => Some(shown(name)),
                _ => None,
            }
        }

        fn pooled(self) -> Option<bool> {
            match self {
                Self::Connection { pooled } => Some(pooled),
                _ => None,
            }
        }
    }

    impl Outcome {
        fn name(self) -> &'static str {
            match self {
                Self::Acquired => "acquired",
                Self::Busy | Self::Full { .. } => "busy",
                Self::Released => "released",
                Self::Deferred => "deferred",
                Self::Renewed => "renewed",
                Self::Lost => "lost",
                Self::TimedOut => "timed_out",
                Self::Granted => "granted",
                Self::Denied { .. } => "denied",
                Self::Allowed => "allowed",
                Self::Limited { .. } => "limited",
                Self::Different { .. } => "different",
                Self::Discarded { .. } => "discarded",
                Self::Dropped => "dropped",
                Self::Error => "error",
            }
        }

        fn needs_attention(self) -> bool {
            match self {
                Self::Lost | Self::TimedOut | Self::Different { .. } | Self::Error => true,
                Self::Discarded { is_expected } => !is_expected,
                _ => false,
            }
        }

        fn retry_after(self) -> Option<Duration> {
            match self {
                Self::Denied { retry_after } | Self::Full { retry_after } => Some(retry_after),
                Self::Limited { retry_after } => retry_after,
                _ => None,
            }
        }

        fn intervals(self) -> Option<(Duration, Duration)> {
            match self {
                Self::Different {
                    declared,
                    in_database,
                } => Some((declared, in_database)),
                _ => None,
            }
        }
    }

    /// A text of the caller as an event shows it. One that is refused may have any length.
    fn shown(text: &str) -> Cow<'_, str> {
        match text::shown(text, text::LONGEST_NAME) {
            (_, "") => text.into(),
            (beginning, more) => format!("{beginning}{more}").into(),
        }
    }

    fn ms(duration: Duration) -> u64 {
        u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
    }

    /// An error with its causes, in one line. Messages of libpq have several.
    struct Causes<'a>(&'a Error);

    impl fmt::Display for Causes<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(&one_line(self.0))?;
            let mut cause = self.0.source();
            while let Some(error) = cause {
                write!(f, ": {}", one_line(error))?;
                cause = error.source();
            }
            Ok(())
        }
    }

    fn one_line(error: &dyn std::error::Error) -> String {
        let message = error.to_string();
        let lines = message.split(['\n', '\r']).map(str::trim);
        lines
            .filter(|line| !line.is_empty())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[cfg(test)]
    mod tests {
        use diesel::result::Error as DieselError;

        use super::*;
        use crate::key::LockKey;

        #[test]
        fn an_error_is_one_line() {
            let broken = |message: &str| DieselError::QueryBuilderError(message.into());
            let lost = Error::ReleaseFailed {
                key: LockKey::bigint(7),
                source: broken("the session ended\n"),
            };
            let pool = broken("connection failed\r\n\tIs the server running?\n\n");
            for (error, end) in [
                (lost, ": the session ended"),
                (
                    Error::Database(pool),
                    "connection failed Is the server running?",
                ),
            ] {
                let line = Causes(&error).to_string();
                assert!(line.ends_with(end), "{line:?}");
                assert!(!line.contains(['\n', '\r']), "{line:?}");
            }
        }
    }
}
