//! The session of an asynchronous connection, over diesel-async.
//!
//! diesel-async's `RunQueryDsl` is implemented for every type, so it must not be imported here: its methods would shadow
//! others of the same names.

use std::future::poll_fn;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};

use diesel::connection::TransactionManagerStatus;
use diesel::deserialize::{FromSql, FromSqlRow};
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::query_dsl::CompatibleType;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel::row::{Field, Row};
use diesel::sql_types::{Bool, Nullable, Text};
use diesel_async::{
    AnsiTransactionManager, AsyncConnectionCore, AsyncPgConnection, SimpleAsyncConnection,
    TransactionManager,
};

use super::{Probe, Reply, Session, Statement};
use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::text::Name;
use crate::transaction::Transaction;

/// A statement whose rows load as `U` on an asynchronous connection.
pub(crate) trait AsyncStatement<U> {
    /// Turns the statement into text and binds at once. The future does not hold the statement, so no lifetime of the
    /// statement is part of it, and it is `Send`.
    fn send<'conn>(self, conn: &'conn mut AsyncPgConnection) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        U: Send + 'conn;
}

impl<Q, U> AsyncStatement<U> for Q
where
    Q: Query + QueryFragment<Pg> + QueryId + RunQueryDsl<AsyncPgConnection>,
    Q::SqlType: CompatibleType<U, Pg>,
    Pg: QueryMetadata<Q::SqlType>,
    U: FromSqlRow<<Q::SqlType as CompatibleType<U, Pg>>::SqlType, Pg>,
{
    fn send<'conn>(self, conn: &'conn mut AsyncPgConnection) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        U: Send + 'conn,
    {
        let rows = AsyncConnectionCore::load(conn, Unchanged(self));
        Box::pin(async move {
            let mut rows = rows.await?;
            let mut loaded = Vec::new();
            while let Some(row) = poll_fn(|context| rows.as_mut().poll_next(context)).await {
                loaded.push(U::build_from_row(&row?).map_err(DieselError::DeserializationError)?);
            }
            Ok(loaded)
        })
    }
}

/// A statement as it is. It implements [`Query`] by itself, where the compiler does not see that `Q` does.
struct Unchanged<Q>(Q);

impl<Q: Query> Query for Unchanged<Q> {
    type SqlType = Q::SqlType;
}

impl<Q: QueryId> QueryId for Unchanged<Q> {
    type QueryId = Q::QueryId;
    const HAS_STATIC_QUERY_ID: bool = Q::HAS_STATIC_QUERY_ID;
}

impl<Q: QueryFragment<Pg>> QueryFragment<Pg> for Unchanged<Q> {
    fn walk_ast<'b>(&'b self, out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out)
    }
}

/// A statement that can be sent with the [`ProbeColumns`] behind its own.
pub(crate) trait Probed: QueryFragment<Pg> {
    /// For a statement that ends with its columns. Any other puts them elsewhere.
    fn walk_probed<'b>(
        &'b self,
        mut out: AstPass<'_, 'b, Pg>,
        columns: &'b ProbeColumns,
    ) -> QueryResult<()> {
        self.walk_ast(out.reborrow())?;
        columns.walk_ast(out)
    }
}

impl Probed for diesel::query_builder::SqlQuery {}

/// Without a `FROM`, a statement ends with its columns.
impl<E> Probed for diesel::dsl::select<E> where Self: QueryFragment<Pg> {}

/// The columns of a probe, which finds an open transaction.
#[derive(Debug, Clone)]
pub(crate) enum ProbeColumns {
    /// It is known whether a transaction is open.
    None,
    IsInside,
    /// And the number under which the session notes that the statement ran.
    IsInsideAndNote(String),
}

/// Whether the statement was sent inside a transaction.
///
/// Outside a transaction PostgreSQL begins one when it binds the parameters of a statement. So `now()` is then the time at which
/// the statement's portal, the one without a name, was created. Inside a transaction `now()` is earlier.
///
/// `statement_timestamp()` is the time at which the execution began. It differs from `now()` by the time for binding: 1 to 10
/// microseconds, more on a busy server. Inside a transaction it differs by 6 at least. So only if the difference is larger than 5
/// the portal is looked up, which makes the statement cost the server 7 microseconds more, instead of 3.
///
/// PostgreSQL prepares the subquery for each execution, also where it is not reached. A query inside `ts_rewrite` is not prepared,
/// but runs longer. With 64 tasks on two cores it runs often, and a lock took a quarter longer.
const IS_INSIDE: &str = ", CASE WHEN pg_catalog.statement_timestamp() OPERATOR(pg_catalog.>=) pg_catalog.now() \
    AND pg_catalog.statement_timestamp() OPERATOR(pg_catalog.<=) \
    (pg_catalog.now() OPERATOR(pg_catalog.+) '5 microseconds'::pg_catalog.interval) THEN false \
    ELSE (SELECT portal.creation_time OPERATOR(pg_catalog.<>) pg_catalog.now() \
    FROM pg_catalog.pg_cursor() AS portal WHERE portal.name OPERATOR(pg_catalog.=) '') END";

impl QueryFragment<Pg> for ProbeColumns {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        match self {
            Self::None => {}
            Self::IsInside => out.push_sql(IS_INSIDE),
            Self::IsInsideAndNote(note) => {
                out.push_sql(IS_INSIDE);
                out.push_sql(", pg_catalog.set_config('diesel_interlock.ran', ");
                out.push_bind_param::<Text, _>(note)?;
                out.push_sql(", false)");
            }
        }
        Ok(())
    }
}

/// A statement that is sent as a probe. Also returns whether it was sent inside a transaction, if that was asked.
pub(crate) trait AsyncProbe<U> {
    fn send_probed<'conn>(
        self,
        conn: &'conn AsyncPgConnection,
        columns: ProbeColumns,
    ) -> Reply<'conn, QueryResult<(U, Option<bool>)>>
    where
        U: Send + 'conn;
}

impl<Q, U> AsyncProbe<U> for Q
where
    Q: Probed + Query + QueryId + RunQueryDsl<AsyncPgConnection>,
    Q::SqlType: CompatibleType<U, Pg>,
    Pg: QueryMetadata<Q::SqlType>,
    U: FromSqlRow<<Q::SqlType as CompatibleType<U, Pg>>::SqlType, Pg>,
{
    fn send_probed<'conn>(
        self,
        conn: &'conn AsyncPgConnection,
        columns: ProbeColumns,
    ) -> Reply<'conn, QueryResult<(U, Option<bool>)>>
    where
        U: Send + 'conn,
    {
        let mut conn = conn;
        // How many columns follow that of the probe.
        let (rows, behind) = match columns {
            ProbeColumns::None => {
                let sent = WithProbe::<Q, 0>(self, columns);
                (AsyncConnectionCore::load(&mut conn, sent), None)
            }
            ProbeColumns::IsInside => {
                let sent = WithProbe::<Q, 1>(self, columns);
                (AsyncConnectionCore::load(&mut conn, sent), Some(0))
            }
            ProbeColumns::IsInsideAndNote(_) => {
                let sent = WithProbe::<Q, 2>(self, columns);
                (AsyncConnectionCore::load(&mut conn, sent), Some(1))
            }
        };
        Box::pin(async move {
            let mut rows = rows.await?;
            let row = poll_fn(|context| rows.as_mut().poll_next(context)).await;
            let row = row.ok_or(DieselError::NotFound)??;
            let is_inside = behind
                .map(|behind| read_is_inside(&row, behind))
                .transpose()?;
            let value = U::build_from_row(&row).map_err(DieselError::DeserializationError)?;
            // An error of the commit comes after the row.
            while let Some(row) = poll_fn(|context| rows.as_mut().poll_next(context)).await {
                row?;
            }
            Ok((value, is_inside))
        })
    }
}

/// A statement with the columns of a probe. Their number changes its text, and so its id.
struct WithProbe<Q, const COLUMNS: u8>(Q, ProbeColumns);

impl<Q: Query, const COLUMNS: u8> Query for WithProbe<Q, COLUMNS> {
    type SqlType = Q::SqlType;
}

impl<Q: QueryId, const COLUMNS: u8> QueryId for WithProbe<Q, COLUMNS> {
    type QueryId = WithProbe<Q::QueryId, COLUMNS>;
    const HAS_STATIC_QUERY_ID: bool = Q::HAS_STATIC_QUERY_ID;
}

impl<Q: Probed, const COLUMNS: u8> QueryFragment<Pg> for WithProbe<Q, COLUMNS> {
    fn walk_ast<'b>(&'b self, out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_probed(out, &self.1)
    }
}

/// Reads whether the statement was sent inside a transaction. `behind` columns follow it.
fn read_is_inside<'row>(row: &impl Row<'row, Pg>, behind: usize) -> QueryResult<bool> {
    let at = row.field_count() - 1 - behind;
    let field = row.get(at).ok_or(DieselError::NotFound)?;
    <bool as FromSql<Bool, Pg>>::from_nullable_sql(field.value())
        .map_err(DieselError::DeserializationError)
}

/// The session of an asynchronous connection.
pub(crate) struct Asynchronous<'conn> {
    conn: &'conn mut AsyncPgConnection,
    is_pooled: bool,
    /// Whether certainly no transaction is open.
    is_outside: bool,
    lent: Option<&'conn mut Lent>,
}

/// The statements of a guard on a connection that the caller lends. Each of them notes its number in the session as it runs.
///
/// When such a guard is dropped, its connection can neither be awaited nor discarded. The unlock that is then queued depends
/// on whether the statement before it ran.
///
/// A statement that is cancelled at its end has locked or unlocked, and PostgreSQL takes the note back. So after an error a
/// missing note does not show that nothing was locked or unlocked.
#[derive(Debug, Default)]
pub(crate) struct Lent {
    /// The number of the last statement.
    pub(crate) sent: Option<String>,
    /// Whether an outer guard holds the same lock, so that an unlock must not be sent twice.
    pub(crate) is_nested: bool,
}

impl Lent {
    /// Returns the number of the next statement. No two statements of a process have the same.
    fn next(&mut self) -> String {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = format!("{}.{number}", std::process::id());
        self.sent = Some(number.clone());
        number
    }
}

impl<'conn> Asynchronous<'conn> {
    /// On a connection that the caller lends.
    pub(crate) fn lent(conn: &'conn mut AsyncPgConnection) -> Self {
        Self {
            conn,
            is_pooled: false,
            is_outside: false,
            lent: None,
        }
    }

    /// On a connection out of a pool.
    pub(crate) fn pooled(conn: &'conn mut AsyncPgConnection) -> Self {
        Self {
            conn,
            is_pooled: true,
            is_outside: false,
            lent: None,
        }
    }

    /// With `is_outside`, a probe found no transaction, and only this crate has used the connection since.
    pub(crate) fn outside_transaction(self, is_outside: bool) -> Self {
        Self { is_outside, ..self }
    }

    /// On a connection that the caller lends to a guard.
    pub(crate) fn noted(conn: &'conn mut AsyncPgConnection, lent: &'conn mut Lent) -> Self {
        Self {
            conn,
            is_pooled: false,
            is_outside: false,
            lent: Some(lent),
        }
    }
}

impl Asynchronous<'_> {
    /// Lends the connection.
    pub(crate) fn conn(&mut self) -> &mut AsyncPgConnection {
        self.conn
    }

    /// Returns whether a transaction is open that Diesel does not know of. Not prepared, so two round trips, and one or two more
    /// if one may be open.
    pub(crate) async fn is_inside_transaction(&mut self) -> QueryResult<bool> {
        let (_, is_inside) = look(self.conn).await?;
        Ok(is_inside && is_in_block(self.conn).await)
    }
}

impl Session for Asynchronous<'_> {
    fn transaction(&mut self) -> Transaction {
        let Ok(depth) = status(self.conn).transaction_depth() else {
            return Transaction::Broken;
        };
        let depth = depth.map(|depth| depth.get());
        let is_broken = AnsiTransactionManager::is_broken_transaction_manager(&mut *self.conn);
        match depth {
            // The future of a BEGIN was dropped.
            None if is_broken => Transaction::Broken,
            None => Transaction::None,
            Some(1) if !is_broken => Transaction::Test,
            Some(_) => Transaction::Open,
        }
    }

    fn depth(&mut self) -> u32 {
        // Without a transaction, only the dropped future of a `BEGIN`, a `SAVEPOINT` or their end counts as broken.
        let known = std::mem::take(status(self.conn));
        let is_dropped = AnsiTransactionManager::is_broken_transaction_manager(&mut *self.conn);
        *status(self.conn) = known;
        if is_dropped {
            return u32::MAX;
        }
        let depth = status(self.conn).transaction_depth();
        depth.ok().flatten().map_or(0, NonZeroU32::get)
    }

    fn is_pooled(&self) -> bool {
        self.is_pooled
    }

    /// A prefix of the tests reaches it by the task, the thread or the process, because diesel-async has no place for one in
    /// a connection that can be read back.
    fn name<'a>(&mut self, name: &'a str) -> Name<'a> {
        Name::anywhere(name)
    }

    fn lock_id(&mut self, key: &LockKey) -> Result<LockId> {
        key.id()
    }

    fn one<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<U>>
    where
        Q: Statement<U>,
        U: Send + 'conn,
    {
        let rows = statement.send(self.conn);
        Box::pin(async move {
            let row = rows.await?.into_iter().next();
            row.ok_or(DieselError::NotFound)
        })
    }

    fn all<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        Q: Statement<U>,
        U: Send + 'conn,
    {
        statement.send(self.conn)
    }

    fn execute<'conn, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<usize>>
    where
        Q: QueryFragment<Pg> + QueryId,
    {
        let changed = AsyncConnectionCore::execute_returning_count(self.conn, statement);
        Box::pin(changed)
    }

    /// diesel-async does not read the server's transaction status, so the mark cannot be the probe that it is in the
    /// blocking half. The statement returns one more column instead.
    fn send_probe<'conn, U, Q>(
        &'conn mut self,
        statement: Q,
    ) -> Reply<'conn, (QueryResult<U>, bool)>
    where
        Q: Probe<U>,
        U: Send + 'conn,
    {
        let is_known = matches!(self.transaction(), Transaction::Test | Transaction::Open);
        let is_nested = self.lent.as_ref().is_some_and(|lent| lent.is_nested);
        let note = self.lent.as_mut().map(|lent| lent.next());
        let columns = match &note {
            Some(note) => ProbeColumns::IsInsideAndNote(note.clone()),
            None if is_known || self.is_outside => ProbeColumns::None,
            None => ProbeColumns::IsInside,
        };
        let conn = &*self.conn;
        let sent = statement.send_probed(conn, columns);
        Box::pin(async move {
            match sent.await {
                reply if is_known => (reply.map(|(value, _)| value), false),
                Ok((value, Some(true))) => (Ok(value), is_in_block(conn).await),
                Ok((value, _)) => (Ok(value), false),
                // In an aborted transaction, and on a closed connection, the look fails, too.
                Err(error) => match look(conn).await {
                    Ok((ran, _)) => (Err(error), note.is_some() && ran != note && !is_nested),
                    Err(_) => (Err(error), true),
                },
            }
        })
    }

    fn batch<'conn>(&'conn mut self, sql: &'conn str) -> Reply<'conn, QueryResult<()>> {
        Box::pin(SimpleAsyncConnection::batch_execute(self.conn, sql))
    }

    /// A session that the server ends reports it as an error of unknown kind, and its socket is closed a moment later. So an
    /// empty message follows, which fails on a closed connection only.
    fn has_ended<'conn>(&'conn mut self, error: &DieselError) -> Reply<'conn, bool> {
        let is_closed = super::is_closed(error);
        let is_unknown = matches!(
            error,
            DieselError::DatabaseError(DatabaseErrorKind::Unknown, _)
        );
        Box::pin(async move {
            is_closed
                || is_unknown
                    && SimpleAsyncConnection::batch_execute(self.conn, "")
                        .await
                        .is_err()
        })
    }

    fn mark_broken(&mut self) {
        status(self.conn).set_in_error();
    }

    fn clear_mark(&mut self) {
        *status(self.conn) = TransactionManagerStatus::default();
    }

    fn begin(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::begin_transaction(&mut *self.conn))
    }

    fn begin_read_committed(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::begin_transaction_sql(
            &mut *self.conn,
            super::BEGIN_READ_COMMITTED,
        ))
    }

    fn commit(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::commit_transaction(&mut *self.conn))
    }

    fn rollback(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::rollback_transaction(
            &mut *self.conn,
        ))
    }
}

/// Returns the setting that [`Lent`] writes, and whether a transaction is open. Not prepared, because some code may have
/// deallocated the prepared statements.
async fn look(mut conn: &AsyncPgConnection) -> QueryResult<(Option<String>, bool)> {
    let query =
        diesel::sql_query("SELECT pg_catalog.current_setting('diesel_interlock.ran', true)");
    let query = WithProbe::<_, 1>(query, ProbeColumns::IsInside);
    let mut rows = AsyncConnectionCore::load(&mut conn, query).await?;
    let row = poll_fn(|context| rows.as_mut().poll_next(context)).await;
    let row = row.ok_or(DieselError::NotFound)??;
    let ran = row.get(0).ok_or(DieselError::NotFound)?;
    let ran = <Option<String> as FromSql<Nullable<Text>, Pg>>::from_nullable_sql(ran.value())
        .map_err(DieselError::DeserializationError)?;
    Ok((ran, read_is_inside(&row, 0)?))
}

/// Returns whether a transaction is open, after a probe said so. PgBouncer sends a `Parse` of its own in front of a statement that
/// its server does not know yet, so the transaction of the statement is then older than its portal. `SAVEPOINT` fails outside a
/// transaction. If it fails inside, because it was cancelled, the transaction is aborted, so the next statement fails, too.
async fn is_in_block(mut conn: &AsyncPgConnection) -> bool {
    let savepoint = "SAVEPOINT diesel_interlock; RELEASE SAVEPOINT diesel_interlock";
    SimpleAsyncConnection::batch_execute(&mut conn, savepoint)
        .await
        .is_ok()
        || SimpleAsyncConnection::batch_execute(&mut conn, "SELECT 1")
            .await
            .is_err_and(|error| !super::is_closed(&error))
}

fn status(conn: &mut AsyncPgConnection) -> &mut TransactionManagerStatus {
    <AnsiTransactionManager as TransactionManager<AsyncPgConnection>>::transaction_manager_status_mut(conn)
}
