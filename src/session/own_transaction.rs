//! Transactions that this crate opens, and what becomes of one whose future is dropped.

use diesel::result::{Error as DieselError, QueryResult};

use super::{Session, started, undo};
use crate::error::Error;
use crate::panics::caught;
use crate::transaction::Transaction;

const ROLLBACK: &str = "ROLLBACK";

/// A transaction of this crate's own, or its savepoint inside a test transaction. Unless it [ends](Self::end), its drop rolls
/// it back, on every way out: a panic, or a future that was dropped.
///
/// A drop cannot await. On an asynchronous session it queues the rollback behind the statements that were sent, and marks the
/// connection as broken, because diesel-async does not learn that the transaction has ended.
pub(crate) struct OwnTransaction<'s, S: Session> {
    session: &'s mut S,
    /// What the drop sends. Nothing once the end was sent.
    rollback: Option<&'static str>,
    is_ended: bool,
    /// The depth of this transaction, as far as Diesel knows.
    depth: u32,
}

impl<'s, S: Session> OwnTransaction<'s, S> {
    /// Opens a transaction at READ COMMITTED.
    pub(crate) async fn begin_read_committed(session: &'s mut S) -> QueryResult<Self> {
        let transaction = Self::of(session, ROLLBACK);
        let begun = transaction.session.begin_read_committed().await;
        transaction.begun(begun)
    }

    /// Opens a transaction at the session's default isolation level.
    #[cfg(any(feature = "r2d2", feature = "async"))]
    pub(crate) async fn begin(session: &'s mut S) -> QueryResult<Self> {
        let transaction = Self::of(session, ROLLBACK);
        let begun = transaction.session.begin().await;
        transaction.begun(begun)
    }

    /// Sets a savepoint inside a test transaction, under the name that Diesel gives the first one.
    pub(crate) async fn begin_in_test(session: &'s mut S) -> QueryResult<Self> {
        let transaction = Self::of(
            session,
            "ROLLBACK TO SAVEPOINT diesel_savepoint_1; RELEASE SAVEPOINT diesel_savepoint_1",
        );
        let begun = transaction.session.begin().await;
        transaction.begun(begun)
    }

    fn of(session: &'s mut S, rollback: &'static str) -> Self {
        Self {
            session,
            rollback: Some(rollback),
            is_ended: false,
            depth: 0,
        }
    }

    fn begun(mut self, begun: QueryResult<()>) -> QueryResult<Self> {
        self.is_ended = begun.is_err();
        self.depth = self.session.depth();
        begun.map(|()| self)
    }

    /// The session on which the transaction is open.
    pub(crate) fn session(&mut self) -> &mut S {
        self.session
    }

    /// Rolls back.
    #[cfg(any(feature = "r2d2", feature = "async"))]
    pub(crate) async fn roll_back(mut self) -> QueryResult<()> {
        self.rollback = None;
        let rolled_back = self.session.rollback().await;
        self.is_ended = true;
        rolled_back
    }

    /// Commits after `Ok`, and rolls back after `Err`, which is returned also if the session has ended.
    ///
    /// If a transaction that was nested in this one is still open, as after a dropped future or a caught panic, this rolls back in
    /// any case. Diesel would end the nested one instead, and report that it has committed.
    pub(crate) async fn end<T, E>(mut self, outcome: Result<T, E>) -> Result<T, E>
    where
        E: From<Error>,
    {
        if self.session.depth() > self.depth {
            return self.abandon(outcome).await;
        }
        self.rollback = None;
        let ended = match &outcome {
            Ok(_) => self.session.commit().await,
            Err(_) => match undo(self.session).await {
                Err(error) if self.session.has_ended(&error).await => {
                    self.session.mark_broken();
                    Ok(())
                }
                undone => undone,
            },
        };
        self.is_ended = true;
        ended.map_err(Error::from)?;
        outcome
    }

    /// Rolls back. Inside a test transaction the connection stays marked as broken, because Diesel counts the nested transaction
    /// as open.
    async fn abandon<T, E>(mut self, outcome: Result<T, E>) -> Result<T, E>
    where
        E: From<Error>,
    {
        let rolled_back = match self.rollback {
            Some(rollback) => self.session.batch(rollback).await.is_ok() && rollback == ROLLBACK,
            None => false,
        };
        if rolled_back {
            self.session.clear_mark();
        }
        if !rolled_back || self.session.transaction() != Transaction::None {
            self.session.mark_broken();
        }
        self.is_ended = true;
        outcome?;
        Err(Error::Database(DieselError::BrokenTransactionManager).into())
    }
}

impl<S: Session> Drop for OwnTransaction<'_, S> {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        if let Some(rollback) = self.rollback {
            caught(|| started(self.session.batch(rollback)));
        }
        if self.session.transaction() != Transaction::None {
            self.session.mark_broken();
        }
    }
}
