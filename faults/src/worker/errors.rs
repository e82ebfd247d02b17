//! Which errors a fault may cause, and which it must not.

use diesel_interlock::Error;

use crate::record::Primitive;

/// Describes an error that no fault excuses.
pub(super) fn must_not_be(what: Primitive, error: &Error) -> Option<String> {
    let text = full_text(error);
    let excused = match error {
        // Nothing was sent, so the session lives.
        Error::LockLost { .. } if text.contains("another command is already in progress") => false,
        Error::Pool(_)
        | Error::LockLost { .. }
        | Error::ReleaseFailed { .. }
        | Error::TransactionLeftOpen { .. }
        | Error::TimedOut { .. } => true,
        // A completion waits for whoever marks its row at that moment, and is then repeated in the background.
        // A writer waits for whoever passes the same fence.
        Error::Database(_)
            if matches!(what, Primitive::Semaphore | Primitive::Fence)
                && text.contains("lock timeout") =>
        {
            true
        }
        Error::Database(_) => !SYMPTOMS.iter().any(|symptom| text.contains(symptom)),
        _ => false,
    };
    (!excused).then(|| format!("{}: {text}", what.name()))
}

/// Of a wait cut short by the user's `lock_timeout`, of a pooler that has lost a prepared statement, of locks taken in
/// circles, of the index that two claims ran into, of a
/// stored function that takes the wrong turn, and of a transaction that somebody left in the pool.
const SYMPTOMS: [&str; 7] = [
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
