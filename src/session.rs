//! Sessions: the connections over which the operations of this crate send statements.
//!
//! An operation that sends statements is written once, as an `async fn` over [`Session`]. On a blocking connection every
//! reply is there before the function goes on, so the function is ready when it is first polled: see [`now`].

#[cfg(feature = "__async")]
mod asynchronous;

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use diesel::connection::{
    AnsiTransactionManager, Connection, SimpleConnection, TransactionManager,
};
use diesel::pg::{Pg, PgConnection};
use diesel::query_builder::{QueryFragment, QueryId};
#[cfg(not(feature = "__async"))]
use diesel::query_dsl::{RunQueryDsl, methods::LoadQuery};
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

#[cfg(feature = "r2d2")]
use crate::error::Error;
use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::text::Name;
use crate::transaction::{self, Transaction};

/// The reply to a statement, which is awaited.
pub(crate) type Reply<'conn, T> = Pin<Box<dyn Future<Output = T> + Send + 'conn>>;

/// A statement whose rows load as `U`. It may have to be sent again, so it is `Clone`.
///
/// With the asynchronous half compiled in, the same types implement it there: see [`asynchronous`].
pub(crate) trait Statement<U>: Clone {
    fn load(&self, conn: &mut PgConnection) -> QueryResult<U>;

    fn load_all(&self, conn: &mut PgConnection) -> QueryResult<Vec<U>>;

    #[cfg(feature = "__async")]
    fn send<'conn>(
        self,
        conn: &'conn mut diesel_async::AsyncPgConnection,
    ) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        U: Send + 'conn;
}

#[cfg(not(feature = "__async"))]
impl<'query, Q, U> Statement<U> for Q
where
    Q: Clone + RunQueryDsl<PgConnection> + LoadQuery<'query, PgConnection, U>,
{
    fn load(&self, conn: &mut PgConnection) -> QueryResult<U> {
        self.clone().get_result(conn)
    }

    fn load_all(&self, conn: &mut PgConnection) -> QueryResult<Vec<U>> {
        RunQueryDsl::load(self.clone(), conn)
    }
}

/// A server session. It belongs to one connection, whose statements run one after the other.
pub(crate) trait Session: Send {
    /// The transaction on the connection, as far as Diesel knows. No round trip.
    fn transaction(&mut self) -> Transaction;

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

    /// As [`one`](Self::one), and also returns whether a transaction is open that Diesel does not know of. The
    /// connection is then left marked as broken: see [`transaction::probed`].
    fn probe<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, (QueryResult<U>, bool)>
    where
        Q: Statement<U>,
        U: Send + 'conn;

    /// Sends statements that return nothing, in one message.
    fn batch<'conn>(&'conn mut self, sql: &'conn str) -> Reply<'conn, QueryResult<()>>;

    /// Marks the connection as broken, so that a pool discards it. See [`transaction::mark_broken`].
    fn mark_broken(&mut self);

    /// Clears the mark that [`probe`](Self::probe) left, because the transaction is the caller's, who may continue it.
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

/// The session of a blocking connection, whose replies are always ready.
pub(crate) struct Blocking<'conn> {
    conn: &'conn mut PgConnection,
    is_pooled: bool,
}

impl<'conn> Blocking<'conn> {
    pub(crate) fn new(conn: &'conn mut PgConnection, is_pooled: bool) -> Self {
        Self { conn, is_pooled }
    }

    /// On a connection that the caller lends.
    pub(crate) fn lent(conn: &'conn mut PgConnection) -> Self {
        Self::new(conn, false)
    }

    /// On a connection out of a pool.
    #[cfg(feature = "r2d2")]
    pub(crate) fn pooled(conn: &'conn mut PgConnection) -> Self {
        Self::new(conn, true)
    }
}

impl Session for Blocking<'_> {
    fn transaction(&mut self) -> Transaction {
        transaction::of(self.conn)
    }

    fn is_pooled(&self) -> bool {
        self.is_pooled
    }

    fn name<'a>(&mut self, name: &'a str) -> Name<'a> {
        Name::on(self.conn, name)
    }

    fn lock_id(&mut self, key: &LockKey) -> Result<LockId> {
        Ok(key.id_on(self.conn)?)
    }

    fn one<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<U>>
    where
        Q: Statement<U>,
        U: Send + 'conn,
    {
        ready(sent(self.conn, |conn| statement.load(conn)))
    }

    fn all<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        Q: Statement<U>,
        U: Send + 'conn,
    {
        ready(sent(self.conn, |conn| statement.load_all(conn)))
    }

    fn execute<'conn, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<usize>>
    where
        Q: QueryFragment<Pg> + QueryId,
    {
        ready(sent(self.conn, |conn| {
            conn.execute_returning_count(&statement)
        }))
    }

    fn probe<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, (QueryResult<U>, bool)>
    where
        Q: Statement<U>,
        U: Send + 'conn,
    {
        ready(transaction::probed(self.conn, |conn| {
            sent(conn, |conn| statement.load(conn))
        }))
    }

    fn batch<'conn>(&'conn mut self, sql: &'conn str) -> Reply<'conn, QueryResult<()>> {
        ready(self.conn.batch_execute(sql))
    }

    fn mark_broken(&mut self) {
        transaction::mark_broken(self.conn);
    }

    fn clear_mark(&mut self) {
        transaction::clear_mark(self.conn);
    }

    fn begin(&mut self) -> Reply<'_, QueryResult<()>> {
        ready(AnsiTransactionManager::begin_transaction(self.conn))
    }

    fn begin_read_committed(&mut self) -> Reply<'_, QueryResult<()>> {
        ready(AnsiTransactionManager::begin_transaction_sql(
            self.conn,
            BEGIN_READ_COMMITTED,
        ))
    }

    fn commit(&mut self) -> Reply<'_, QueryResult<()>> {
        ready(AnsiTransactionManager::commit_transaction(self.conn))
    }

    fn rollback(&mut self) -> Reply<'_, QueryResult<()>> {
        ready(AnsiTransactionManager::rollback_transaction(self.conn))
    }
}

fn ready<'conn, T: Send + 'conn>(reply: T) -> Reply<'conn, T> {
    Box::pin(std::future::ready(reply))
}

/// Runs an operation on a blocking connection.
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

/// Makes a call whose first statement libpq may refuse to send because of a `COPY`. In that case nothing was sent: this
/// ends the `COPY`, and makes the call again. A connection that is closed fails again.
///
/// Diesel does not read libpq to the end of a `COPY TO`, even where the caller read all of its rows. A panic in the
/// closure of `copy_from` leaves a `COPY FROM` open likewise. libpq then refuses to send a prepared statement, or one
/// with parameters, with the error that it also reports for a closed connection.
///
/// Ending a `COPY TO` reads what is left of it. Ending a `COPY FROM` cancels it, which aborts the transaction around it.
/// Either costs a round trip, after such a refusal only.
fn sent<T>(
    conn: &mut PgConnection,
    mut call: impl FnMut(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    match call(conn) {
        Err(DieselError::DatabaseError(DatabaseErrorKind::UnableToSendCommand, _)) => {
            let was_marked = transaction::of(conn) == Transaction::Broken;
            // Without parameters libpq ends the COPY before it sends. The statement itself may fail, as it does in an
            // aborted transaction.
            let _ = conn.batch_execute("SELECT 1");
            if was_marked {
                // The statement cleared the mark, by which the call may find an open transaction.
                transaction::mark_broken(conn);
            }
            call(conn)
        }
        reply => reply,
    }
}

/// Sends a statement and returns its row, unless the connection is out of a pool, and an earlier user left a transaction
/// open there. The connection is then left marked as broken, so that the pool discards it.
pub(crate) async fn one_outside_leftovers<S, U, Q>(session: &mut S, statement: Q) -> QueryResult<U>
where
    S: Session,
    Q: Statement<U>,
    U: Send,
{
    if !session.is_pooled() {
        return session.one(statement).await;
    }
    match session.probe(statement).await {
        #[cfg(feature = "r2d2")]
        (Ok(_), true) => Err(Error::TransactionInPool.into()),
        (reply, _) => reply,
    }
}

/// As [`one_outside_leftovers`], and sends the statement again in a READ COMMITTED transaction if a stricter default level
/// fails it. Not inside a transaction, whose level is the caller's.
pub(crate) async fn one_at_read_committed<S, U, Q>(session: &mut S, statement: Q) -> QueryResult<U>
where
    S: Session,
    Q: Statement<U>,
    U: Send,
{
    match one_outside_leftovers(session, statement.clone()).await {
        Err(error)
            if is_serialization_failure(&error) && session.transaction() == Transaction::None =>
        {
            one_in_read_committed(session, statement).await
        }
        reply => reply,
    }
}

/// As [`Session::probe`], and sends the statement again in a READ COMMITTED transaction if a stricter default level fails
/// it.
pub(crate) async fn probe_at_read_committed<S, U, Q>(
    session: &mut S,
    statement: Q,
) -> (QueryResult<U>, bool)
where
    S: Session,
    Q: Statement<U>,
    U: Send,
{
    match session.probe(statement.clone()).await {
        (Err(error), _)
            if is_serialization_failure(&error) && session.transaction() == Transaction::None =>
        {
            (one_in_read_committed(session, statement).await, false)
        }
        probed => probed,
    }
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
    session.begin_read_committed().await?;
    match session.all(statement).await {
        Ok(rows) => {
            session.commit().await?;
            Ok(rows)
        }
        Err(error) => {
            undo(session).await?;
            Err(error)
        }
    }
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
        Err(error)
            if is_serialization_failure(&error) && session.transaction() == Transaction::None =>
        {
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

pub(crate) fn is_serialization_failure(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _)
    )
}
