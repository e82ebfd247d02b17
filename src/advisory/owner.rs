//! What a drop does about the locks of a session, which depends on who owns the connection.
//!
//! **Discard a connection instead of repairing it.** To repair a connection, the crate would have
//! to know the state of its session, and that is what it does not know. Ending the session
//! certainly frees its locks, and the pool replaces the connection. The crate cannot discard a
//! connection of the caller, so where the state of that session is uncertain, the crate ends the
//! session by a statement. Only a session whose pid is known is ended in this way, because a pooler
//! may run the statement on somebody else's.

use std::time::Instant;

use super::holder::{Held, Holder, Holds};
use super::sql;
use crate::error::{Error, Result};
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Checkout, ConnectionOf, Pool, is_usable};
use crate::session::{Session, poll_once_quietly};
use crate::unfinished::note_closed;

/// The owner of a connection, a pool or the caller, which decides what a drop does.
pub(crate) trait Owner: Send + Sized {
    type Session: Session;

    fn session(&mut self) -> &mut Self::Session;

    /// What becomes of a session that holds nothing and has forgotten the statements that Diesel
    /// counts on.
    fn without_statements(pid: i32) -> Holds;

    /// Releases what the session may hold, on behalf of a drop.
    fn leave(self, held: Held);
}

/// A connection from a pool, which is returned only if its session surely holds nothing.
impl<P: Pool> Owner for Checkout<P> {
    type Session = ConnectionOf<P>;

    fn session(&mut self) -> &mut Self::Session {
        self.conn()
    }

    fn without_statements(pid: i32) -> Holds {
        Holds::Doomed(Some(pid))
    }

    fn leave(mut self, mut held: Held) {
        match held.holds {
            Holds::Nothing => self.give_back(),
            holds @ (Holds::Unsure(_) | Holds::Held(_)) => {
                // With this note, the drop of the new holder discards the connection, unless
                // `finish` has released the locks by then.
                held.holds = holds.doomed();
                held.wakes_others();
                let runtime = self.runtime();
                let mut holder = Holder::of(self, held);
                P::Mode::finish_later(&runtime, async move { holder.finish(holds).await });
            }
            Holds::Doomed(pid) => {
                match pid {
                    Some(pid) => self.discard_by(&sql::end_session(pid)),
                    None => self.mark(),
                }
                note_closed();
            }
        }
    }
}

impl<P: Pool> Holder<Checkout<P>> {
    /// Releases the locks after the work, before it returns, so that a try right after it finds
    /// them free. After a success it returns the errors of the release; after a failure it releases
    /// as a drop does.
    pub(super) async fn release_after<T, E: From<Error>>(
        mut self,
        outcome: Result<T, E>,
    ) -> Result<T, E> {
        if outcome.is_ok() {
            self.release_and_report("release").await?;
        } else {
            let holds = self.held().holds;
            self.held().holds = holds.doomed();
            self.finish(holds).await;
        }
        outcome
    }

    /// Releases what a failed work, a dropped guard or a dropped try holds, after whatever still
    /// runs on its connection, and ends a transaction that plain SQL has left open. Without a reply
    /// in time, the connection is closed: the server then ends what runs, and frees what is held.
    async fn finish(&mut self, holds: Holds) {
        let (began, deadline) = (Instant::now(), Some(Instant::now() + PATIENCE));
        let since = self.held().take_since();
        // Until the release begins, the connection is to be discarded: a runtime without timers
        // panics before that, and the unwinding must not come here again.
        let release = async {
            self.conn().end_unseen_transaction();
            if let Holds::Held(_) = holds {
                // `release` needs the state before the drop, and notes the worst case itself.
                self.held().holds = holds;
                self.release().await
            } else {
                self.undo(holds).await;
                if self.held().holds == Holds::Nothing {
                    self.held().holds = Holds::Doomed(None);
                    if is_usable(self.conn()).await {
                        self.held().holds = Holds::Nothing;
                    }
                }
                Ok(())
            }
        };
        let released = P::Mode::within(deadline, release).await;
        if released.is_none() && holds == Holds::Unsure(None) {
            // A pool whose manager does not notice the mark keeps the session, so what the try gets
            // later is given back by a message behind it.
            let undo = self.held().locks.late_undo();
            let _ = poll_once_quietly(self.conn().batch(&undo));
        }
        self.held().holds = self.held().holds.doomed();
        let released = released.unwrap_or(Err(Error::TimedOut));
        self.held().report_end("drop", began, since, &released);
    }
}

/// A connection of the caller, which the crate cannot discard. So if the release is not certain,
/// the session is ended by a statement.
impl<S: Session> Owner for &mut S {
    type Session = S;

    fn session(&mut self) -> &mut S {
        self
    }

    fn without_statements(_: i32) -> Holds {
        Holds::Doomed(None)
    }

    /// One poll is enough: a blocking session replies at once, and an asynchronous session queues
    /// the message behind those that were sent before.
    fn leave(self, mut held: Held) {
        let began = Instant::now();
        let (release, pid) = match held.holds {
            Holds::Nothing | Holds::Doomed(None) => return,
            Holds::Held(pid) => (Some(held.locks.late_release(pid)), pid),
            Holds::Unsure(pid) => (Some(held.locks.late_undo()), pid.unwrap_or(0)),
            Holds::Doomed(Some(pid)) => (None, pid),
        };
        let release = release.filter(|_| self.transaction().is_none());
        self.end_unseen_transaction();
        let released = match release.map(|release| poll_once_quietly(self.batch(&release))) {
            Some(Ok(None | Some(Ok(())))) => Ok(()),
            Some(Ok(Some(Err(error)))) => Err(error.into()),
            // The connection's instrumentation has panicked.
            Some(Err(_)) => Err(Error::TimedOut),
            None => Err(Error::TransactionLeftOpen(held.locks.to_string())),
        };
        if released.is_err() {
            let _ = poll_once_quietly(self.batch(&sql::end_session(pid)));
            self.mark_broken();
            note_closed();
        }
        let since = held.take_since();
        held.report_end("drop", began, since, &released);
    }
}
