//! The connection that a lock is pinned to, and the one place where such a connection is discarded.

use std::marker::PhantomData;
use std::pin::pin;
use std::time::{Duration, Instant};

use diesel::result::QueryResult;

use super::all::{Busy, Locks};
use super::sql;
use crate::call::explained;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::metrics::Raised;
use crate::mode::Mode;
use crate::pool::{Connection, Pool, PoolConnection};
use crate::session::{Session, Transaction, has_ended};
use crate::transaction::refusal;
use crate::waiting::{self, Topic, Turns, What};

/// For how long a release that a drop has sent may have no reply, before the statement of the caller's in front of it is
/// cancelled. It doubles up to the longest, after which the connection is discarded.
const FIRST_CANCEL: Duration = Duration::from_millis(50);
const LAST_CANCEL: Duration = Duration::from_secs(2);

/// A connection out of a pool, and what its session may hold. Its drop gives it back only if it holds nothing.
pub(crate) struct Pinned<P: Pool> {
    /// `None` once the drop has it.
    conn: Option<P::Pinned>,
    holds: Holds,
    runtime: <P::Mode as Mode>::Runtime,
    /// Whose events they are, and since when the lock is held.
    told_as: Option<(Subject, Instant)>,
    held: Option<Raised>,
    /// Dropped last, when the connection is back in its pool.
    released: Option<Released<P>>,
}

/// It says the worst before a statement is sent, and better only after its reply.
#[derive(Debug)]
enum Holds {
    Nothing,
    /// A try was sent whose reply was not read.
    Tried(Locks),
    /// The locks that the session with this pid took.
    Locks(Locks, i32),
    Unknown,
}

/// Wakes a waiter of this process for each lock when it is dropped.
struct Released<P: Pool>(Locks, PhantomData<fn(&P)>);

impl<P: Pool> Drop for Released<P> {
    fn drop(&mut self) {
        for id in self.0.ids() {
            waiting::released(&Topic::of::<P>(What::Lock(id)));
        }
    }
}

impl<P: Pool> Pinned<P> {
    pub(crate) async fn check_out(pool: &P, deadline: Option<Instant>) -> Result<Self> {
        let runtime = P::Mode::runtime()?;
        let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        Ok(Self {
            conn: Some(pool.check_out(rest).await?),
            holds: Holds::Nothing,
            runtime,
            told_as: None,
            held: None,
            released: None,
        })
    }

    pub(crate) fn conn(&mut self) -> &mut Connection<P> {
        self.conn
            .as_mut()
            .unwrap_or_else(|| unreachable!("only the drop takes it"))
    }

    /// The lock is held from now on. A drop tells its end.
    pub(super) fn is_held_by(&mut self, subject: Subject, since: Instant) {
        self.told_as = Some((subject, since));
        self.held = Some(Raised::held(subject));
    }

    /// A drop tells nothing from now on.
    pub(super) fn tells_nothing(&mut self) {
        self.told_as = None;
    }

    /// Takes the locks if all are free. Returns the pid of the session that holds them now.
    pub(crate) async fn take(&mut self, locks: &Locks) -> Result<Result<i32, Busy>> {
        let before = self.conn().transaction();
        if !before.is_none() {
            self.holds = Holds::Unknown;
            return Err(refusal(before));
        }
        self.holds = Holds::Tried(locks.clone());
        let (reply, is_open) = self.conn().probe(locks.take()).await;
        self.holds = match reply {
            // A standby has taken nothing.
            Ok((Some(0),)) if !is_open => Holds::Nothing,
            _ => Holds::Unknown,
        };
        let taken = taken(reply, is_open)?;
        self.hold(locks, taken);
        Ok(taken)
    }

    /// Waits on the server for the lock that was busy, and takes the others if they are free.
    pub(super) async fn wait(
        &mut self,
        locks: &Locks,
        busy: Busy,
        limit: Duration,
        turns: &mut Turns,
    ) -> Result<Result<i32, Busy>> {
        self.holds = Holds::Unknown;
        let taken = waited(self.conn(), locks, busy, limit, turns).await?;
        self.hold(locks, taken);
        Ok(taken)
    }

    fn hold(&mut self, locks: &Locks, taken: Result<i32, Busy>) {
        self.holds = taken.map_or(Holds::Nothing, |pid| Holds::Locks(locks.clone(), pid));
        self.released = taken.ok().map(|_| Released(locks.clone(), PhantomData));
    }

    /// Releases the locks. Unless the server confirms it, the drop then discards the connection.
    pub(crate) async fn release(&mut self, locks: &Locks, pid: i32) -> Result<()> {
        let before = self.conn().transaction();
        let (reply, is_open) = self.conn().probe(locks.release(pid)).await;
        self.holds = Holds::Unknown;
        let reply: QueryResult<(Option<i32>,)> = reply;
        if matches!(reply, Ok((Some(_),))) {
            if is_open || before == Transaction::Open {
                return Err(Error::TransactionLeftOpen(locks.to_string()));
            }
            if before.is_none() {
                self.holds = Holds::Nothing;
            }
        }
        released(self.conn(), reply, locks, pid).await
    }

    /// Releases the locks that a try may have taken.
    async fn undo(&mut self, locks: &Locks) {
        let reply: QueryResult<(Option<i32>,)> = self.conn().one(locks.undo()).await;
        if reply.is_ok() && self.conn().transaction().is_none() {
            self.holds = Holds::Nothing;
        }
    }

    /// Whether the session has ended, after this error of it.
    pub(super) async fn has_ended(&mut self, error: &Error) -> bool {
        match error {
            Error::Database(error) => has_ended(self.conn(), error).await,
            _ => false,
        }
    }

    /// Whether the session still holds the locks.
    pub(super) async fn is_held(&mut self, locks: &Locks, pid: i32) -> Result<bool> {
        let reply: QueryResult<(Option<i32>,)> = self.conn().one(locks.is_held()).await;
        match reply {
            Ok((holder,)) => Ok(holder == Some(pid)),
            Err(error) if has_ended(self.conn(), &error).await => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) async fn fencing_token(&mut self, locks: &Locks, pid: i32) -> Result<i64> {
        let reply: QueryResult<(Option<i64>,)> = self.conn().one(sql::token(pid)).await;
        match reply {
            Ok((Some(token),)) => Ok(token),
            Ok((None,)) => Err(Error::SessionMoved {
                key: locks.to_string(),
                pid,
                is_freed: false,
            }),
            Err(error) if has_ended(self.conn(), &error).await => {
                Err(Error::LockLost(locks.to_string()))
            }
            Err(error) => Err(explained(self.conn(), error).await),
        }
    }
}

impl<P: Pool> Drop for Pinned<P> {
    fn drop(&mut self) {
        let Some(conn) = self.conn.take() else { return };
        match std::mem::replace(&mut self.holds, Holds::Nothing) {
            Holds::Nothing => P::Mode::inside(&self.runtime, || drop(conn)),
            Holds::Unknown => P::Mode::inside(&self.runtime, || conn.discard()),
            holds @ (Holds::Locks(..) | Holds::Tried(_)) => {
                let pinned = Self {
                    conn: Some(conn),
                    holds: Holds::Unknown,
                    runtime: self.runtime.clone(),
                    told_as: self.told_as.take(),
                    held: self.held.take(),
                    released: self.released.take(),
                };
                P::Mode::leave(&self.runtime, finish(pinned, holds));
            }
        }
    }
}

/// Releases what a dropped guard or try has held. A statement of the caller's that still runs in front is cancelled.
async fn finish<P: Pool>(mut pinned: Pinned<P>, holds: Holds) {
    let (token, told_as) = (P::Mode::token(pinned.conn()), pinned.told_as.take());
    let (began, mut is_cancelled) = (Instant::now(), false);
    {
        let mut release = pin!(release_held(&mut pinned, holds, told_as));
        let mut patience = FIRST_CANCEL;
        while P::Mode::within(Some(Instant::now() + patience), release.as_mut())
            .await
            .is_none()
        {
            if patience >= LAST_CANCEL {
                if let Some((subject, since)) = told_as {
                    subject.ended("drop", began, since, &Err(Error::TimedOut));
                }
                break;
            }
            is_cancelled = true;
            P::Mode::cancel(&token).await;
            patience *= 2;
        }
    }
    if is_cancelled {
        // A cancellation arrives when it does, and may hit the statement of the next user.
        pinned.holds = Holds::Unknown;
    }
}

async fn release_held<P: Pool>(
    pinned: &mut Pinned<P>,
    holds: Holds,
    told_as: Option<(Subject, Instant)>,
) {
    match holds {
        Holds::Locks(locks, pid) => {
            let began = Instant::now();
            let released = pinned.release(&locks, pid).await;
            if let Some((subject, since)) = told_as {
                subject.ended("drop", began, since, &released);
            }
        }
        Holds::Tried(locks) => pinned.undo(&locks).await,
        Holds::Nothing | Holds::Unknown => {}
    }
}

/// Reads the reply to [`Locks::take`].
pub(super) fn taken(
    reply: QueryResult<(Option<i32>,)>,
    is_open: bool,
) -> Result<Result<i32, Busy>> {
    let (reply,) = reply?;
    if is_open {
        return Err(Error::InsideTransaction);
    }
    Busy::read(reply)
}

/// Waits for the lock that was busy, and takes the others. Returns the pid of the session that holds them all now.
pub(super) async fn waited<S: Session>(
    session: &mut S,
    locks: &Locks,
    busy: Busy,
    limit: Duration,
    turns: &mut Turns,
) -> Result<Result<i32, Busy>> {
    let lock = locks.get(busy);
    let number = fastrand::i32(1..);
    let ask = match session.batch(&lock.wait(limit, number)).await {
        Ok(()) => {
            turns.has_waited();
            sql::waited(number)
        }
        // The session's own `statement_timeout` was shorter, or the role may not use plpgsql. So it pauses.
        Err(_) => lock.is_held(),
    };
    let granted: (Option<i32>,) = session.one(ask).await?;
    match granted {
        (Some(_),) if locks.len() > 1 => {
            let others = session.one(locks.take_others(busy)).await;
            Ok(taken(others, false)?.map_err(|other| other.beside(busy)))
        }
        (pid,) => Ok(pid.ok_or(busy)),
    }
}

/// Reads the reply to [`Locks::release`]. If another session has replied, ends the one that took the lock, unless it is in use.
pub(super) async fn released<S: Session>(
    session: &mut S,
    reply: QueryResult<(Option<i32>,)>,
    locks: &Locks,
    pid: i32,
) -> Result<()> {
    match reply {
        Ok((Some(1),)) => Ok(()),
        Ok((Some(place),)) => Err(Error::LockLost(locks.lost(place))),
        Ok((None,)) => {
            let ended: QueryResult<bool> = session.one(locks.end_other(pid)).await;
            let (key, is_freed) = (locks.to_string(), ended.unwrap_or(false));
            Err(Error::SessionMoved { key, pid, is_freed })
        }
        Err(error) if has_ended(session, &error).await => Err(Error::LockLost(locks.to_string())),
        Err(source) => Err(Error::ReleaseFailed {
            key: locks.to_string(),
            source,
        }),
    }
}
