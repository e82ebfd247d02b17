//! Session locks for the time of a closure, on the caller's connection.
//!
//! **On connections of the caller, a lock is a scope and not a guard.** A guard that borrows a
//! connection could be leaked (`mem::forget`), and the lock would stay held. `with_on` ends before
//! the caller can use the connection for anything else.

use super::AdvisoryLock;
use super::all::Locks;
use super::attempt::Attempt;
use super::holder::{Holder, Holds};
use crate::error::{Error, Result};
use crate::event::Subject;
#[cfg(feature = "async")]
use crate::mode::Async;
use crate::mode::Mode;
use crate::pool::{ConnectionOf, Pool};
#[cfg(feature = "r2d2")]
use crate::session::run_ready;
use crate::session::{Session, Transaction};
use crate::waiting::Turns;

#[cfg(feature = "r2d2")]
impl<M> AdvisoryLock<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Takes the session lock on the caller's connection, runs `work`, and releases the lock.
    ///
    /// [Waits](Self#waiting) while others hold the lock. If the lock is free: two round trips in
    /// addition to those of `work`. The connection may come from any pool of any crate. If the lock
    /// cannot be released, the session is ended and the connection marked as broken, so a pool that
    /// looks at that mark replaces it. The errors of [`release`](super::AdvisoryLockGuard::release)
    /// are possible, too.
    pub fn with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let run = run_ready(self.run_on(conn, Waits::OnTheServer, async |conn| work(conn)))?;
        Ok(run.of_endless_wait()?)
    }

    /// Runs `work` under the session lock if the lock is free; never waits for it.
    ///
    /// In everything else it is like [`with_on`](Self::with_on).
    pub fn try_with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        run_ready(self.run_on(conn, Waits::Never, async |conn| work(conn)))
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = Async>> AdvisoryLock<P> {
    /// Takes the session lock on the caller's connection, runs `work`, and releases the lock. The
    /// connection may come from any pool of any crate.
    ///
    /// In everything else like the blocking `with_on`; if the future is dropped, the unlock is
    /// queued behind the statements that were sent.
    pub async fn with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        let run = self.run_on(conn, Waits::OnTheServer, work).await?;
        Ok(run.of_endless_wait()?)
    }

    /// Runs `work` under the session lock if the lock is free; never waits for it.
    ///
    /// In everything else it is like [`with_on`](Self::with_on).
    pub async fn try_with_on<T, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        self.run_on(conn, Waits::Never, work).await
    }
}

impl<P: Pool> AdvisoryLock<P> {
    async fn run_on<T, E: From<Error>>(
        &self,
        conn: &mut ConnectionOf<P>,
        waits: Waits,
        work: impl AsyncFnOnce(&mut ConnectionOf<P>) -> Result<T, E>,
    ) -> Result<Attempt<T>, E> {
        let entered = enter::<P::Mode, _>(conn, self.locks()?, self.subject(), waits).await?;
        let Attempt::Acquired(mut holder) = entered else {
            return Ok(Attempt::Busy);
        };
        let outcome = work(holder.conn()).await;
        release_after(holder, outcome).await.map(Attempt::Acquired)
    }
}

/// How a scope waits for its locks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    Never,
    OnTheServer,
    /// By tries only. Between tries a waiter has no snapshot for which a `CREATE INDEX
    /// CONCURRENTLY` of the holder would wait, so that statement succeeds under any `lock_timeout`.
    #[cfg(feature = "migrations")]
    Polling,
}

/// Takes the locks on the caller's connection, and waits for them as `waits` says.
pub(crate) async fn enter<M: Mode, S: Session>(
    conn: &mut S,
    locks: Locks,
    subject: Subject,
    waits: Waits,
) -> Result<Attempt<Holder<&mut S>>> {
    let entered = acquire::<M, S>(Holder::new(conn, locks, subject), waits);
    if waits == Waits::Never {
        subject.observe("try_with_on", entered).await
    } else {
        subject.observe_wait("with_on", entered).await
    }
}

async fn acquire<M: Mode, S: Session>(
    mut holder: Holder<&mut S>,
    waits: Waits,
) -> Result<Attempt<Holder<&mut S>>> {
    let may_wait = || waits == Waits::OnTheServer;
    let waits = waits != Waits::Never;
    if waits {
        // Pauses need its timer.
        M::runtime()?;
    }
    let mut turns = Turns::new(None);
    while turns.next::<M>().await {
        if holder
            .attempt(waits.then_some(&mut turns), may_wait)
            .await?
        {
            holder.begin_holding();
            return Ok(Attempt::Acquired(holder));
        }
        if !waits {
            break;
        }
    }
    Ok(Attempt::Busy)
}

/// Releases the locks after the work. Before that, rolls back a transaction that the work has left
/// open.
pub(crate) async fn release_after<S: Session, T, E: From<Error>>(
    mut holder: Holder<&mut S>,
    outcome: Result<T, E>,
) -> Result<T, E> {
    let mut is_left_open = false;
    while holder.conn().transaction() == Transaction::Open {
        is_left_open = true;
        if holder.conn().rollback().await.is_err() {
            break;
        }
    }
    if outcome.is_err() {
        holder.conn().end_unseen_transaction();
    }
    let mut released = holder.release_and_report("with_on").await;
    if matches!(released, Err(Error::TransactionLeftOpen(_))) {
        // Plain SQL has opened the transaction. The lock is already released.
        if holder.conn().batch("ROLLBACK").await.is_ok() {
            holder.held().holds = Holds::Nothing;
        }
    } else if released.is_ok() && is_left_open {
        let locks = holder.held().locks.to_string();
        released = Err(Error::TransactionLeftOpen(locks));
    }
    let value = outcome?;
    released?;
    Ok(value)
}
