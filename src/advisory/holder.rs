//! The holder of locks: a connection, and what its session may hold. What a drop does about that is
//! in `owner.rs`.

use std::time::{Duration, Instant};

use diesel::deserialize::FromSqlRow;
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::result::QueryResult;

use super::all::{Busy, Locks};
use super::owner::Owner;
use super::sql::{self, Released, Tried};
use super::sql_several::Drawn;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::long_wait::{self, Awaited, HeldHere};
use crate::metrics::Raised;
use crate::session::{Session, Transaction, classify, explain, has_ended};
use crate::statement::Statement;
use crate::transaction::refusal;
use crate::waiting::{self, Turns, What};

/// A connection, and the locks that its session may hold. Its drop releases the locks, in the way
/// of the connection's [`Owner`].
pub(crate) struct Holder<C: Owner>(
    /// `None` once the drop has taken it.
    Option<(C, Held)>,
);

/// What a session may hold.
pub(crate) struct Held {
    pub(super) locks: Locks,
    pub(super) holds: Holds,
    pub(super) subject: Subject,
    /// When the locks were taken, or `None` if their end must not be reported.
    since: Option<Instant>,
    gauge: Option<Raised>,
    here: Vec<HeldHere>,
    /// Dropped last: then the connection is back in its pool, and a waiter that is woken finds it
    /// there.
    released: Option<WakesWaiters>,
}

/// What a session holds, for all that is known. The worst case is noted before a statement is sent,
/// and corrected only after its reply, so a future that is dropped in between leaves the worst
/// case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    Nothing,
    /// A try, a wait or, on the session with this pid, a release was sent, and its reply was not
    /// read.
    Unsure(Option<i32>),
    /// All locks are held, by the session with this pid.
    Held(i32),
    /// No statement can do anything more, so the session must end: the one with this pid, or none
    /// that the crate may end, because another session replied to the release, or a drop has
    /// already tried.
    Doomed(Option<i32>),
}

impl Holds {
    /// The same session, with which no statement can do anything more.
    pub(super) const fn doomed(self) -> Self {
        match self {
            Self::Unsure(pid) => Self::Doomed(pid),
            Self::Held(pid) => Self::Doomed(Some(pid)),
            Self::Nothing | Self::Doomed(_) => self,
        }
    }
}

/// Wakes a waiter of this process for each lock when it is dropped.
struct WakesWaiters(Locks);

impl Drop for WakesWaiters {
    fn drop(&mut self) {
        for id in self.0.ids() {
            waiting::wake_oldest(&What::Lock(id));
        }
    }
}

impl<C: Owner> Holder<C> {
    pub(crate) const fn new(owner: C, locks: Locks, subject: Subject) -> Self {
        Self::of(
            owner,
            Held {
                locks,
                holds: Holds::Nothing,
                subject,
                since: None,
                gauge: None,
                here: Vec::new(),
                released: None,
            },
        )
    }

    pub(crate) const fn of(owner: C, held: Held) -> Self {
        Self(Some((owner, held)))
    }

    /// Takes the holder apart without a release. [`of`](Self::of) puts it together again.
    #[cfg(all(feature = "async", feature = "migrations"))]
    pub(crate) fn open(mut self) -> (C, Held) {
        self.0.take().unwrap_or_else(|| only_the_drop())
    }

    fn parts(&mut self) -> &mut (C, Held) {
        self.0.as_mut().unwrap_or_else(|| only_the_drop())
    }

    pub(crate) fn conn(&mut self) -> &mut C::Session {
        self.parts().0.session()
    }

    pub(super) fn held(&mut self) -> &mut Held {
        &mut self.parts().1
    }

    pub(super) fn held_ref(&self) -> &Held {
        &self.0.as_ref().unwrap_or_else(|| only_the_drop()).1
    }

    fn locks(&mut self) -> Locks {
        self.held().locks.clone()
    }

    /// Tries once. If refused, waits on the server for a slice, if this is the oldest waiter and
    /// `may_wait` allows it. Returns whether the locks are held then.
    pub(super) async fn attempt(
        &mut self,
        turns: Option<&mut Turns>,
        may_wait: impl FnOnce() -> bool + Send,
    ) -> Result<bool> {
        match self.attempt_unclassified(turns, may_wait).await {
            Err(Error::Database(error)) => {
                let error = classify(self.conn(), error).await;
                // What the failed statement may have taken is free when this returns.
                let holds = self.held().holds;
                if !error.is_unavailable() && matches!(holds, Holds::Unsure(_)) {
                    self.undo(holds).await;
                }
                Err(error)
            }
            attempted => attempted,
        }
    }

    async fn attempt_unclassified(
        &mut self,
        turns: Option<&mut Turns>,
        may_wait: impl FnOnce() -> bool + Send,
    ) -> Result<bool> {
        let (taken, sent) = self.take(turns.is_some()).await?;
        let (busy, turns) = match (taken, turns) {
            (Ok(_), _) => return Ok(true),
            (Err(_), None) => return Ok(false),
            (Err(busy), Some(turns)) => (busy, turns),
        };
        let id = self.held().locks.get(busy).id;
        turns.note_refusal(What::Lock(id), busy.database, sent);
        if let Some(waited) = turns.note_long_wait() {
            self.warn_of_wait(busy, waited).await;
        }
        let Some(slice) = turns.slice().filter(|_| may_wait()) else {
            return Ok(false);
        };
        self.wait(busy, slice, turns).await
    }

    /// Warns that a lock was busy for long, and says which session holds it.
    async fn warn_of_wait(&mut self, busy: Busy, waited: Duration) {
        if cfg!(not(feature = "tracing")) {
            return;
        }
        let (lock, subject) = (self.locks().only(busy), self.held().subject);
        // So that a drop waits for the reply.
        self.held().holds = Holds::Unsure(None);
        let holder: QueryResult<(Option<i32>,)> = self.conn().one(&lock.holder()).await;
        self.held().holds = Holds::Nothing;
        let holder = holder.ok().and_then(|(pid,)| pid);
        long_wait::warn(subject, &Awaited::Lock(lock.first().id, holder), waited);
    }

    /// Takes the locks if all are free. Also returns when the statement was sent.
    async fn take(&mut self, is_wait: bool) -> Result<(Result<i32, Busy>, Instant)> {
        let before = self.conn().transaction();
        if !before.is_none() {
            return Err(refusal(before));
        }
        self.held().holds = Holds::Unsure(None);
        let (locks, sent) = (self.locks(), Instant::now());
        let (reply, is_open) = self.conn().probe(&locks.take(is_wait)).await;
        let tried: Tried = reply?;
        if is_open {
            // Gives back what was taken. The transaction itself is the caller's, or ends when the
            // pool's connection is discarded.
            if self.conn().batch(&locks.late_undo()).await.is_ok() {
                self.held().holds = Holds::Nothing;
            }
            return Err(Error::InsideTransaction);
        }
        // An error of `Busy::read` is a refusal by the server, so nothing was taken.
        self.held().holds = Holds::Nothing;
        let taken = Busy::read(&tried).inspect_err(|error| {
            if matches!(error, Error::Standby) {
                // So that its pool closes the connection, even if it is the caller who took it from
                // the pool.
                self.conn().mark_broken();
            }
        })?;
        self.held().take(taken.ok());
        Ok((taken, sent))
    }

    /// Waits on the server for the lock that was busy, and takes the others if they are free.
    /// Returns whether all are held then.
    async fn wait(&mut self, busy: Busy, limit: Duration, turns: &mut Turns) -> Result<bool> {
        let locks = self.locks();
        self.held().holds = Holds::Unsure(None);
        let granted: Option<i32> = match self.conn().batch(&locks.get(busy).wait(limit)).await {
            Ok(()) => {
                turns.note_wait();
                let (granted, _): (_, String) = self.conn().one(&sql::read_wait()).await?;
                granted
            }
            // The session's `statement_timeout` was shorter than the slice, or the role may not use
            // plpgsql. So `pg_locks` is asked instead of the note, and a pause comes before the
            // next try.
            Err(_) => {
                let (holder,) = self.conn().one(&locks.only(busy).is_held()).await?;
                holder
            }
        };
        let taken = match granted {
            Some(_) if locks.len() > 1 => {
                let others = self.conn().one(&locks.take_others(busy)).await?;
                Busy::read(&others)?.ok()
            }
            pid => pid,
        };
        self.held().take(taken);
        Ok(taken.is_some())
    }

    /// Releases the locks. Unless the server confirms the release, the drop ends the session.
    pub(super) async fn release(&mut self) -> Result<()> {
        let Holds::Held(pid) = self.held().holds else {
            return Ok(());
        };
        let locks = self.locks();
        let before = self.conn().transaction();
        self.held().holds = Holds::Unsure(Some(pid));
        let (reply, is_open) = self.conn().probe(&locks.release(pid)).await;
        let all_held = |released: &Released| match released.were_held {
            Some(true) => Ok(()),
            _ => Err(Error::LockLost(locks.name_lost(released))),
        };
        match reply {
            Ok(Released {
                were_held: None, ..
            }) => {
                self.held().holds = Holds::Doomed(None);
                Err(Error::SessionMoved {
                    key: locks.to_string(),
                    pid,
                })
            }
            Ok(_) if is_open || before == Transaction::Open => {
                self.held().holds = Holds::Doomed(Some(pid));
                Err(Error::TransactionLeftOpen(locks.to_string()))
            }
            Ok(released) => {
                if before.is_none() {
                    self.held().holds = Holds::Nothing;
                }
                all_held(&released)
            }
            Err(source) => {
                self.held().holds = Holds::Doomed(Some(pid));
                if has_ended(self.conn(), &source).await {
                    return Err(Error::LockLost(locks.to_string()));
                }
                let anew: QueryResult<Released> = self.conn().one(&locks.release(pid).anew()).await;
                // `DISCARD ALL` or `DEALLOCATE ALL` may have dropped what Diesel has prepared.
                match anew {
                    Ok(released) if released.were_held.is_some() => {
                        self.held().holds = C::without_statements(pid);
                        all_held(&released)
                    }
                    _ => Err(Error::ReleaseFailed {
                        key: locks.to_string(),
                        source,
                    }),
                }
            }
        }
    }

    /// Sends a statement. If it fails and the session is still there, sends it once more, to be
    /// prepared anew: `DISCARD ALL` and `DEALLOCATE ALL` drop what Diesel believes to be prepared.
    async fn ask<T, U>(&mut self, statement: Statement<T>) -> QueryResult<U>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send,
    {
        let failed = match self.conn().one(&statement).await {
            Err(error) if !has_ended(self.conn(), &error).await => error,
            reply => return reply,
        };
        self.conn().one(&statement.anew()).await.map_err(|_| failed)
    }

    /// Releases what a try may have taken, or a release may have left.
    pub(super) async fn undo(&mut self, dropped: Holds) {
        let locks = self.locks();
        if let Holds::Unsure(Some(_)) = dropped {
            // A future that is dropped in the middle of its prepare leaves a statement to the
            // session, and so would each later release. So the release is prepared to its end here;
            // as no session has the pid 0, it releases nothing.
            let _: QueryResult<Released> = self.conn().one(&locks.release(0)).await;
        }
        let reply: QueryResult<(Option<i32>,)> = self.conn().one(&locks.undo()).await;
        if reply.is_ok() && self.conn().transaction().is_none() {
            self.held().holds = Holds::Nothing;
        }
    }

    /// Notes that the locks are held from now on, so that the drop reports their end.
    pub(super) fn begin_holding(&mut self) {
        let held = self.held();
        held.since = Some(Instant::now());
        held.gauge = Some(Raised::held(held.subject));
        if let Holds::Held(pid) = held.holds {
            held.here = held.locks.held_here(Some(pid));
        }
    }

    /// Releases the locks, and reports their end.
    pub(super) async fn release_and_report(&mut self, operation: &'static str) -> Result<()> {
        let began = Instant::now();
        // Taken first: if this future is dropped, the lock may be unlocked already, so a report by
        // the drop could be wrong.
        let since = self.held().since.take();
        let released = self.release().await;
        self.held().report_end(operation, began, since, &released);
        released
    }

    /// The `pg_backend_pid()` of the session that holds the locks.
    pub(super) fn pid(&self) -> i32 {
        match self.held_ref().holds {
            Holds::Held(pid) => pid,
            _ => 0,
        }
    }

    /// Whether the session still holds the locks.
    pub(super) async fn is_held(&mut self) -> Result<bool> {
        let (locks, pid) = (self.locks(), self.pid());
        let reply: QueryResult<(Option<i32>,)> = self.ask(locks.is_held()).await;
        match reply {
            Ok((holder,)) => Ok(holder == Some(pid)),
            Err(error) if has_ended(self.conn(), &error).await => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn fencing_token(&mut self) -> Result<i64> {
        let (locks, pid) = (self.locks(), self.pid());
        let reply: QueryResult<Drawn> = self.ask(locks.token(pid)).await;
        match reply {
            Ok(Drawn {
                token: Some(token), ..
            }) => Ok(token),
            Ok(drawn) if drawn.pid != pid => Err(Error::SessionMoved {
                key: locks.to_string(),
                pid,
            }),
            Ok(_) => Err(Error::LockLost(locks.to_string())),
            Err(error) if has_ended(self.conn(), &error).await => {
                Err(Error::LockLost(locks.to_string()))
            }
            Err(error) => {
                let error = explain(self.conn(), error).await;
                if matches!(error, Error::Standby) {
                    // `explain` has marked the connection as broken, and the reply to a release
                    // would clear the mark. So no release is sent: the end of the session frees the
                    // lock.
                    self.held().holds = Holds::Doomed(Some(pid));
                }
                Err(error)
            }
        }
    }
}

fn only_the_drop() -> ! {
    unreachable!("only the drop takes it")
}

impl Held {
    fn take(&mut self, pid: Option<i32>) {
        self.holds = pid.map_or(Holds::Nothing, Holds::Held);
        self.released = pid.map(|_| WakesWaiters(self.locks.clone()));
    }

    /// The drop wakes others, too, who may have been refused because of a try.
    pub(super) fn wakes_others(&mut self) {
        let released = || WakesWaiters(self.locks.clone());
        self.released.get_or_insert_with(released);
    }

    /// When the locks were taken, if their end is still to be reported.
    pub(super) const fn take_since(&mut self) -> Option<Instant> {
        self.since.take()
    }

    pub(super) fn report_end(
        &self,
        operation: &'static str,
        began: Instant,
        since: Option<Instant>,
        end: &Result<()>,
    ) {
        if let Some(since) = since {
            self.subject.end(operation, began, since, end);
        }
    }
}

impl<C: Owner> Drop for Holder<C> {
    fn drop(&mut self) {
        if let Some((owner, held)) = self.0.take() {
            owner.leave(held);
        }
    }
}
