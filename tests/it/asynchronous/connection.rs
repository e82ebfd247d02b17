//! A connection of diesel-async as a blocking one of Diesel.

use std::fmt;

use diesel::connection::{
    CacheSize, Connection, ConnectionSealed, Instrumentation, LoadConnection, SimpleConnection,
    TransactionManager, TransactionManagerStatus,
};
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::query_builder::{Query, QueryFragment, QueryId};
use diesel::result::Error as DieselError;
use diesel::{ConnectionResult, QueryResult};
use diesel_async::pooled_connection::PoolableConnection;
use diesel_async::{AsyncConnection, AsyncConnectionCore, AsyncPgConnection};
use ref_cast::RefCast;

use super::block_on;

/// A connection whose methods block. A reference to an [`AsyncPgConnection`] can be seen as one to this.
#[derive(RefCast)]
#[repr(transparent)]
pub(crate) struct PgConnection(pub(super) AsyncPgConnection);

type AsyncManager = diesel_async::AnsiTransactionManager;

/// The same name as Diesel's, for this connection.
pub(crate) struct AnsiTransactionManager;

/// Rolls back a transaction that Diesel opened and that was aborted. diesel-async does not see a `ROLLBACK` that is sent as
/// plain SQL, unless the connection is marked as broken.
pub(crate) fn roll_back(conn: &mut PgConnection) {
    if AnsiTransactionManager::rollback_transaction(conn).is_err() {
        assert!(is_broken(conn));
        conn.batch_execute("ROLLBACK").unwrap();
    }
}

/// Whether a pool would discard the connection.
pub(crate) fn is_broken(conn: &mut PgConnection) -> bool {
    conn.0.is_broken()
}

impl PgConnection {
    pub(crate) fn build_transaction(&mut self) -> TransactionBuilder<'_> {
        TransactionBuilder {
            conn: self,
            begin: String::from("BEGIN TRANSACTION"),
        }
    }
}

impl fmt::Debug for PgConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgConnection").finish_non_exhaustive()
    }
}

impl SimpleConnection for PgConnection {
    fn batch_execute(&mut self, query: &str) -> QueryResult<()> {
        block_on(diesel_async::SimpleAsyncConnection::batch_execute(
            &mut self.0,
            query,
        ))
    }
}

impl ConnectionSealed for PgConnection {}

impl Connection for PgConnection {
    type Backend = Pg;
    type TransactionManager = AnsiTransactionManager;

    fn establish(url: &str) -> ConnectionResult<Self> {
        let url = super::database::async_url(url);
        block_on(<AsyncPgConnection as AsyncConnection>::establish(&url)).map(Self)
    }

    fn execute_returning_count<T>(&mut self, source: &T) -> QueryResult<usize>
    where
        T: QueryFragment<Pg> + QueryId,
    {
        block_on(AsyncConnectionCore::execute_returning_count(
            &mut self.0,
            source,
        ))
    }

    fn transaction_state(&mut self) -> &mut diesel_async::AnsiTransactionManager {
        AsyncConnection::transaction_state(&mut self.0)
    }

    fn instrumentation(&mut self) -> &mut dyn Instrumentation {
        AsyncConnection::instrumentation(&mut self.0)
    }

    fn set_instrumentation(&mut self, instrumentation: impl Instrumentation) {
        AsyncConnection::set_instrumentation(&mut self.0, instrumentation);
    }

    fn set_prepared_statement_cache_size(&mut self, size: CacheSize) {
        AsyncConnection::set_prepared_statement_cache_size(&mut self.0, size);
    }
}

type Row = <AsyncPgConnection as AsyncConnectionCore>::Row<'static, 'static>;

impl LoadConnection for PgConnection {
    type Cursor<'conn, 'query> = std::vec::IntoIter<QueryResult<Row>>;
    type Row<'conn, 'query> = Row;

    fn load<'conn, 'query, T>(
        &'conn mut self,
        source: T,
    ) -> QueryResult<Self::Cursor<'conn, 'query>>
    where
        T: Query + QueryFragment<Pg> + QueryId + 'query,
        Pg: QueryMetadata<T::SqlType>,
    {
        block_on(async {
            let mut stream = AsyncConnectionCore::load(&mut self.0, AsIs(source)).await?;
            let mut rows = Vec::new();
            while let Some(row) =
                std::future::poll_fn(|context| stream.as_mut().poll_next(context)).await
            {
                rows.push(row);
            }
            Ok(rows.into_iter())
        })
    }
}

/// A query as it is, where the compiler does not see that it is `AsQuery` for its own type.
struct AsIs<Q>(Q);

impl<Q: Query> Query for AsIs<Q> {
    type SqlType = Q::SqlType;
}

impl<Q: QueryId> QueryId for AsIs<Q> {
    type QueryId = Q::QueryId;
    const HAS_STATIC_QUERY_ID: bool = Q::HAS_STATIC_QUERY_ID;
}

impl<Q: QueryFragment<Pg>> QueryFragment<Pg> for AsIs<Q> {
    fn walk_ast<'b>(&'b self, out: diesel::query_builder::AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out)
    }
}

impl TransactionManager<PgConnection> for AnsiTransactionManager {
    type TransactionStateData = AsyncManager;

    fn begin_transaction(conn: &mut PgConnection) -> QueryResult<()> {
        block_on(
            <AsyncManager as diesel_async::TransactionManager<_>>::begin_transaction(&mut conn.0),
        )
    }

    fn rollback_transaction(conn: &mut PgConnection) -> QueryResult<()> {
        block_on(
            <AsyncManager as diesel_async::TransactionManager<_>>::rollback_transaction(
                &mut conn.0,
            ),
        )
    }

    fn commit_transaction(conn: &mut PgConnection) -> QueryResult<()> {
        block_on(
            <AsyncManager as diesel_async::TransactionManager<_>>::commit_transaction(&mut conn.0),
        )
    }

    fn transaction_manager_status_mut(conn: &mut PgConnection) -> &mut TransactionManagerStatus {
        <AsyncManager as diesel_async::TransactionManager<_>>::transaction_manager_status_mut(
            &mut conn.0,
        )
    }

    fn is_broken_transaction_manager(conn: &mut PgConnection) -> bool {
        <AsyncManager as diesel_async::TransactionManager<_>>::is_broken_transaction_manager(
            &mut conn.0,
        )
    }
}

/// A transaction with an isolation level of its own.
#[must_use]
pub(crate) struct TransactionBuilder<'conn> {
    conn: &'conn mut PgConnection,
    begin: String,
}

impl TransactionBuilder<'_> {
    fn with(mut self, words: &str) -> Self {
        self.begin += words;
        self
    }

    pub(crate) fn read_only(self) -> Self {
        self.with(" READ ONLY")
    }

    pub(crate) fn read_committed(self) -> Self {
        self.with(" ISOLATION LEVEL READ COMMITTED")
    }

    pub(crate) fn repeatable_read(self) -> Self {
        self.with(" ISOLATION LEVEL REPEATABLE READ")
    }

    pub(crate) fn serializable(self) -> Self {
        self.with(" ISOLATION LEVEL SERIALIZABLE")
    }

    pub(crate) fn run<T, E, F>(&mut self, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<DieselError>,
    {
        let conn = &mut *self.conn;
        block_on(AsyncManager::begin_transaction_sql(
            &mut conn.0,
            &self.begin,
        ))?;
        match work(conn) {
            Ok(value) => {
                AnsiTransactionManager::commit_transaction(conn)?;
                Ok(value)
            }
            Err(error) => {
                AnsiTransactionManager::rollback_transaction(conn)?;
                Err(error)
            }
        }
    }
}
