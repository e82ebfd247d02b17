//! Locks that a transaction holds until it ends.
//!
//! **Try first, then wait in a second statement.** PostgreSQL reads
//! `client_connection_check_interval` when a statement begins, so the try sets it for the wait that
//! follows. If the lock is free, one round trip is enough.
//!
//! **REPEATABLE READ is refused.** The snapshot of such a transaction is older than the wait for
//! the lock. So "lock, check, insert" would not see the row of the previous holder, and would
//! insert twice.

use std::time::{Duration, Instant};

use super::AdvisoryLock;
use super::all::{Busy, Locks};
use super::attempt::Attempt;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::long_wait::{Awaited, Watched};
use crate::mode::Mode;
use crate::pool::{ConnectionOf, Pool, Reply};
#[cfg(feature = "r2d2")]
use crate::session::run_ready;
use crate::session::{Session, Transaction, classify};
use crate::transaction::{Own, refusal};
use crate::unfinished::note_closed;

/// # Transaction locks
///
/// The surrounding transaction holds the lock until it ends, or until it is rolled back to a
/// savepoint from before the lock. There is no guard, and transaction locks work behind a pooler in
/// transaction mode.
///
/// The server itself does the waiting: in the order of arrival, with its deadlock detection, and
/// under the session's `statement_timeout` and `lock_timeout`. If the future of a wait, or of a try
/// for [several locks](Self::all), is dropped, the connection is marked as broken. Its pool then
/// closes it, and within a second after that the server ends the statement.
///
/// Use READ COMMITTED. At REPEATABLE READ the work would not see what the last holder committed, so
/// that is an error. At SERIALIZABLE, PostgreSQL fails all but one holder with a serialization
/// failure.
///
/// The operations fail with [`Error::OutsideTransaction`], [`Error::RepeatableRead`],
/// [`Error::Standby`], [`Error::Input`] and [`Error::Database`]. [`transaction`](Self::transaction)
/// opens its own transaction, so it fails with [`Error::InsideTransaction`] instead of
/// [`Error::OutsideTransaction`]. It also fails with [`Error::TransactionEnded`] if the work has
/// ended the transaction by plain SQL; diesel-async does not see that, so only r2d2 reports it.
impl<P: Pool> AdvisoryLock<P> {
    /// Takes the lock until the transaction ends, if it is free; never waits for it.
    ///
    /// One round trip: `SELECT pg_try_advisory_xact_lock($1)`, in a statement that also checks the
    /// isolation level, and that the server is not a standby.
    pub fn try_acquire_xact<'a>(
        &'a self,
        conn: &'a mut ConnectionOf<P>,
    ) -> Reply<'a, P, Attempt<()>> {
        P::Mode::drive(self.subject().observe("try_acquire_xact", async move {
            acquire(conn, &self.locks()?, Some(Duration::ZERO), self.subject()).await
        }))
    }

    /// Takes the lock until the transaction ends, and waits while others hold it.
    ///
    /// One round trip if the lock is free, and otherwise a second one, in which the server waits.
    pub fn acquire_xact<'a>(&'a self, conn: &'a mut ConnectionOf<P>) -> Reply<'a, P, ()> {
        P::Mode::drive(async move {
            let wait = async { acquire(conn, &self.locks()?, None, self.subject()).await };
            self.subject()
                .observe_wait("acquire_xact", wait)
                .await
                .map(drop)
        })
    }

    /// Takes the lock until the transaction ends, and waits for at most `timeout`.
    ///
    /// After [`Attempt::Busy`] the transaction is as usable as before. One round trip if the lock
    /// is free, and otherwise two more.
    pub fn acquire_xact_timeout<'a>(
        &'a self,
        conn: &'a mut ConnectionOf<P>,
        timeout: Duration,
    ) -> Reply<'a, P, Attempt<()>> {
        P::Mode::drive(
            self.subject()
                .observe_wait("acquire_xact_timeout", async move {
                    acquire(conn, &self.locks()?, Some(timeout), self.subject()).await
                }),
        )
    }
}

/// Takes all of several locks or none of them, also if a timeout ends the wait.
async fn acquire<S: Session>(
    conn: &mut S,
    locks: &Locks,
    timeout: Option<Duration>,
    subject: Subject,
) -> Result<Attempt<()>> {
    match conn.transaction() {
        Transaction::Open | Transaction::Test => {}
        Transaction::None => return Err(Error::OutsideTransaction),
        Transaction::Broken => return Err(refusal(Transaction::Broken)),
    }
    let deadline = timeout.map(|timeout| (Instant::now(), timeout));
    let acquired = if locks.len() == 1 || timeout.is_none() {
        wait(conn, locks, deadline, subject).await
    } else {
        let mut pending = Pending {
            conn,
            is_over: false,
        };
        let acquired = all_or_none(pending.conn, locks, deadline, subject).await;
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
    subject: Subject,
) -> Result<Attempt<()>> {
    conn.batch("SAVEPOINT diesel_interlock").await?;
    let acquired = wait(conn, locks, timeout, subject).await;
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
    subject: Subject,
) -> Result<Attempt<()>> {
    loop {
        let tried = conn.one(&locks.try_xact()).await?;
        let Err(busy) = Busy::read(&tried)? else {
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
        let waited = {
            let _watched = Watched::new(subject, Awaited::Lock(lock.id, None));
            pending.conn.batch(&sql).await
        };
        pending.is_over = true;
        waited?;
        // Without a timeout, the wait has taken the last lock. Otherwise only the next try can
        // tell. It may take again what the transaction already holds.
        if rest.is_none() && locks.is_last(busy) {
            return Ok(Attempt::Acquired(()));
        }
    }
}

/// A statement that goes on on the server if its future is dropped. So the drop marks the
/// connection as broken, and its pool closes it.
struct Pending<'c, S: Session> {
    conn: &'c mut S,
    is_over: bool,
}

impl<S: Session> Drop for Pending<'_, S> {
    fn drop(&mut self) {
        if !self.is_over {
            self.conn.mark_broken();
            note_closed();
        }
    }
}

#[cfg(feature = "r2d2")]
impl<M> AdvisoryLock<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// Opens a READ COMMITTED transaction, takes the lock in it, runs `work`, and commits.
    ///
    /// Waits while others hold the lock. Rolls back if `work` fails or panics. Inside the
    /// transaction of a test (`begin_test_transaction`) it opens a savepoint; inside any other
    /// transaction it fails with [`Error::InsideTransaction`]. If the lock is free: three round
    /// trips in addition to those of `work`.
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
        run_ready(self.run_in_transaction(conn, async |conn| work(conn)))
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> AdvisoryLock<P> {
    /// Opens a READ COMMITTED transaction, takes the lock in it, runs `work`, and commits.
    ///
    /// In everything else like the blocking `transaction`; a future that is dropped rolls back.
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
        conn: &mut ConnectionOf<P>,
        work: impl AsyncFnOnce(&mut ConnectionOf<P>) -> Result<T, E>,
    ) -> Result<T, E> {
        let transaction = Own::begin(conn).await?;
        let subject = self.subject();
        let wait = async { acquire(transaction.conn, &self.locks()?, None, subject).await };
        let outcome = match subject.observe_wait("transaction", wait).await {
            Ok(_) => {
                let _here = self.locks().map(|locks| locks.held_here(None));
                work(transaction.conn).await
            }
            Err(error) => Err(error.into()),
        };
        transaction.end(outcome).await
    }
}
