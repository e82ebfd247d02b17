//! Whether a watch is late although it could work.

use std::time::{Duration, Instant};

/// Finds out whether a watch on the first server is late, although its pool gives working connections all the time.
#[derive(Debug)]
pub(super) struct Lateness {
    /// The time since which the pool has given working connections without an interruption.
    working_since: Option<Instant>,
    tried: Instant,
}

/// A confirmation that is older than this is examined.
pub(super) const LATE: Duration = Duration::from_millis(200);

/// How long the pool must have worked before a late confirmation is a violation. A query that hangs on the other server
/// takes two seconds.
const TOO_LATE: Duration = Duration::from_secs(1);

pub(super) const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// A query, or a pause between two, that takes longer shows that the server or this process was stopped.
const STOPPED: Duration = Duration::from_millis(250);

impl Lateness {
    pub(super) fn new() -> Self {
        Self {
            working_since: None,
            tried: Instant::now(),
        }
    }

    /// Returns whether it is to be tried now whether the pool works, for [`is_too_late`](Self::is_too_late).
    pub(super) fn is_to_be_tried(&mut self, is_lost: bool, last_confirmed: Duration) -> bool {
        let since_last = self.tried.elapsed();
        if is_lost || last_confirmed < LATE || since_last > STOPPED {
            self.working_since = None;
            self.tried = Instant::now();
            return false;
        }
        since_last >= BETWEEN_TRIES
    }

    /// Returns whether the watch is too late, now that a query that was sent at `sent` has succeeded or not.
    pub(super) fn is_too_late(&mut self, sent: Instant, works: bool) -> bool {
        self.tried = Instant::now();
        if works && sent.elapsed() < STOPPED {
            self.working_since.get_or_insert(sent).elapsed() > TOO_LATE
        } else {
            self.working_since = None;
            false
        }
    }
}

/// The text of the violation.
pub(super) fn too_late(last_confirmed: Duration) -> String {
    format!(
        "late watch: nothing was confirmed for {last_confirmed:?}, and the pool worked all the time"
    )
}
