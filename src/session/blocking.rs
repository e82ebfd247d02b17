//! The session of a blocking connection, over libpq.

use diesel::connection::{
    AnsiTransactionManager, Connection, SimpleConnection, TransactionManager,
};
use diesel::pg::{Pg, PgConnection};
use diesel::query_builder::{QueryFragment, QueryId};
use diesel::query_dsl::{RunQueryDsl, methods::LoadQuery};
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

use super::{BEGIN_READ_COMMITTED, Probe, Reply, Session, Statement};
use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::text::Name;
use crate::transaction::{self, Transaction};

/// A statement whose rows load as `U` on a blocking connection.
pub(crate) trait BlockingStatement<U> {
    fn load(&self, conn: &mut PgConnection) -> QueryResult<U>;

    fn load_all(&self, conn: &mut PgConnection) -> QueryResult<Vec<U>>;
}

impl<'query, Q, U> BlockingStatement<U> for Q
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

impl Blocking<'_> {
    /// Lends the connection.
    pub(crate) fn conn(&mut self) -> &mut PgConnection {
        self.conn
    }
}

impl Session for Blocking<'_> {
    fn transaction(&mut self) -> Transaction {
        transaction::of(self.conn)
    }

    fn depth(&mut self) -> u32 {
        transaction::depth(self.conn)
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

    fn send_probe<'conn, U, Q>(
        &'conn mut self,
        statement: Q,
    ) -> Reply<'conn, (QueryResult<U>, bool)>
    where
        Q: Probe<U>,
        U: Send + 'conn,
    {
        ready(transaction::probed(self.conn, |conn| {
            sent(conn, |conn| statement.load(conn))
        }))
    }

    fn batch<'conn>(&'conn mut self, sql: &'conn str) -> Reply<'conn, QueryResult<()>> {
        ready(self.conn.batch_execute(sql))
    }

    fn has_ended<'conn>(&'conn mut self, error: &DieselError) -> Reply<'conn, bool> {
        ready(super::is_closed(error))
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
