//! How a guard unlocks, and what it does where that fails.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::{AdvisoryLockGuard, Hold};
use crate::advisory::lease::{Doubt, Lease, Pinned, distrusted};
use crate::advisory::query::{Release, ReleaseCarefully, get_numbered_result};
use crate::error::{Error, Result};
use crate::functions::pg_backend_pid;
use crate::transaction::{self, Transaction};

/// What the server said to an unlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unlocked {
    WasHeld,
    WasNotHeld,
    /// Another session answered, and nothing was unlocked.
    SessionMoved,
}

impl<C: Lease> AdvisoryLockGuard<C> {
    /// Unlocks, and settles whether the connection can be trusted.
    pub(super) fn unlock_and_check(&mut self) -> Result<()> {
        let Hold { id, mode, pid, .. } = self.hold;
        let conn = self.pinned.conn();
        let before = transaction::of(conn);
        if before == Transaction::None {
            // Unless the server reports that no transaction is open, this mark stays.
            transaction::mark_broken(conn);
        }
        self.pinned.doubt(Doubt::Releasing(id, mode, pid));

        let released = match self.unlock(true) {
            Ok(released) => released,
            Err(source) => return self.repair(before, source),
        };
        if released == Unlocked::SessionMoved {
            self.pinned.doubt(Doubt::Certain);
            let answered_by = diesel::select(pg_backend_pid()).get_result(self.pinned.conn());
            let answered_by = answered_by.unwrap_or_default();
            return Err(Error::SessionMoved {
                key: self.key.clone(),
                taken_by: pid,
                answered_by,
            });
        }
        let was_held = released == Unlocked::WasHeld;
        let conn = self.pinned.conn();
        let left_open = match before {
            Transaction::Open => true,
            Transaction::None | Transaction::Broken => transaction::is_marked(conn),
            Transaction::Test => false,
        };

        if before == Transaction::Broken {
            // Somebody had marked the connection, and the unlock may have taken the mark back.
            self.pinned.doubt(Doubt::Certain);
        } else if !Pinned::<C>::POOLED {
            if left_open && before == Transaction::None {
                transaction::clear_mark(conn);
            }
            self.pinned.trust();
        } else if was_held && !left_open && !distrusted::contains(pid) {
            self.pinned.trust();
        }

        match (was_held, left_open) {
            (false, _) => Err(Error::LockLost {
                key: self.key.clone(),
                source: None,
            }),
            (true, true) => Err(Error::TransactionLeftOpen {
                key: self.key.clone(),
            }),
            (true, false) => Ok(()),
        }
    }

    fn unlock(&mut self, prepared: bool) -> QueryResult<Unlocked> {
        let release = Release {
            id: &self.hold.id,
            mode: self.hold.mode,
            taken_by: self.hold.pid,
        };
        let idle_session_timeout = self.hold.idle_session_timeout.as_deref();
        let answer: Option<bool> = if prepared && idle_session_timeout.is_none() {
            get_numbered_result!(release, self.pinned.conn())?
        } else {
            let query = ReleaseCarefully {
                release,
                idle_session_timeout,
                prepared,
            };
            let (answer, _restored): (_, Option<String>) = query.get_result(self.pinned.conn())?;
            answer
        };
        Ok(match answer {
            Some(true) => Unlocked::WasHeld,
            Some(false) => Unlocked::WasNotHeld,
            None => Unlocked::SessionMoved,
        })
    }

    /// After a failed unlock: ends the aborted transaction that a borrowed connection is in, where
    /// the unlock surely did not run, and unlocks again. A pooled connection is discarded instead,
    /// which costs its owner nothing.
    fn repair(&mut self, before: Transaction, source: DieselError) -> Result<()> {
        let key = self.key.clone();
        if is_closed(&source) {
            self.pinned.doubt(Doubt::Certain);
            let source = Some(source);
            return Err(Error::LockLost { key, source });
        }
        let conn = self.pinned.conn();
        let aborted = before == Transaction::None && transaction::is_marked(conn);
        if Pinned::<C>::POOLED || !aborted || conn.batch_execute("ROLLBACK").is_err() {
            return Err(Error::ReleaseFailed { key, source });
        }
        match self.unlock(false) {
            Ok(Unlocked::WasHeld) => {
                self.pinned.trust();
                Err(Error::TransactionLeftOpen { key })
            }
            Ok(Unlocked::WasNotHeld) => {
                self.pinned.trust();
                Err(Error::LockLost { key, source: None })
            }
            Ok(Unlocked::SessionMoved) | Err(_) => Err(Error::ReleaseFailed { key, source }),
        }
    }
}

/// The session has ended, and the server has freed its locks. libpq notices it as an answer fails
/// to come, and from then on sends nothing any more.
pub(super) fn is_closed(error: &DieselError) -> bool {
    use DatabaseErrorKind::{ClosedConnection, UnableToSendCommand};
    matches!(
        error,
        DieselError::DatabaseError(ClosedConnection | UnableToSendCommand, _)
    )
}
