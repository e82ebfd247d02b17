//! The errors that a fault may cause, and those that it must not.

use diesel_interlock::Error;

use super::report::violation;
use crate::record::Primitive;

/// Reports an error that no fault explains.
pub(super) fn examine(what: Primitive, error: &Error) {
    let text = full_text(error);
    let excused = match error {
        // Nothing was sent, so the session is alive.
        Error::LockLost { .. } | Error::ReleaseFailed { .. }
            if text.contains("another command is already in progress") =>
        {
            false
        }
        Error::Pool(_)
        | Error::LockLost { .. }
        | Error::ReleaseFailed { .. }
        | Error::TransactionLeftOpen { .. }
        | Error::TimedOut { .. } => true,
        // Another session has locked the key of a rate limit for longer than a reset waits.
        Error::Contended { .. } => what == Primitive::RateLimit,
        // A completion waits for a session that marks its row at that moment, and is then repeated in the background.
        // A writer waits for a session that passes the same fence.
        Error::Database(_)
            if matches!(what, Primitive::Semaphore | Primitive::Fence)
                && text.contains("lock timeout") =>
        {
            true
        }
        Error::Database(_) => !SYMPTOMS.iter().any(|symptom| text.contains(symptom)),
        _ => false,
    };
    if !excused {
        violation(format!("{}: {text}", what.name()));
    }
}

/// The messages of a cancellation that hit another statement than its own, of a wait that the user's `lock_timeout` cut
/// short, of a pooler that has lost a prepared statement, of a deadlock, of a unique index that two claims met in, of a
/// stored function that took a wrong branch, and of a transaction that was left open in the pool.
const SYMPTOMS: [&str; 8] = [
    "due to user request",
    "lock timeout",
    "prepared statement",
    "deadlock",
    "duplicate key",
    "serialize",
    "does not exist",
    "transaction is aborted",
];

fn full_text(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
