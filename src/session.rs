//! The connections that operations send statements on: Diesel's blocking one, and diesel-async's.
#![allow(unreachable_pub)] // sealed, because nobody else can name it

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "r2d2")]
mod blocking;

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use diesel::deserialize::FromSqlRow;
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel::sql_types::Bool;

use crate::error::Error;
use crate::statement::Statement;

/// The transaction on a connection, as far as Diesel knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transaction {
    None,
    /// A transaction of `begin_test_transaction`, which counts as none.
    Test,
    Open,
    /// Unknown: the connection is broken, or marked as broken.
    Broken,
}

impl Transaction {
    pub(crate) const fn is_none(self) -> bool {
        matches!(self, Self::None | Self::Test)
    }
}

/// A server session, whose statements run one after the other.
pub trait Session: Send {
    /// The reply to a statement.
    type Sent<'c, T: Send + 'c>: Future<Output = T> + Send + 'c
    where
        Self: 'c;

    /// The transaction on the connection, as far as Diesel knows. No round trip.
    fn transaction(&mut self) -> Transaction;

    /// How many transactions are nested, as far as Diesel knows. `u32::MAX` if the future that
    /// began or ended one was dropped half way.
    fn depth(&mut self) -> u32;

    /// Marks the connection as broken, so that its pool closes it. On a blocking connection a later
    /// statement clears the mark.
    fn mark_broken(&mut self);

    /// Whether the session is known to have ended. No round trip, and always `false` for a blocking
    /// session.
    fn is_closed(&mut self) -> bool;

    /// Whether the statement surely was not sent. Always `false` for an asynchronous session,
    /// because diesel-async has one kind for all errors of a connection.
    fn was_not_sent(error: &DieselError) -> bool;

    /// As [`one`](Self::one). Also returns whether a transaction is open that Diesel does not know
    /// of, where that can be seen without a round trip. If so, the connection is marked as broken.
    fn probe<'c, T, U>(
        &'c mut self,
        statement: &Statement<T>,
    ) -> Self::Sent<'c, (QueryResult<U>, bool)>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send + 'c;

    /// Sends a statement that is prepared once per connection, and returns its row.
    fn one<'c, T, U>(&'c mut self, statement: &Statement<T>) -> Self::Sent<'c, QueryResult<U>>
    where
        Pg: QueryMetadata<T>,
        U: FromSqlRow<T, Pg> + Send + 'c;

    /// Sends statements that return nothing, in one message, when the future is first polled.
    fn batch<'c>(&'c mut self, sql: &'c str) -> Self::Sent<'c, QueryResult<()>>;

    /// Whether the session still exists, after an error of unknown kind.
    fn is_alive(&mut self) -> Self::Sent<'_, bool>;

    /// Ends a transaction that plain SQL may have left open and that [`probe`](Self::probe) does
    /// not see. Only queues messages, so there is no round trip, and nothing of ours is left open
    /// if the future of the next statement is dropped.
    fn end_unseen_transaction(&mut self);

    /// Opens a transaction at READ COMMITTED, or a savepoint inside a transaction.
    fn begin(&mut self) -> Self::Sent<'_, QueryResult<()>>;
    fn commit(&mut self) -> Self::Sent<'_, QueryResult<()>>;
    fn rollback(&mut self) -> Self::Sent<'_, QueryResult<()>>;
}

/// `NOT DEFERRABLE` makes the statement fail inside a transaction that plain SQL has opened and in
/// which a query has run.
const BEGIN: &str = "BEGIN TRANSACTION ISOLATION LEVEL READ COMMITTED, NOT DEFERRABLE";

/// Polls an operation once. On a blocking session the operation is then done, and on an
/// asynchronous one its first message is sent.
pub(crate) fn poll_once<T>(operation: impl Future<Output = T>) -> Option<T> {
    match pin!(operation).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// As [`poll_once`], for a `Drop`: a panic, for example in a connection's instrumentation, is
/// returned as an error.
pub(crate) fn poll_once_quietly<T>(
    operation: impl Future<Output = T>,
) -> std::thread::Result<Option<T>> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| poll_once(operation)))
}

/// Runs an operation on a blocking session, where one poll completes it.
#[cfg(feature = "r2d2")]
pub(crate) fn run_ready<T>(operation: impl Future<Output = T>) -> T {
    poll_once(operation)
        .unwrap_or_else(|| unreachable!("a blocking session replies before it returns"))
}

/// Whether an error has the kind that Diesel uses where it has no other.
pub(crate) const fn is_unknown(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::Unknown, _)
    )
}

/// Whether the error says that the session has ended.
pub(crate) const fn is_closed(error: &DieselError) -> bool {
    use DatabaseErrorKind::{ClosedConnection, UnableToSendCommand};
    matches!(
        error,
        DieselError::DatabaseError(ClosedConnection | UnableToSendCommand, _)
    )
}

/// Whether the session has ended, given an error from it. Returns once the server has freed the
/// locks of the transaction that failed: tokio-postgres returns the error before that, and a try on
/// another session would find them taken.
pub(crate) async fn has_ended<S: Session>(session: &mut S, error: &DieselError) -> bool {
    is_closed(error) || !session.is_alive().await
}

/// Converts an error of a statement on this crate's tables. Diesel has no kind for a missing table,
/// so another query finds out.
pub(crate) async fn explain<S: Session>(session: &mut S, error: DieselError) -> Error {
    const IS_MISSING: &str = "SELECT pg_catalog.to_regclass('resource_control.installed_migration') IS NULL \
         AS is_missing";
    match classify(session, error).await {
        Error::Database(error) if is_unknown(&error) => {
            match session.one(&Statement::<Bool>::new(IS_MISSING, [])).await {
                Ok(true) => Error::NotInstalled,
                _ => error.into(),
            }
        }
        error => error,
    }
}

/// As [`explain`], for a statement that needs no table. Diesel has no kind for a session that has
/// ended in the asynchronous half.
pub(crate) async fn classify<S: Session>(session: &mut S, error: DieselError) -> Error {
    let has_ended = has_ended(session, &error).await;
    if is_read_only(&error) {
        session.mark_broken();
        Error::Standby
    } else if has_ended {
        as_closed(error)
    } else {
        error.into()
    }
}

/// Whether the server refuses to write: the primary is elsewhere.
pub(crate) const fn is_read_only(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _)
    )
}

fn as_closed(error: DieselError) -> Error {
    match error {
        DieselError::DatabaseError(_, report) => {
            DieselError::DatabaseError(DatabaseErrorKind::ClosedConnection, report).into()
        }
        other => other.into(),
    }
}
