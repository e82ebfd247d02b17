//! What is checked, what a reply means, and what follows from it: decisions without a connection and without a clock.

use std::time::Duration;

use diesel::result::DatabaseErrorKind::{ClosedConnection, Unknown};
use diesel::result::Error as DieselError;

use crate::transaction::Transaction;

/// The server's decision on a try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grant {
    Granted,
    /// Another session holds the lock.
    Busy,
    /// Nothing was tried on a hot standby.
    Standby,
}

/// The reply to a try, the same for each statement that tries.
#[derive(Debug)]
pub(super) struct TryReply {
    pub(super) grant: Grant,
    /// The pid of the session, if the reply has it.
    pub(super) pid: Option<i32>,
    /// The value to restore at the release, if there was one to lift.
    pub(super) idle_session_timeout: Option<String>,
    /// The session's name and the fencing token, if one was drawn.
    pub(super) token: Option<(String, i64)>,
}

/// What follows from the reply to a try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterTry {
    Granted,
    Busy,
    /// Refuse it. The session holds nothing.
    Standby,
    /// Refuse it. An earlier user of the pool left a transaction open on the connection, which is to be discarded.
    TransactionInPool,
    /// Refuse it. The caller opened a transaction that Diesel does not know of. A lock that was granted is to be released.
    OpenTransaction {
        is_granted: bool,
    },
}

/// Returns what follows from the reply to a try, and from a transaction that is open on the connection.
pub(super) fn after_try(grant: Grant, is_transaction_open: bool, is_pooled: bool) -> AfterTry {
    match grant {
        _ if is_transaction_open && is_pooled => AfterTry::TransactionInPool,
        _ if is_transaction_open => AfterTry::OpenTransaction {
            is_granted: grant == Grant::Granted,
        },
        Grant::Granted => AfterTry::Granted,
        Grant::Busy => AfterTry::Busy,
        Grant::Standby => AfterTry::Standby,
    }
}

/// How long one statement waits for a session lock.
///
/// While it waits, its transaction has a snapshot, and a holder that runs `CREATE INDEX CONCURRENTLY` waits for that snapshot to
/// go. PostgreSQL ends this cycle with "deadlock detected" after `deadlock_timeout` (one second by default), or with the holder's
/// own `lock_timeout`. A slice that ends before then lets the holder pass. A shorter slice would suit a smaller `lock_timeout` of
/// the holder, but each slice leaves an error entry in the server's log.
const SLICE: Duration = Duration::from_millis(200);

/// The slices of a wait.
#[derive(Debug)]
pub(super) struct Slices {
    longest: Duration,
    lift_settings: bool,
}

/// One slice of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slice {
    pub(super) limit: Duration,
    /// Whether to wait in a separate transaction, in which no setting of the session ends the wait.
    pub(super) lift_settings: bool,
}

/// The reply to a statement that waited for a slice, or that looked at `pg_locks` after a timeout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WaitReply {
    pub(super) pid: i32,
    pub(super) is_granted: bool,
    /// The value to restore at the release, if there was one to lift.
    pub(super) idle_session_timeout: Option<String>,
    /// The longest slice in milliseconds, if a setting of the session did not let the statement wait.
    pub(super) refused_above: Option<i32>,
}

impl Slices {
    /// Inside a test transaction each slice has a savepoint, so that a timeout does not abort the test.
    pub(super) fn in_transaction(transaction: Transaction) -> Self {
        Self {
            longest: SLICE,
            lift_settings: transaction == Transaction::Test,
        }
    }

    /// Returns the next slice, or `None` if no time remains.
    pub(super) fn next(&self, remaining: Duration) -> Option<Slice> {
        (!remaining.is_zero()).then(|| Slice {
            limit: remaining.min(self.longest),
            lift_settings: self.lift_settings,
        })
    }

    /// Reads in a reply what the next slice needs.
    pub(super) fn learn(&mut self, reply: &WaitReply) {
        if let Some(longest) = reply.refused_above {
            self.lift_settings = true;
            self.longest = (self.longest).min(Duration::from_millis(longest.unsigned_abs().into()));
        }
    }
}

/// Returns whether an error is the timeout of a wait, by the time that has passed.
///
/// Nothing else shows it, because the server's message is localised, and Diesel does not expose the SQLSTATE. The server starts
/// to count after the client, so a timeout looks early only if a clock runs slower, as while it is adjusted. One hundredth allows
/// for that. Any other error within that last hundredth, such as a cancellation, is mistaken for the timeout.
///
/// Diesel reports a timeout as an error of a closed connection if the connection was closed before the timeout was read.
pub(super) fn is_timeout(error: &DieselError, elapsed: Duration, limit: Duration) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(Unknown | ClosedConnection, _)
    ) && elapsed >= limit.mul_f64(0.99)
}

/// Returns a timeout in whole milliseconds, as PostgreSQL takes it: rounded up, because 0 would wait indefinitely, and at
/// most almost 25 days.
pub(super) fn milliseconds(timeout: Duration) -> i32 {
    const LONGEST: u128 = i32::MAX as u128;
    timeout.as_nanos().div_ceil(1_000_000).clamp(1, LONGEST) as i32
}

/// The server's reply to an unlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unlocked {
    WasHeld,
    WasNotHeld,
    /// A different session replied, and nothing was unlocked.
    SessionMoved,
}

/// What becomes of the connection of a guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes back to its pool or to the caller as it is.
    Keep,
    /// A pool discards it, and a caller gets it back marked as broken.
    Discard,
}

/// What a release reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    Lock,
    SessionMoved,
    /// A transaction was left open.
    TransactionLeftOpen,
}

/// What is known when the server has replied to an unlock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Release {
    /// The transaction on the connection before the unlock.
    pub(super) before: Transaction,
    pub(super) unlocked: Unlocked,
    /// Whether a transaction was open after the unlock. Any code may have opened it.
    pub(super) left_open: bool,
    pub(super) is_pooled: bool,
    /// Whether a nested guard left a lock behind on the session.
    pub(super) is_distrusted: bool,
}

impl Release {
    pub(super) fn verdict(self) -> (Fate, Option<Loss>) {
        (self.fate(), self.loss())
    }

    fn fate(self) -> Fate {
        let clean = self.unlocked == Unlocked::WasHeld && !self.left_open && !self.is_distrusted;
        match self.before {
            _ if self.unlocked == Unlocked::SessionMoved => Fate::Discard,
            // Some code marked the connection on purpose.
            Transaction::Broken => Fate::Discard,
            // A discarded connection costs the pool little, and a caller can still use a borrowed one.
            _ if clean || !self.is_pooled => Fate::Keep,
            _ => Fate::Discard,
        }
    }

    fn loss(self) -> Option<Loss> {
        match self.unlocked {
            Unlocked::SessionMoved => Some(Loss::SessionMoved),
            Unlocked::WasNotHeld => Some(Loss::Lock),
            Unlocked::WasHeld if self.left_open => Some(Loss::TransactionLeftOpen),
            Unlocked::WasHeld => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use diesel::result::DatabaseErrorKind;

    use super::Fate::{Discard, Keep};
    use super::Unlocked::{SessionMoved, WasHeld, WasNotHeld};
    use super::*;
    use crate::transaction::Transaction::{Broken, None as Outside, Open, Test};

    #[test]
    fn a_try_comes_to_what_the_table_says() {
        use AfterTry::{OpenTransaction, TransactionInPool};
        let open = |is_granted| OpenTransaction { is_granted };
        // The reply: without a transaction; inside one on a borrowed and on a pooled connection.
        for (grant, outside, borrowed, pooled) in [
            (
                Grant::Granted,
                AfterTry::Granted,
                open(true),
                TransactionInPool,
            ),
            (Grant::Busy, AfterTry::Busy, open(false), TransactionInPool),
            (
                Grant::Standby,
                AfterTry::Standby,
                open(false),
                TransactionInPool,
            ),
        ] {
            for is_pooled in [true, false] {
                assert_eq!(after_try(grant, false, is_pooled), outside);
            }
            assert_eq!(after_try(grant, true, false), borrowed);
            assert_eq!(after_try(grant, true, true), pooled);
        }
    }

    #[test]
    fn slices_are_as_long_as_the_time_and_the_settings_allow() {
        let ms = Duration::from_millis;
        let slice = |limit, lift_settings| {
            let limit = ms(limit);
            Some(Slice {
                limit,
                lift_settings,
            })
        };
        let reply = |refused_above| WaitReply {
            pid: 7,
            is_granted: false,
            idle_session_timeout: None,
            refused_above,
        };
        let mut slices = Slices::in_transaction(Outside);
        assert_eq!(slices.next(Duration::ZERO), None);
        assert_eq!(slices.next(ms(3)), slice(3, false));
        assert_eq!(slices.next(Duration::MAX), slice(200, false));
        slices.learn(&reply(None));
        assert_eq!(slices.next(Duration::MAX), slice(200, false));
        slices.learn(&reply(Some(500)));
        assert_eq!(slices.next(Duration::MAX), slice(200, true));
        slices.learn(&reply(Some(50)));
        assert_eq!(slices.next(Duration::MAX), slice(50, true));
        slices.learn(&reply(Some(100)));
        assert_eq!(slices.next(Duration::MAX), slice(50, true));
        assert_eq!(slices.next(ms(7)), slice(7, true));

        let in_test = Slices::in_transaction(Test);
        assert_eq!(in_test.next(Duration::MAX), slice(200, true));
    }

    #[test]
    fn timeouts_are_whole_milliseconds_that_postgresql_takes() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_nanos(1)), 1);
        assert_eq!(milliseconds(Duration::from_micros(300)), 1);
        assert_eq!(milliseconds(Duration::from_micros(1001)), 2);
        assert_eq!(milliseconds(Duration::from_millis(500)), 500);
        assert_eq!(milliseconds(Duration::MAX), 2_147_483_647);
    }

    #[test]
    fn only_an_error_of_the_last_hundredth_is_taken_for_the_timeout() {
        let error = |kind| DieselError::DatabaseError(kind, Box::new(String::new()));
        let slice = Duration::from_millis(200);
        for kind in [Unknown, ClosedConnection] {
            assert!(is_timeout(&error(kind), slice, slice));
            assert!(!is_timeout(&error(kind), slice.mul_f64(0.98), slice));
        }
        let other = DatabaseErrorKind::SerializationFailure;
        assert!(!is_timeout(&error(other), slice, slice));
    }

    #[test]
    fn a_release_comes_to_what_the_table_says() {
        let lock = Some(Loss::Lock);
        let commit = Some(Loss::TransactionLeftOpen);
        let moved = Some(Loss::SessionMoved);
        // before, unlocked, left open: pooled, borrowed, report
        for (before, unlocked, left_open, pooled, borrowed, loss) in [
            (Outside, WasHeld, false, Keep, Keep, None),
            (Outside, WasHeld, true, Discard, Keep, commit),
            (Outside, WasNotHeld, false, Discard, Keep, lock),
            (Outside, WasNotHeld, true, Discard, Keep, lock),
            (Open, WasHeld, true, Discard, Keep, commit),
            (Open, WasNotHeld, true, Discard, Keep, lock),
            (Test, WasHeld, false, Keep, Keep, None),
            (Test, WasNotHeld, false, Discard, Keep, lock),
            (Broken, WasHeld, false, Discard, Discard, None),
            (Broken, WasHeld, true, Discard, Discard, commit),
            (Broken, WasNotHeld, false, Discard, Discard, lock),
            (Outside, SessionMoved, false, Discard, Discard, moved),
            (Open, SessionMoved, true, Discard, Discard, moved),
            (Test, SessionMoved, false, Discard, Discard, moved),
            (Broken, SessionMoved, true, Discard, Discard, moved),
        ] {
            for (is_pooled, fate) in [(true, pooled), (false, borrowed)] {
                let release = Release {
                    before,
                    unlocked,
                    left_open,
                    is_pooled,
                    is_distrusted: false,
                };
                assert_eq!(release.verdict(), (fate, loss), "{release:?}");
                // A session that holds what no guard accounts for leaves the pool. The report is the same.
                let distrusted = Release {
                    is_distrusted: true,
                    ..release
                };
                let fate = if is_pooled { Discard } else { fate };
                assert_eq!(distrusted.verdict(), (fate, loss), "{distrusted:?}");
            }
        }
    }
}
