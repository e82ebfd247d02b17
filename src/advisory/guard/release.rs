//! How a guard unlocks, and what it does where that fails.

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::verdict::{self, Fate, Loss, Unlocked};
use super::{AdvisoryLockGuard, Hold};
use crate::advisory::lease::{Doubt, Lease, Pinned, distrusted};
use crate::advisory::query::{Release, ReleaseCarefully, get_numbered_result};
use crate::error::{Error, Result};
use crate::functions::pg_backend_pid;
use crate::session::sent as send;
use crate::transaction::{self, Transaction};

impl<C: Lease> AdvisoryLockGuard<C> {
    /// Unlocks, and settles whether the connection can be trusted.
    pub(super) fn unlock_and_check(&mut self) -> Result<()> {
        let Self { pinned, hold, .. } = self;
        let before = transaction::of(pinned.conn());
        pinned.doubt(Doubt::Releasing(hold.id, hold.mode, hold.pid));
        let (answer, _) =
            transaction::probed(pinned.conn(), |conn| send(conn, |conn| unlock(conn, hold)));
        match answer {
            Ok(unlocked) => self.conclude(before, unlocked),
            Err(source) => self.repair(before, source),
        }
    }

    fn conclude(&mut self, before: Transaction, unlocked: Unlocked) -> Result<()> {
        let pid = self.hold.pid;
        let conn = self.pinned.conn();
        // What Diesel opened within a test transaction is not marked.
        let left_open = before == Transaction::Open || transaction::is_marked(conn);
        let release = verdict::Release {
            before,
            unlocked,
            left_open,
            pooled: Pinned::<C>::POOLED,
            distrusted: Pinned::<C>::POOLED && distrusted::contains(pid),
        };
        let (fate, loss) = release.verdict();
        match fate {
            Fate::Keep => {
                if before == Transaction::None && left_open {
                    transaction::clear_mark(conn);
                }
                self.pinned.trust();
            }
            Fate::GiveUp => self.pinned.doubt(Doubt::Certain(pid)),
        }
        loss.map_or(Ok(()), |loss| Err(self.error(loss)))
    }

    fn error(&mut self, loss: Loss) -> Error {
        let key = self.key.clone();
        match loss {
            Loss::Lock => Error::LockLost { key, source: None },
            Loss::Commit => Error::TransactionLeftOpen { key },
            Loss::SessionMoved => {
                let replied_by = diesel::select(pg_backend_pid()).get_result(self.pinned.conn());
                Error::SessionMoved {
                    key,
                    taken_by: self.hold.pid,
                    replied_by: replied_by.unwrap_or_default(),
                }
            }
        }
    }

    /// After a failed unlock. A pooled connection is discarded, which costs its owner nothing. On a borrowed
    /// one the unlock is sent again, where it surely did not run: unprepared, and once more after the caller's
    /// aborted transaction was rolled back.
    fn repair(&mut self, before: Transaction, source: DieselError) -> Result<()> {
        let key = self.key.clone();
        if is_closed(&source) {
            self.pinned.doubt(Doubt::Certain(self.hold.pid));
            let source = Some(source);
            return Err(Error::LockLost { key, source });
        }
        if before == Transaction::Broken {
            self.pinned.doubt(Doubt::Certain(self.hold.pid));
        }
        // The server's report on an error that a statement met outside a transaction takes the mark back. A
        // failed PREPARE does not, nor an error inside a transaction.
        let did_not_run = before == Transaction::None && transaction::is_marked(self.pinned.conn());
        if Pinned::<C>::POOLED || !did_not_run {
            return Err(Error::ReleaseFailed { key, source });
        }
        if let Ok(unlocked) = unlock_unprepared(self.pinned.conn(), &self.hold) {
            return self.conclude(before, unlocked);
        }
        let conn = self.pinned.conn();
        let aborted = transaction::is_marked(conn);
        if !aborted || conn.batch_execute("ROLLBACK").is_err() {
            return Err(Error::ReleaseFailed { key, source });
        }
        match unlock_unprepared(conn, &self.hold) {
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

fn unlock(conn: &mut PgConnection, hold: &Hold) -> QueryResult<Unlocked> {
    if hold.idle_session_timeout.is_some() {
        return unlock_carefully(conn, hold, true);
    }
    let answer: Option<bool> = get_numbered_result!(release_of(hold), conn)?;
    Ok(answer.into())
}

fn unlock_unprepared(conn: &mut PgConnection, hold: &Hold) -> QueryResult<Unlocked> {
    unlock_carefully(conn, hold, false)
}

fn unlock_carefully(conn: &mut PgConnection, hold: &Hold, prepared: bool) -> QueryResult<Unlocked> {
    let query = ReleaseCarefully {
        release: release_of(hold),
        idle_session_timeout: hold.idle_session_timeout.as_deref(),
        prepared,
    };
    let (answer, _restored): (Option<bool>, Option<String>) = query.get_result(conn)?;
    Ok(answer.into())
}

fn release_of(hold: &Hold) -> Release<'_> {
    Release {
        id: &hold.id,
        mode: hold.mode,
        taken_by: hold.pid,
    }
}

impl From<Option<bool>> for Unlocked {
    fn from(answer: Option<bool>) -> Self {
        match answer {
            Some(true) => Self::WasHeld,
            Some(false) => Self::WasNotHeld,
            None => Self::SessionMoved,
        }
    }
}

/// Returns whether the session has ended, and the server has freed its locks. libpq notices this as a reply fails
/// to come, and from then on sends nothing any more. To be asked only about an error that [`send`] has returned,
/// because libpq also refuses to send in the middle of a `COPY`.
pub(in crate::advisory) fn is_closed(error: &DieselError) -> bool {
    use DatabaseErrorKind::{ClosedConnection, UnableToSendCommand};
    matches!(
        error,
        DieselError::DatabaseError(ClosedConnection | UnableToSendCommand, _)
    )
}
