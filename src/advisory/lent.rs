//! Session locks in a scope, on a connection that the caller lends.

use std::time::{Duration, Instant};

use diesel::result::QueryResult;

use super::AdvisoryLock;
use super::all::Locks;
use super::attempt::Attempt;
use super::pinned::{released, taken, waited};
use super::sql::END_SESSION;
use crate::error::{Error, Result};
use crate::event::{Outcome, Subject};
use crate::metrics::Raised;
#[cfg(feature = "async")]
use crate::mode::Async;
#[cfg(feature = "r2d2")]
use crate::mode::Blocking;
use crate::mode::Mode;
#[cfg(feature = "r2d2")]
use crate::pool::PgPool;
#[cfg(feature = "async")]
use crate::pool::Pool;
#[cfg(feature = "r2d2")]
use crate::session::now;
use crate::session::{Session, Transaction, started_quietly};
use crate::transaction::refusal;
use crate::waiting::{self, Topic, Turns, What};

/// After what time a wait is told, with the session that it waits for.
const LONG: Duration = Duration::from_secs(5);

#[cfg(feature = "r2d2")]
impl AdvisoryLock<PgPool> {
    /// Takes the session lock on a lent connection, [waits](Self#waiting) for as long as others hold it, runs `work`, and
    /// releases it.
    ///
    /// Two round trips beside those of `work` if it is free. For a connection that is not out of a pool. A lock that cannot be
    /// released ends the session. Fails as [`release`](super::AdvisoryLockGuard::release) does, too.
    pub fn with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut scope = now(Scope::enter::<Blocking>(
            conn,
            self.locks()?,
            self.subject(),
            true,
        ))?;
        let outcome = work(scope.conn);
        now(scope.leave(outcome))
    }

    /// As [`with_on`](Self::with_on), unless the lock is held by another session. Never waits for it.
    pub fn try_with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        let mut scope = now(Scope::enter::<Blocking>(
            conn,
            self.locks()?,
            self.subject(),
            false,
        ))?;
        if !scope.is_entered() {
            return Ok(Attempt::Busy);
        }
        let outcome = work(scope.conn);
        now(scope.leave(outcome)).map(Attempt::Acquired)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = Async>> AdvisoryLock<P> {
    /// Takes the session lock on a lent connection, [waits](Self#waiting) for as long as others hold it, runs `work`, and
    /// releases it.
    ///
    /// Two round trips beside those of `work` if it is free. For a connection that is not out of a pool. A lock that cannot be
    /// released ends the session. Fails as [`release`](super::AdvisoryLockGuard::release) does, too. If the future is dropped, the
    /// unlock is queued behind what was sent.
    pub async fn with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut scope = Scope::enter::<Async>(conn, self.locks()?, self.subject(), true).await?;
        let outcome = work(scope.conn).await;
        scope.leave(outcome).await
    }

    /// As [`with_on`](Self::with_on), unless the lock is held by another session. Never waits for it.
    pub async fn try_with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        let mut scope = Scope::enter::<Async>(conn, self.locks()?, self.subject(), false).await?;
        if !scope.is_entered() {
            return Ok(Attempt::Busy);
        }
        let outcome = work(scope.conn).await;
        scope.leave(outcome).await.map(Attempt::Acquired)
    }
}

/// A lock on a lent connection, which cannot be discarded. So what is not certain ends its session.
pub(crate) struct Scope<'c, S: Session> {
    pub(crate) conn: &'c mut S,
    locks: Locks,
    holds: Holds,
    subject: Subject,
    since: Instant,
    held: Option<Raised>,
}

/// A lock that was left to its session.
#[cfg(all(feature = "async", feature = "migrations"))]
pub(crate) struct Left {
    holds: Holds,
    since: Instant,
    held: Option<Raised>,
}

#[derive(Debug, Clone, Copy)]
enum Holds {
    Nothing,
    /// The locks, which the session with this pid took.
    Locks(i32),
    Unknown,
}

impl<'c, S: Session> Scope<'c, S> {
    pub(crate) async fn enter<M: Mode>(
        conn: &'c mut S,
        locks: Locks,
        subject: Subject,
        waits: bool,
    ) -> Result<Self> {
        let entered = Self::entered::<M>(conn, locks, subject, waits);
        if waits {
            subject.wait("with_on", entered).await
        } else {
            subject.tell("try_with_on", entered).await
        }
    }

    /// `subject` tells of a long wait.
    async fn entered<M: Mode>(
        conn: &'c mut S,
        locks: Locks,
        subject: Subject,
        waits: bool,
    ) -> Result<Self> {
        let before = conn.transaction();
        if !before.is_none() {
            return Err(refusal(before));
        }
        let mut turns = Turns::new(Topic::lent(What::Lock(locks.first().id)), None);
        let (began, mut is_told) = (Instant::now(), false);
        let mut scope = Self {
            conn,
            locks,
            holds: Holds::Nothing,
            subject,
            since: began,
            held: None,
        };
        loop {
            if waits {
                turns.next::<M>().await;
            }
            scope.holds = Holds::Unknown;
            let (reply, is_open) = scope.conn.probe(scope.locks.take()).await;
            // What the server has refused ends no session.
            scope.holds = match reply {
                Ok((Some(pid @ 1..),)) => Holds::Locks(pid),
                Ok(_) => Holds::Nothing,
                Err(_) => Holds::Unknown,
            };
            if let (Holds::Locks(pid), true) = (scope.holds, is_open) {
                scope.holds = Holds::Unknown;
                let release = scope.locks.late_release(pid);
                if scope.conn.batch(&release).await.is_ok() {
                    scope.holds = Holds::Nothing;
                }
            }
            let mut taken = taken(reply, is_open)?;
            if let (Err(busy), true) = (taken, waits) {
                turns.wait_for(Topic::lent(What::Lock(scope.locks.get(busy).id)));
                if let Some(slice) = turns.slice() {
                    scope.holds = Holds::Unknown;
                    taken = waited(scope.conn, &scope.locks, busy, slice, &mut turns).await?;
                }
            }
            scope.holds = taken.map_or(Holds::Nothing, Holds::Locks);
            let (Err(busy), true) = (taken, waits) else {
                scope.since = Instant::now();
                scope.held = taken.ok().map(|_| Raised::held(subject));
                return Ok(scope);
            };
            if !is_told && began.elapsed() > LONG {
                is_told = true;
                let holder: QueryResult<(Option<i32>,)> =
                    scope.conn.one(scope.locks.get(busy).holder()).await;
                subject.waits_for(holder.ok().and_then(|(pid,)| pid), began.elapsed());
            }
        }
    }

    /// Leaves the lock to the session. [`resume`](Self::resume) goes on.
    #[cfg(all(feature = "async", feature = "migrations"))]
    pub(crate) fn disarm(mut self) -> Left {
        Left {
            holds: std::mem::replace(&mut self.holds, Holds::Nothing),
            since: self.since,
            held: self.held.take(),
        }
    }

    #[cfg(all(feature = "async", feature = "migrations"))]
    pub(crate) fn resume(conn: &'c mut S, locks: Locks, subject: Subject, left: Left) -> Self {
        Self {
            conn,
            locks,
            holds: left.holds,
            subject,
            since: left.since,
            held: left.held,
        }
    }

    fn is_entered(&self) -> bool {
        matches!(self.holds, Holds::Locks(_))
    }

    pub(crate) async fn leave<T, E: From<Error>>(&mut self, outcome: Result<T, E>) -> Result<T, E> {
        let Holds::Locks(pid) = self.holds else {
            return outcome;
        };
        let (began, before) = (Instant::now(), self.conn.transaction());
        let (reply, is_open) = self.conn.probe(self.locks.release(pid)).await;
        // A moved session is not this one, so nothing is to be ended here.
        self.holds = if reply.is_ok() {
            Holds::Nothing
        } else {
            Holds::Unknown
        };
        let mut left = released(self.conn, reply, &self.locks, pid).await;
        if left.is_ok() && (is_open || before == Transaction::Open) {
            left = Err(Error::TransactionLeftOpen(self.locks.to_string()));
        }
        self.subject.ended("with_on", began, self.since, &left);
        let value = outcome?;
        left?;
        Ok(value)
    }
}

impl<S: Session> Outcome for Scope<'_, S> {
    fn word(&self) -> &'static str {
        if self.is_entered() {
            Attempt::Acquired(()).word()
        } else {
            Attempt::<()>::Busy.word()
        }
    }
}

impl<S: Session> Drop for Scope<'_, S> {
    fn drop(&mut self) {
        let began = Instant::now();
        let is_certain = match self.holds {
            Holds::Nothing => true,
            // A blocking session replies, and an asynchronous one runs it behind what was sent.
            Holds::Locks(pid) if self.conn.transaction().is_none() => {
                let release = self.locks.late_release(pid);
                matches!(
                    started_quietly(self.conn.batch(&release)),
                    Ok(None | Some(Ok(())))
                )
            }
            Holds::Locks(_) | Holds::Unknown => false,
        };
        if !is_certain {
            let _ = started_quietly(self.conn.batch(END_SESSION));
            self.conn.mark_broken();
        }
        if self.held.is_some() && self.is_entered() {
            let outcome = if is_certain { "released" } else { "failed" };
            let (took, held) = (began.elapsed(), Some(self.since.elapsed()));
            self.subject.event("drop", outcome, took, held, None);
        }
        for id in self.locks.ids() {
            waiting::released(&Topic::lent(What::Lock(id)));
        }
    }
}
