//! The session of an asynchronous connection, over diesel-async.
//!
//! diesel-async's `RunQueryDsl` is implemented for every type, so it must not be imported here: its methods would shadow
//! others of the same names.

use std::future::poll_fn;

use diesel::connection::TransactionManagerStatus;
use diesel::deserialize::FromSqlRow;
use diesel::expression::QueryMetadata;
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::query_dsl::CompatibleType;
use diesel::query_dsl::methods::LoadQuery;
use diesel::result::{Error as DieselError, QueryResult};
use diesel_async::{
    AnsiTransactionManager, AsyncConnectionCore, AsyncPgConnection, SimpleAsyncConnection,
    TransactionManager,
};

use super::{Reply, Session, Statement};
use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::text::Name;
use crate::transaction::Transaction;

impl<'query, Q, U> Statement<U> for Q
where
    Q: Clone + RunQueryDsl<PgConnection> + LoadQuery<'query, PgConnection, U>,
    Q: Query + QueryFragment<Pg> + QueryId,
    Q::SqlType: CompatibleType<U, Pg>,
    Pg: QueryMetadata<Q::SqlType>,
    U: FromSqlRow<<Q::SqlType as CompatibleType<U, Pg>>::SqlType, Pg>,
{
    fn load(&self, conn: &mut PgConnection) -> QueryResult<U> {
        self.clone().get_result(conn)
    }

    fn load_all(&self, conn: &mut PgConnection) -> QueryResult<Vec<U>> {
        RunQueryDsl::load(self.clone(), conn)
    }

    /// Turns the statement into text and binds at once. The future does not hold the statement, so no lifetime of the
    /// statement is part of it, and it is `Send`.
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

/// A connection that the caller lends. A pool lends it likewise, so it is never one that this crate gives back.
impl Session for AsyncPgConnection {
    fn transaction(&mut self) -> Transaction {
        let Ok(depth) = status(self).transaction_depth() else {
            return Transaction::Broken;
        };
        match depth.map(|depth| depth.get()) {
            None => Transaction::None,
            Some(1) if !AnsiTransactionManager::is_broken_transaction_manager(self) => {
                Transaction::Test
            }
            Some(_) => Transaction::Open,
        }
    }

    fn is_pooled(&self) -> bool {
        false
    }

    /// A prefix of the tests reaches it by the thread or the process only, because diesel-async has no place for one in
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
        let rows = statement.send(self);
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
        statement.send(self)
    }

    fn execute<'conn, Q>(&'conn mut self, statement: Q) -> Reply<'conn, QueryResult<usize>>
    where
        Q: QueryFragment<Pg> + QueryId,
    {
        let changed = AsyncConnectionCore::execute_returning_count(self, statement);
        Box::pin(changed)
    }

    /// Never sees an open transaction. diesel-async does not read the server's transaction status, so the mark that
    /// serves the blocking half as a probe would stay. A throttle's attempt on a lent connection does not need to see one.
    /// Claims and session locks do, so they need another check before they become asynchronous.
    fn probe<'conn, U, Q>(&'conn mut self, statement: Q) -> Reply<'conn, (QueryResult<U>, bool)>
    where
        Q: Statement<U>,
        U: Send + 'conn,
    {
        let row = self.one(statement);
        Box::pin(async move { (row.await, false) })
    }

    fn batch<'conn>(&'conn mut self, sql: &'conn str) -> Reply<'conn, QueryResult<()>> {
        Box::pin(SimpleAsyncConnection::batch_execute(self, sql))
    }

    fn mark_broken(&mut self) {
        status(self).set_in_error();
    }

    fn clear_mark(&mut self) {
        *status(self) = TransactionManagerStatus::default();
    }

    fn begin(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::begin_transaction(self))
    }

    fn begin_read_committed(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::begin_transaction_sql(
            self,
            super::BEGIN_READ_COMMITTED,
        ))
    }

    fn commit(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::commit_transaction(self))
    }

    fn rollback(&mut self) -> Reply<'_, QueryResult<()>> {
        Box::pin(AnsiTransactionManager::rollback_transaction(self))
    }
}

fn status(conn: &mut AsyncPgConnection) -> &mut TransactionManagerStatus {
    <AnsiTransactionManager as TransactionManager<AsyncPgConnection>>::transaction_manager_status_mut(conn)
}
