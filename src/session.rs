//! Sessions: the connections over which the operations of this crate send statements.
//!
//! An operation that sends statements is written once, as an `async fn` over [`Session`]. On a blocking connection every
//! reply is there before the function goes on, so the function is ready when it is first polled: see [`now`].

#[cfg(feature = "async")]
mod asynchronous;
#[cfg(feature = "postgres")]
mod blocking;
mod own_transaction;

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use diesel::pg::Pg;
use diesel::query_builder::{QueryFragment, QueryId};
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

#[cfg(feature = "async")]
pub(crate) use self::asynchronous::{
    AsyncProbe, AsyncStatement, Asynchronous, Lent, ProbeColumns, Probed,
};
#[cfg(feature = "postgres")]
pub(crate) use self::blocking::{Blocking, BlockingStatement};
pub(crate) use self::own_transaction::OwnTransaction;
use crate::error::{Error, Result};
use crate::key::{LockId, LockKey};
use crate::text::Name;
use crate::transaction::Transaction;

/// The reply to a statement, which is awaited.
pub(crate) type Reply<'conn, T> = Pin<Box<dyn Future<Output = T> + Send + 'conn>>;

/// A statement whose rows load as `U`, on either kind of connection. It may have to be sent again, so it is `Clone`.
pub(crate) trait Statement<U>: Clone + BlockingStatement<U> + AsyncStatement<U> {}

impl<Q: Clone + BlockingStatement<U> + AsyncStatement<U>, U> Statement<U> for Q {}

/// A statement that may probe for an open transaction: see [`probe`].
pub(crate) trait Probe<U>: Statement<U> + AsyncProbe<U> {}

impl<Q: Statement<U> + AsyncProbe<U>, U> Probe<U> for Q {}

#[cfg(not(feature = "postgres"))]
use self::any_statement::BlockingStatement;
#[cfg(not(feature = "async"))]
use self::any_statement::{AsyncProbe, AsyncStatement};

/// What a half that is not compiled in asks of a statement: nothing.
#[cfg(not(all(feature = "postgres", feature = "async")))]
#[allow(dead_code)] // each half uses the names of the other
mod any_statement {
    pub(crate) trait BlockingStatement<U> {}
    impl<Q, U> BlockingStatement<U> for Q {}

    pub(crate) trait AsyncStatement<U> {}
    impl<Q, U> AsyncStatement<U> for Q {}

    pub(crate) trait AsyncProbe<U> {}
    impl<Q, U> AsyncProbe<U> for Q {}
}

/// A server session. It belongs to one connection, whose statements run one after the other.
pub(crate) trait Session: Send {
    /// The transaction on the connection, as far as Diesel knows. No round trip.
    fn transaction(&mut self) -> Transaction;

    /// How deep transactions are nested, as far as Diesel knows. 0 outside of them, and on a connection that is marked as broken.
    /// `u32::MAX` if that is unknown, because the future of a statement that begins or ends one was dropped.
    fn depth(&mut self) -> u32;

    /// Whether the connection goes back to a pool, which discards it if it is marked as broken.
    fn is_pooled(&self) -> bool;

    /// A name as it is sent on this session.
    fn name<'a>(&mut self, name: &'a str) -> Name<'a>;

    /// The number of a lock on this session.
    fn lock_id(&mut self, key: &LockKey) -> Result<LockId>;

    /// Sends a statement and returns its row.
    fn one<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<U>>
    where
        Q: Statement<U>,
        U: Send + 'conn;

    /// Sends a statement and returns all of its rows.
    fn all<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        Q: Statement<U>,
        U: Send + 'conn;

    /// Sends a statement and returns the number of rows that it changed. Not as the first statement of an operation,
    /// because Diesel's `execute` does not return if libpq is in the middle of a `COPY`.
    fn execute<'conn, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<usize>>
    where
        Q: QueryFragment<Pg> + QueryId;

    /// As [`one`](Self::one), and also returns whether a transaction is open that Diesel does not know of. Also true if the
    /// statement failed before it ran, because a `PREPARE` failed or the connection is closed. Called by [`probe`].
    fn send_probe<'conn, U, Q>(
        &'conn mut self,
        statement: Q,
    ) -> Reply<'conn, (QueryResult<U>, bool)>
    where
        Q: Probe<U>,
        U: Send + 'conn;

    /// Sends statements that return nothing, in one message.
    fn batch<'conn>(&'conn mut self, sql: &'conn str) -> Reply<'conn, QueryResult<()>>;

    /// Returns whether an error of this session shows that the session has ended, and the server has freed its locks.
    fn has_ended<'conn>(&'conn mut self, error: &DieselError) -> Reply<'conn, bool>;

    /// Marks the connection as broken, so that a pool discards it.
    fn mark_broken(&mut self);

    /// Makes Diesel count no transaction, and clears the mark that [`probe`] left: the transaction is the caller's, who may
    /// continue it, or was rolled back.
    fn clear_mark(&mut self);

    /// Opens a transaction at the session's default isolation level, or a savepoint inside a transaction.
    fn begin(&mut self) -> Reply<'_, QueryResult<()>>;

    /// Opens a transaction at READ COMMITTED.
    fn begin_read_committed(&mut self) -> Reply<'_, QueryResult<()>>;

    /// Commits the transaction that was opened last, or releases its savepoint.
    fn commit(&mut self) -> Reply<'_, QueryResult<()>>;

    /// Rolls back the transaction that was opened last, or to its savepoint.
    fn rollback(&mut self) -> Reply<'_, QueryResult<()>>;
}

const BEGIN_READ_COMMITTED: &str = "BEGIN TRANSACTION ISOLATION LEVEL READ COMMITTED";

/// Runs an operation on a blocking connection.
#[cfg(feature = "postgres")]
pub(crate) fn now<T>(operation: impl Future<Output = T>) -> T {
    match started(operation) {
        Some(value) => value,
        None => unreachable!("a blocking session replies before it returns"),
    }
}

/// Polls an operation once, for a `Drop`, which cannot await it: on a blocking session it is then done, and on an
/// asynchronous one its first message is queued. Returns `None` if the reply is still to come.
pub(crate) fn started<T>(operation: impl Future<Output = T>) -> Option<T> {
    match pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// Sends a statement, and returns its row, and whether a transaction is open that Diesel does not know of. Also true if the
/// statement failed before it ran, because a `PREPARE` failed or the connection is closed.
///
/// A pooled connection is then left marked as broken, and so is a blocking one that the caller lends, where the mark is
/// Diesel's own until the next statement. On an asynchronous connection no statement clears a mark, so one that the caller
/// lends is left as it was.
pub(crate) async fn probe<S, U, Q>(session: &mut S, statement: Q) -> (QueryResult<U>, bool)
where
    S: Session,
    Q: Probe<U>,
    U: Send,
{
    let (reply, is_open) = session.send_probe(statement).await;
    if is_open && session.is_pooled() {
        session.mark_broken();
    }
    (reply, is_open)
}

/// Sends a statement and returns its row, unless the connection is out of a pool, and an earlier user left a transaction
/// open there. The connection is then left marked as broken, so that the pool discards it.
pub(crate) async fn one_outside_leftovers<S, U, Q>(session: &mut S, statement: Q) -> QueryResult<U>
where
    S: Session,
    Q: Probe<U>,
    U: Send,
{
    if !session.is_pooled() {
        return session.one(statement).await;
    }
    match probe(session, statement).await {
        (Ok(_), true) => Err(Error::TransactionInPool.into()),
        (reply, is_open) => leftover_explained(session, reply, is_open).await,
    }
}

/// Explains the error of a probe on a pooled connection: if the transaction that an earlier user left open there is aborted, no
/// statement runs. One more round trip, after an error only.
pub(crate) async fn leftover_explained<S, U>(
    session: &mut S,
    reply: QueryResult<U>,
    is_open: bool,
) -> QueryResult<U>
where
    S: Session,
{
    if !is_open || !session.is_pooled() || reply.as_ref().is_err_and(is_closed) {
        return reply;
    }
    let Err(error) = reply else { return reply };
    let is_aborted = match session.batch("SELECT 1").await {
        Ok(()) => false,
        Err(aborted) => !session.has_ended(&aborted).await,
    };
    session.mark_broken();
    Err(if is_aborted {
        Error::TransactionInPool.into()
    } else {
        error
    })
}

/// As [`one_outside_leftovers`], and sends the statement again in a READ COMMITTED transaction if a stricter default level
/// fails it. Not inside a transaction, whose level is the caller's.
pub(crate) async fn one_at_read_committed<S, U, Q>(session: &mut S, statement: Q) -> QueryResult<U>
where
    S: Session,
    Q: Probe<U>,
    U: Send,
{
    match one_outside_leftovers(session, statement.clone()).await {
        Err(error) if is_retried(session, &error) => {
            one_in_read_committed(session, statement).await
        }
        reply => reply,
    }
}

/// As [`probe`], and sends the statement again in a READ COMMITTED transaction if a stricter default level fails
/// it.
pub(crate) async fn probe_at_read_committed<S, U, Q>(
    session: &mut S,
    statement: Q,
) -> (QueryResult<U>, bool)
where
    S: Session,
    Q: Probe<U>,
    U: Send,
{
    match probe(session, statement.clone()).await {
        (Err(error), false) if is_retried(session, &error) => {
            (one_in_read_committed(session, statement).await, false)
        }
        (reply @ Err(_), is_open) => (leftover_explained(session, reply, is_open).await, is_open),
        probed => probed,
    }
}

/// Returns whether a statement is sent again, because a stricter default level failed it.
fn is_retried<S: Session>(session: &mut S, error: &DieselError) -> bool {
    is_serialization_failure(error) && session.transaction() == Transaction::None
}

async fn one_in_read_committed<S, U, Q>(session: &mut S, statement: Q) -> QueryResult<U>
where
    S: Session,
    Q: Statement<U>,
    U: Send,
{
    let rows = all_in_read_committed(session, statement).await?;
    rows.into_iter().next().ok_or(DieselError::NotFound)
}

async fn all_in_read_committed<S, U, Q>(session: &mut S, statement: Q) -> QueryResult<Vec<U>>
where
    S: Session,
    Q: Statement<U>,
    U: Send,
{
    let mut transaction = OwnTransaction::begin_read_committed(session).await?;
    let rows = transaction.session().all(statement).await;
    transaction.end(rows).await
}

/// Sends a statement and returns all of its rows. Sends it again as [`one_at_read_committed`] does.
#[cfg(feature = "testing")]
pub(crate) async fn all_at_read_committed<S, U, Q>(
    session: &mut S,
    statement: Q,
) -> QueryResult<Vec<U>>
where
    S: Session,
    Q: Statement<U>,
    U: Send,
{
    match session.all(statement.clone()).await {
        Err(error) if is_retried(session, &error) => {
            all_in_read_committed(session, statement).await
        }
        reply => reply,
    }
}

/// Rolls back after an error. A session that cannot roll back is closed or broken, and the first error says why.
pub(crate) async fn undo<S: Session>(session: &mut S) -> QueryResult<()> {
    match session.rollback().await {
        Err(DieselError::BrokenTransactionManager) => Ok(()),
        undone => undone,
    }
}

/// Returns whether an error certainly shows that the connection is closed.
///
/// libpq notices the end when a reply does not come, and refuses to send from then on. It also refuses to send during a
/// `COPY`, so this holds only for the errors of [`Session`], which ends a `COPY` first.
pub(crate) fn is_closed(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(
            DatabaseErrorKind::ClosedConnection | DatabaseErrorKind::UnableToSendCommand,
            _
        )
    )
}

pub(crate) fn is_serialization_failure(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _)
    )
}
