//! Locks that a transaction holds until it ends.

use std::time::{Duration, Instant};

use super::AdvisoryLock;
use super::all::{Busy, Locks};
use super::attempt::Attempt;
use crate::call::classify;
use crate::error::{Error, Result};
use crate::mode::{self, Mode};
use crate::pool::{Connection, Pool, Reply};
#[cfg(feature = "r2d2")]
use crate::session::now;
use crate::session::{Session, Transaction};
use crate::transaction::{Own, refusal};

/// # Transaction locks
///
/// The surrounding transaction holds the lock until it ends, or is rolled back to a savepoint
/// before it. There is no guard, and it works behind a pooler in transaction mode.
///
/// A wait is the server's own, in the order of arrival and under its deadlock detection, and the
/// session's `statement_timeout` and `lock_timeout` apply to it. If its future is dropped, the
/// connection is marked as broken, and the server ends the wait within a second after the pool has
/// closed it. So it is if the future of a try for [several locks](Self::all) is dropped.
///
/// Use READ COMMITTED: at REPEATABLE READ the work would not see what the last holder committed, so
/// that is an error, and at SERIALIZABLE PostgreSQL fails all but one holder with a serialization
/// failure.
///
/// They fail with [`Error::OutsideTransaction`], [`Error::RepeatableRead`], [`Error::Standby`],
/// [`Error::Input`] and [`Error::Database`]. [`transaction`](Self::transaction) fails with
/// [`Error::InsideTransaction`] instead of the first, and with [`Error::TransactionEnded`] where
/// work has ended it by plain SQL, which diesel-async does not see.
impl<P: Pool> AdvisoryLock<P> {
    /// Takes the lock until the transaction ends, if it is free, and never waits for it.
    ///
    /// One round trip: `SELECT pg_try_advisory_xact_lock($1)`, with checks of the isolation level
    /// and for a standby.
    pub fn try_acquire_xact<'a>(
        &'a self,
        conn: &'a mut Connection<P>,
    ) -> Reply<'a, P, Attempt<()>> {
        P::Mode::drive(self.subject().observe("try_acquire_xact", async move {
            acquire(conn, &self.locks()?, Some(Duration::ZERO)).await
        }))
    }

    /// Takes the lock until the transaction ends, and waits for as long as others hold it.
    ///
    /// One round trip if it is free, and otherwise a second one, in which the server waits.
    pub fn acquire_xact<'a>(&'a self, conn: &'a mut Connection<P>) -> Reply<'a, P, ()> {
        P::Mode::drive(async move {
            let wait = async { acquire(conn, &self.locks()?, None).await };
            self.subject()
                .observe_wait("acquire_xact", wait)
                .await
                .map(drop)
        })
    }

    /// Takes the lock until the transaction ends, and waits for at most `timeout`. After
    /// [`Attempt::Busy`] the transaction is as usable as before.
    ///
    /// One round trip if it is free, and otherwise two more.
    pub fn acquire_xact_timeout<'a>(
        &'a self,
        conn: &'a mut Connection<P>,
        timeout: Duration,
    ) -> Reply<'a, P, Attempt<()>> {
        P::Mode::drive(
            self.subject()
                .observe_wait("acquire_xact_timeout", async move {
                    acquire(conn, &self.locks()?, Some(timeout)).await
                }),
        )
    }
}

/// Of several locks all or none, also at a timeout.
async fn acquire<S: Session>(
    conn: &mut S,
    locks: &Locks,
    timeout: Option<Duration>,
) -> Result<Attempt<()>> {
    match conn.transaction() {
        Transaction::Open | Transaction::Test => {}
        Transaction::None => return Err(Error::OutsideTransaction),
        Transaction::Broken => return Err(refusal(Transaction::Broken)),
    }
    let deadline = timeout.map(|timeout| (Instant::now(), timeout));
    let acquired = if locks.len() == 1 || timeout.is_none() {
        wait(conn, locks, deadline).await
    } else {
        let mut pending = Pending {
            conn,
            is_over: false,
        };
        let acquired = all_or_none(pending.conn, locks, deadline).await;
        pending.is_over = true;
        acquired
    };
    match acquired {
        Err(Error::Database(error)) => Err(classify(conn, error).await),
        Err(Error::Standby) => {
            conn.mark_broken();
            Err(Error::Standby)
        }
        acquired => acquired,
    }
}

async fn all_or_none<S: Session>(
    conn: &mut S,
    locks: &Locks,
    timeout: Option<(Instant, Duration)>,
) -> Result<Attempt<()>> {
    conn.batch("SAVEPOINT diesel_interlock").await?;
    let acquired = wait(conn, locks, timeout).await;
    let end = match acquired {
        Ok(Attempt::Acquired(())) => "RELEASE SAVEPOINT diesel_interlock",
        _ => "ROLLBACK TO SAVEPOINT diesel_interlock; RELEASE SAVEPOINT diesel_interlock",
    };
    let ended = conn.batch(end).await;
    let acquired = acquired?;
    ended?;
    Ok(acquired)
}

/// Takes the locks in their order, and waits for each that is busy.
pub(crate) async fn wait<S: Session>(
    conn: &mut S,
    locks: &Locks,
    timeout: Option<(Instant, Duration)>,
) -> Result<Attempt<()>> {
    loop {
        let (tried,) = conn.one(&locks.try_xact()).await?;
        let Err(busy) = Busy::read(tried)? else {
            return Ok(Attempt::Acquired(()));
        };
        let rest = timeout.map(|(began, timeout)| timeout.saturating_sub(began.elapsed()));
        if rest.is_some_and(|rest| rest.is_zero()) {
            return Ok(Attempt::Busy);
        }
        let lock = locks.get(busy);
        let sql = rest.map_or_else(|| lock.xact(), |rest| lock.xact_within(rest));
        let mut pending = Pending {
            conn,
            is_over: false,
        };
        let waited = pending.conn.batch(&sql).await;
        pending.is_over = true;
        waited?;
        // Otherwise the next try tells. It takes again what is held, which a transaction may.
        if rest.is_none() && locks.is_last(busy) {
            return Ok(Attempt::Acquired(()));
        }
    }
}

/// What goes on on the server if its future is dropped. So the pool must close the connection.
struct Pending<'c, S: Session> {
    conn: &'c mut S,
    is_over: bool,
}

impl<S: Session> Drop for Pending<'_, S> {
    fn drop(&mut self) {
        if !self.is_over {
            self.conn.mark_broken();
            mode::note_closed();
        }
    }
}

#[cfg(feature = "r2d2")]
impl AdvisoryLock<crate::pool::PgPool> {
    /// Opens a READ COMMITTED transaction, takes the lock in it, runs `work`, and commits. Rolls
    /// back if `work` fails or panics. Inside the transaction of a test it is a savepoint, and
    /// inside another one [`Error::InsideTransaction`]. Three round trips beside those of `work` if
    /// the lock is free.
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_interlock::AdvisoryLock;
    ///
    /// static SERVER: AdvisoryLock = AdvisoryLock::named("server");
    ///
    /// fn book(conn: &mut PgConnection, server: i32) -> QueryResult<bool> {
    ///     SERVER.key(server).transaction(conn, |conn| insert_if_free(conn, server))
    /// }
    /// # fn insert_if_free(_: &mut PgConnection, _: i32) -> QueryResult<bool> { Ok(true) }
    /// # assert!(book(&mut workbench::Database::new().connect(), 345)?);
    /// # Ok::<(), diesel::result::Error>(())
    /// ```
    pub fn transaction<T, E: From<Error>>(
        &self,
        conn: &mut diesel::PgConnection,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        now(self.run_in_transaction(conn, async |conn| work(conn)))
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = mode::Async>> AdvisoryLock<P> {
    /// Opens a READ COMMITTED transaction, takes the lock in it, runs `work`, and commits. Rolls
    /// back if `work` fails or panics, or the future is dropped. Inside the transaction of a test
    /// it is a savepoint, and inside another one [`Error::InsideTransaction`]. Three round trips
    /// beside those of `work` if the lock is free.
    pub async fn transaction<T, E: From<Error>>(
        &self,
        conn: &mut diesel_async::AsyncPgConnection,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run_in_transaction(conn, work).await
    }
}

impl<P: Pool> AdvisoryLock<P> {
    async fn run_in_transaction<T, E: From<Error>>(
        &self,
        conn: &mut Connection<P>,
        work: impl AsyncFnOnce(&mut Connection<P>) -> Result<T, E>,
    ) -> Result<T, E> {
        let transaction = Own::begin(conn).await?;
        let wait = async { acquire(transaction.conn, &self.locks()?, None).await };
        let outcome = match self.subject().observe_wait("transaction", wait).await {
            Ok(_) => work(transaction.conn).await,
            Err(error) => Err(error.into()),
        };
        transaction.end(outcome).await
    }
}
