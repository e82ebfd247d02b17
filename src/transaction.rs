//! A transaction of this crate's own, which no way out leaves open.

use diesel::result::{Error as DieselError, QueryResult};

use crate::call::{ended, explained};
use crate::error::{Error, Result};
use crate::session::{Session, Transaction, is_unknown, started_quietly};

/// A READ COMMITTED transaction, or a savepoint in the transaction of a test. Its drop rolls it back: on an asynchronous session
/// the rollback is queued behind what was sent, and the connection is marked as broken, because diesel-async does not learn that
/// the transaction has ended.
pub(crate) struct Own<'c, S: Session> {
    pub(crate) conn: &'c mut S,
    depth: u32,
    rollback: &'static str,
    is_open: bool,
}

/// Why a connection in this state cannot be used outside a transaction.
pub(crate) fn refusal(transaction: Transaction) -> Error {
    match transaction {
        Transaction::Broken => DieselError::BrokenTransactionManager.into(),
        _ => Error::InsideTransaction,
    }
}

impl<'c, S: Session> Own<'c, S> {
    pub(crate) async fn begin(conn: &'c mut S) -> Result<Self> {
        let rollback = match conn.transaction() {
            Transaction::None => "ROLLBACK",
            Transaction::Test => {
                "ROLLBACK TO SAVEPOINT diesel_savepoint_1; RELEASE SAVEPOINT diesel_savepoint_1"
            }
            other => return Err(refusal(other)),
        };
        let mut transaction = Self {
            conn,
            depth: 0,
            rollback,
            is_open: true,
        };
        let begun = transaction.conn.begin().await;
        transaction.is_open = begun.is_ok();
        if let Err(error) = begun {
            return Err(match ended(transaction.conn, error).await {
                Error::Database(error) if is_unknown(&error) => Error::InsideTransaction,
                error => error,
            });
        }
        transaction.depth = transaction.conn.depth();
        Ok(transaction)
    }

    /// Commits after `Ok`, and rolls back after `Err`. One that was nested in it and is still open, as after a caught panic, is
    /// rolled back with it, because Diesel would commit that one instead.
    pub(crate) async fn end<T, E: From<Error>>(mut self, outcome: Result<T, E>) -> Result<T, E> {
        if self.conn.depth() != self.depth {
            outcome?;
            return Err(refusal(Transaction::Broken).into());
        }
        self.is_open = false;
        let end: QueryResult<()> = match &outcome {
            Ok(_) => self.conn.commit().await,
            Err(_) => self.conn.rollback().await,
        };
        match (outcome, end) {
            (Ok(_), Err(error)) => Err(ended(self.conn, error).await.into()),
            (outcome, _) => outcome,
        }
    }

    /// Rolls back after a statement of this crate has failed, and says what that means.
    pub(crate) async fn failed(mut self, error: Error) -> Error {
        self.is_open = false;
        match (self.conn.rollback().await, error) {
            (_, Error::Database(error)) => explained(self.conn, error).await,
            (_, error) => error,
        }
    }
}

impl<S: Session> Drop for Own<'_, S> {
    fn drop(&mut self) {
        if self.is_open {
            let _ = started_quietly(self.conn.batch(self.rollback));
            if self.conn.transaction() != Transaction::None {
                self.conn.mark_broken();
            }
        }
    }
}
