//! A transaction that this crate opens itself, and that no way out leaves open.
//!
//! **`BEGIN … NOT DEFERRABLE`.** Inside an open transaction a plain `BEGIN` only causes a warning,
//! and the `COMMIT` that follows ends the caller's transaction. With these words PostgreSQL refuses
//! the `BEGIN` if a query has already run in that transaction, without a further round trip and in
//! both halves. Similarly, `Once` stores its mark only if `transaction_timestamp()` is still that
//! of the transaction that took the lock, because the work may have ended that transaction.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::error::{Error, Result};
use crate::session::{Session, Transaction, classify, explain, is_unknown, poll_once_quietly};
use crate::unfinished::note_closed;

/// A READ COMMITTED transaction, or a savepoint in the transaction of a test. Its drop rolls back.
/// On an asynchronous session, the rollback is queued behind what was sent, and the connection is
/// marked as broken, because diesel-async does not learn that the transaction has ended.
pub(crate) struct Own<'c, S: Session> {
    pub(crate) conn: &'c mut S,
    depth: u32,
    rollback: &'static str,
    is_open: bool,
}

/// A transaction that [`Own::leave_open`] has left open on a connection.
pub(crate) struct LeftOpen {
    depth: u32,
    rollback: &'static str,
}

impl LeftOpen {
    /// The transaction on its connection.
    pub(crate) const fn on<S: Session>(self, conn: &mut S) -> Own<'_, S> {
        Own {
            conn,
            depth: self.depth,
            rollback: self.rollback,
            is_open: true,
        }
    }
}

/// The error for a connection in this state where there must be no transaction.
pub(crate) fn refusal(transaction: Transaction) -> Error {
    match transaction {
        Transaction::Broken => DieselError::BrokenTransactionManager.into(),
        _ => Error::InsideTransaction,
    }
}

/// The error of a `BEGIN` that has failed. If plain SQL had opened a transaction, the failure has
/// aborted it. Only its owner can end it, so the connection is marked as broken, and its pool
/// closes it.
async fn not_begun<S: Session>(conn: &mut S, error: DieselError) -> Error {
    let is_outside = conn.transaction() == Transaction::None;
    match classify(conn, error).await {
        Error::Database(error) if is_outside && is_unknown(&error) && is_aborted(conn).await => {
            Error::InsideTransaction
        }
        error => error,
    }
}

/// Whether a session that is alive is in a transaction that has failed.
async fn is_aborted<S: Session>(conn: &mut S) -> bool {
    const ANY: &str = "SELECT true";
    if conn.batch(ANY).await.is_ok() {
        return false;
    }
    conn.mark_broken();
    // A blocking connection clears the mark if no transaction is open.
    conn.batch(ANY).await.is_err() && conn.transaction() == Transaction::Broken
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
            return Err(not_begun(transaction.conn, error).await);
        }
        transaction.depth = transaction.conn.depth();
        Ok(transaction)
    }

    /// As [`begin`](Self::begin), on a connection from a pool.
    pub(crate) async fn begin_pooled(conn: &'c mut S) -> Result<Self> {
        Self::begin(conn).await.map_err(|error| match error {
            Error::InsideTransaction => Error::DirtyConnection,
            error => error,
        })
    }

    /// Commits after `Ok`, and rolls back after `Err`. If a nested transaction is still open, for
    /// example after a caught panic, all is rolled back, because Diesel would commit the nested one
    /// instead.
    pub(crate) async fn end<T, E: From<Error>>(self, outcome: Result<T, E>) -> Result<T, E> {
        let ended = self.commit_or_roll_back(outcome.is_ok()).await;
        let value = outcome?;
        ended?;
        Ok(value)
    }

    /// The part of [`end`](Self::end) that a program compiles once for each half.
    async fn commit_or_roll_back(mut self, commits: bool) -> Result<()> {
        let depth = self.conn.depth();
        if depth != self.depth {
            let is_alive = self.conn.is_alive().await;
            // Before it returns, so that what the transaction holds is free for the next try.
            let before = self.conn.transaction();
            let _ = self.conn.batch(self.rollback).await;
            self.note_rollback(before);
            return Err(if !is_alive {
                let report = Box::new("the session has ended".to_owned());
                DieselError::DatabaseError(DatabaseErrorKind::ClosedConnection, report).into()
            } else if depth < self.depth {
                Error::TransactionEnded
            } else {
                refusal(Transaction::Broken)
            });
        }
        self.is_open = false;
        if !commits {
            let _ = self.conn.rollback().await;
            return Ok(());
        }
        let Err(error) = self.conn.commit().await else {
            return Ok(());
        };
        let may_be_open = is_unknown(&error) && self.depth == 1;
        let error = classify(self.conn, error).await;
        // A COMMIT that was cancelled before it began leaves the transaction open, although
        // diesel-async believes that it has ended.
        if may_be_open && self.conn.batch("ROLLBACK").await.is_err() {
            self.conn.mark_broken();
        }
        Err(error)
    }

    /// Leaves the transaction open, for [`LeftOpen::on`]. Until then nothing rolls it back.
    pub(crate) fn leave_open(mut self) -> LeftOpen {
        self.is_open = false;
        LeftOpen {
            depth: self.depth,
            rollback: self.rollback,
        }
    }

    /// Rolls back, with all transactions that are nested in it. If that fails, or if Diesel does
    /// not know how many are nested, the connection is left as it is.
    pub(crate) async fn roll_back(mut self) {
        self.is_open = false;
        let nested = self.conn.depth();
        if nested != u32::MAX {
            for _ in self.depth..=nested {
                if self.conn.rollback().await.is_err() {
                    return;
                }
            }
        }
    }

    /// Rolls back after a statement of this crate has failed, and explains the error.
    pub(crate) async fn fail(mut self, error: Error) -> Error {
        self.is_open = false;
        match (self.conn.rollback().await, error) {
            (_, Error::Database(error)) => explain(self.conn, error).await,
            (_, Error::Standby) => {
                self.conn.mark_broken();
                Error::Standby
            }
            (_, error) => error,
        }
    }
}

impl<S: Session> Own<'_, S> {
    /// Notes a rollback by plain SQL, of which Diesel does not know. `before` is what Diesel knew
    /// before it: on a blocking connection the rollback clears the mark.
    fn note_rollback(&mut self, before: Transaction) {
        self.is_open = false;
        if before == Transaction::Broken || self.conn.transaction() != Transaction::None {
            self.conn.mark_broken();
            note_closed();
        }
    }
}

impl<S: Session> Drop for Own<'_, S> {
    fn drop(&mut self) {
        if self.is_open {
            let before = self.conn.transaction();
            let _ = poll_once_quietly(self.conn.batch(self.rollback));
            self.note_rollback(before);
        }
    }
}
