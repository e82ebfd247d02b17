//! Whether a session may hold a lock that no guard accounts for.

use super::lock::Lock;
use crate::events::{self, Event, Outcome, Subject};
use crate::panics::caught;

/// Why the session may hold a lock that no guard accounts for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doubt {
    /// A statement that takes this lock was sent, and its reply did not arrive.
    Acquiring(Lock),
    /// A statement that releases this lock was sent to the session with this pid, and its reply did not arrive.
    Releasing(Lock, i32),
    /// The connection, whose session has this pid, cannot be trusted, and no query can change that: a different session
    /// replies on it, it is closed, or some code had marked it before.
    Certain(i32),
}

impl Doubt {
    /// The pid of the session, if it is known.
    pub(super) fn pid(self) -> Option<i32> {
        match self {
            Doubt::Acquiring(_) => None,
            Doubt::Releasing(_, pid) | Doubt::Certain(pid) => Some(pid),
        }
    }
}

/// Records that a connection in doubt is discarded. Caught, because a drop does it, and the subscriber may panic.
pub(super) fn record_discard(pooled: bool, is_expected: bool) {
    let subject = Subject::Connection { pooled };
    let outcome = Outcome::Discarded { is_expected };
    caught(|| events::record(&Event::new("discard", subject, outcome)));
}

/// The pids of sessions that still hold a lock that no guard accounts for.
///
/// A guard on a borrowed connection that cannot unlock, because the caller's transaction is aborted, marks the connection
/// as broken. Diesel clears that mark with the next statement that succeeds. If an outer guard has the same session pinned
/// out of a pool, it looks here and discards the connection. A pid that the server reuses costs one needless reconnect.
///
/// The drop of a guard on an asynchronous connection that was lent queues the unlock and sees no reply, so its session is
/// always remembered here. A guard that has the session pinned out of a pool then releases all of its locks.
pub(super) mod distrusted {
    use std::collections::BTreeSet;
    use std::sync::{Mutex, MutexGuard};

    use crate::panics::lock;

    static PIDS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

    pub(in crate::advisory) fn remember(pid: i32) {
        pids().insert(pid);
    }

    /// Returns whether it was distrusted.
    pub(in crate::advisory) fn forget(pid: i32) -> bool {
        pids().remove(&pid)
    }

    pub(in crate::advisory) fn contains(pid: i32) -> bool {
        pids().contains(&pid)
    }

    fn pids() -> MutexGuard<'static, BTreeSet<i32>> {
        lock(&PIDS)
    }
}

#[cfg(test)]
mod tests {
    use super::distrusted;

    #[test]
    fn a_session_that_ends_is_distrusted_no_more() {
        distrusted::remember(-7);
        assert!(distrusted::contains(-7));
        distrusted::forget(-7);
        assert!(!distrusted::contains(-7));
    }
}
