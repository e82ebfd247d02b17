//! Diesel's blocking connection, whose replies are always ready.
//!
//! This file and `asynchronous.rs` are the only ones that use the transaction manager below the
//! stable interface: Diesel hides `transaction_manager_status_mut`, so this crate is pinned to a
//! minor version of Diesel.
//!
//! **The mark as a probe.** Diesel can mark a connection as broken, and removes the mark at the
//! server's first reply that reports no open transaction. So the crate sets the mark before a
//! statement. If the mark is still there afterwards, plain SQL has opened a transaction; this costs
//! no round trip. diesel-async does not read the server's transaction status, so in that half the
//! crate trusts diesel-async's own count.

use std::future::{Ready, ready};

use diesel::connection::{
    AnsiTransactionManager, DefaultLoadingMode, LoadConnection, SimpleConnection,
    TransactionManager, TransactionManagerStatus,
};
use diesel::deserialize::FromSqlRow;
use diesel::expression::QueryMetadata;
use diesel::pg::{Pg, PgConnection};
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

use super::{Session, Transaction, is_closed, run_ready};
use crate::statement::{Query, Statement};

impl Session for PgConnection {
    type Sent<'c, T: Send + 'c> = Ready<T>;

    fn transaction(&mut self) -> Transaction {
        let Ok(depth) = status(self).transaction_depth() else {
            return Transaction::Broken;
        };
        match depth.map(|depth| depth.get()) {
            None => Transaction::None,
            // Diesel reports every open transaction as broken, except a test transaction.
            Some(1) if !is_marked(self) => Transaction::Test,
            Some(_) => Transaction::Open,
        }
    }

    fn depth(&mut self) -> u32 {
        status(self)
            .transaction_depth()
            .ok()
            .flatten()
            .map_or(0, |depth| depth.get())
    }

    fn mark_broken(&mut self) {
        status(self).set_in_error();
    }

    fn is_closed(&mut self) -> bool {
        false
    }

    fn was_not_sent(error: &DieselError) -> bool {
        matches!(
            error,
            DieselError::DatabaseError(DatabaseErrorKind::UnableToSendCommand, _)
        )
    }

    /// Diesel clears the mark at the first reply of the server that reports no open transaction. So
    /// the mark is set before the statement; if it is still there after the reply, plain SQL has
    /// opened a transaction.
    fn probe<'c, T, U>(&'c mut self, statement: &Statement<T>) -> Ready<(QueryResult<U>, bool)>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send + 'c,
    {
        if matches!(self.transaction(), Transaction::Test | Transaction::Open) {
            return ready((load(self, statement), false));
        }
        self.mark_broken();
        let reply = load(self, statement);
        let is_open = matches!(reply, Ok(_) | Err(DieselError::NotFound)) && is_marked(self);
        ready((reply, is_open))
    }

    fn one<'c, T, U>(&'c mut self, statement: &Statement<T>) -> Ready<QueryResult<U>>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send + 'c,
    {
        ready(load(self, statement))
    }

    fn batch<'c>(&'c mut self, sql: &'c str) -> Ready<QueryResult<()>> {
        ready(self.batch_execute(sql))
    }

    /// libpq may report a closed connection only at the next statement.
    fn is_alive(&mut self) -> Ready<bool> {
        ready(!self.batch_execute("").is_err_and(|error| is_closed(&error)))
    }

    /// `probe` sees every transaction.
    fn end_unseen_transaction(&mut self) {}

    fn begin(&mut self) -> Ready<QueryResult<()>> {
        ready(match self.transaction() {
            Transaction::None => AnsiTransactionManager::begin_transaction_sql(self, super::BEGIN),
            _ => AnsiTransactionManager::begin_transaction(self),
        })
    }

    fn commit(&mut self) -> Ready<QueryResult<()>> {
        ready(AnsiTransactionManager::commit_transaction(self))
    }

    fn rollback(&mut self) -> Ready<QueryResult<()>> {
        ready(AnsiTransactionManager::rollback_transaction(self))
    }
}

/// Diesel leaves the last result of a `COPY` unread, and libpq sends nothing until it is read. An
/// empty message reads it, and then the statement is sent again.
fn load<T, U>(conn: &mut PgConnection, statement: &Statement<T>) -> QueryResult<U>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg>,
{
    match load_once(conn, statement) {
        Err(error) if PgConnection::was_not_sent(&error) && run_ready(conn.is_alive()) => {
            load_once(conn, statement)
        }
        loaded => loaded,
    }
}

fn load_once<T, U>(conn: &mut PgConnection, statement: &Statement<T>) -> QueryResult<U>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg>,
{
    let row = LoadConnection::<DefaultLoadingMode>::load(conn, Query(statement))?
        .next()
        .ok_or(DieselError::NotFound)??;
    U::build_from_row(&row).map_err(DieselError::DeserializationError)
}

fn is_marked(conn: &mut PgConnection) -> bool {
    <AnsiTransactionManager as TransactionManager<PgConnection>>::is_broken_transaction_manager(
        conn,
    )
}

fn status(conn: &mut PgConnection) -> &mut TransactionManagerStatus {
    <AnsiTransactionManager as TransactionManager<PgConnection>>::transaction_manager_status_mut(
        conn,
    )
}
