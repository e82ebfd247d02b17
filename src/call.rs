//! How statements on this crate's tables are sent: each in its own transaction, on a connection
//! from a pool.
//!
//! **What was sent and has no reply is not sent again.** If a claim was committed and only its
//! reply was lost, a repetition would take a second slot. libpq reports whether a statement was
//! surely not sent, but diesel-async does not. So before the crate sends something on an
//! asynchronous connection, it asks the connection whether it has ended, which needs no round trip.
//!
//! **The READ COMMITTED fallback** repeats a statement that failed with a serialization failure, in
//! one place (`call.rs`). A repetition is necessary because the isolation level cannot be changed
//! after a snapshot was taken.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Instant;

use diesel::deserialize::FromSqlRow;
use diesel::expression::QueryMetadata;
use diesel::pg::Pg;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel::sql_types::BigInt;

use crate::error::{Error, Result};
use crate::mode::{Mode, PATIENCE};
use crate::pool::{Checkout, ConnectionOf, Pool};
use crate::session::{Session, classify, explain, is_closed};
use crate::statement::Statement;
use crate::transaction::Own;

/// What an operation asks the database: a statement whose row may be the answer.
pub(crate) trait Question<T, U>: Sync {
    fn statement(&self) -> &Statement<T>;

    /// Whether the row answers the question.
    fn is_answered(&self, _row: &U) -> bool {
        true
    }

    /// The statement that is sent if there is no answer, which returns the answer or prepares it:
    /// if it returns no row, the question is asked again.
    fn otherwise(&self) -> Option<Statement<T>> {
        None
    }
}

impl<T, U> Question<T, U> for Statement<T> {
    fn statement(&self) -> &Self {
        self
    }
}

/// Sends a statement, and if its row is no answer, the statement that prepares the answer. Also
/// returns when the statement with the answer was sent.
///
/// A blocking pool gives a connection until the deadline, if there is one.
///
/// **What was sent and has no reply is never sent again.** A connection is replaced if its session
/// is known to have ended before the statement was sent, and discarded if plain SQL had left a
/// transaction open on it.
pub(crate) async fn ask<P: Pool, T, U>(
    pool: &P,
    deadline: Option<Instant>,
    question: &impl Question<T, U>,
) -> Result<(U, Instant)>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    let checkout = Checkout::new(pool, deadline).await?;
    ask_once(checkout, pool, deadline, question).await
}

/// How many rows a statement of [`in_batches`] deletes at most.
pub(crate) const BATCH: i64 = 10_000;

/// Sends a statement that deletes [`BATCH`] rows at most, until it finds fewer. Returns how many
/// were deleted.
pub(crate) async fn in_batches<P: Pool>(pool: &P, delete: Statement<BigInt>) -> Result<u64> {
    let mut deleted = 0;
    loop {
        let (batch, _): (i64, _) = ask(pool, None, &delete).await?;
        deleted += batch.unsigned_abs();
        if batch < BATCH {
            return Ok(deleted);
        }
    }
}

/// As [`ask`] with one statement, but to its end: once the statement is sent, a drop of the future
/// does not stop it, for as long as a reply can be expected. What `then` makes of the reply is
/// dropped in that case.
pub(crate) async fn ask_detached<P: Pool, T: 'static, U, V: Send + 'static>(
    pool: &P,
    deadline: Option<Instant>,
    statement: Statement<T>,
    then: impl FnOnce(U, Instant) -> V + Send + 'static,
) -> Result<V>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    let mut checkout = Checkout::new(pool, deadline).await?;
    // If the task drops it, it has already waited for the reply for long enough.
    checkout.discards_when_dropped();
    let pool = pool.clone();
    P::Mode::run_detached(&checkout.runtime(), Some(2 * PATIENCE), async move {
        let (reply, sent) = ask_once(checkout, &pool, deadline, &statement).await?;
        Ok(then(reply, sent))
    })
    .await
}

/// As [`ask`] with one statement, until the deadline, where a repetition changes nothing. Waits for
/// a connection only until `connect_by`. If the
/// session had ended, the statement is sent again on another one: all sessions of a pool that does
/// not test them may have ended. Notes whether a statement without a reply may have been executed.
pub(crate) async fn ask_again<P: Pool, T, U>(
    pool: &P,
    connect_by: Option<Instant>,
    deadline: Option<Instant>,
    statement: Statement<T>,
    unanswered: &AtomicBool,
) -> Result<U>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    let mut sessions = 0..pool.max_size();
    loop {
        let asked = P::Mode::within(deadline, ask(pool, connect_by, &statement)).await;
        let error = match asked.unwrap_or(Err(Error::TimedOut)) {
            Ok((reply, _)) => return Ok(reply),
            Err(error) => error,
        };
        unanswered.fetch_or(!matches!(error, Error::Pool(_)), SeqCst);
        let has_ended = matches!(&error, Error::Database(error) if is_closed(error));
        let has_time = deadline.is_none_or(|deadline| deadline > Instant::now());
        if !(has_ended && has_time && sessions.next().is_some()) {
            return Err(error);
        }
    }
}

async fn ask_once<P: Pool, T, U>(
    mut checkout: Checkout<P>,
    pool: &P,
    deadline: Option<Instant>,
    question: &impl Question<T, U>,
) -> Result<(U, Instant)>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    let mut reply = ask_session(checkout.conn(), question).await;
    if let Err(Error::Database(error)) = &reply {
        if ConnectionOf::<P>::was_not_sent(error) {
            checkout.discard();
            checkout = Checkout::new(pool, deadline).await?;
            reply = ask_session(checkout.conn(), question).await;
        }
    }
    // Also after a replacement: after a failover, the second connection may lead to the old server.
    if matches!(reply, Err(Error::Standby)) {
        // The server has refused, so nothing was done.
        checkout.discard();
        checkout = Checkout::new(pool, deadline).await?;
        reply = ask_session(checkout.conn(), question).await;
    }
    match reply {
        Err(Error::DirtyConnection | Error::Standby) => checkout.discard(),
        _ => checkout.give_back(),
    }
    reply
}

/// Asks on a pooled connection. Where a stricter isolation level is the default, a statement that
/// needs READ COMMITTED is repeated there.
async fn ask_session<S: Session, T, U>(
    session: &mut S,
    question: &impl Question<T, U>,
) -> Result<(U, Instant)>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    if !session.transaction().is_none() {
        return Err(Error::DirtyConnection);
    }
    let mut otherwise = None;
    let (reply, sent) = loop {
        let sent = Instant::now();
        let statement = otherwise.as_ref().unwrap_or(question.statement());
        let (reply, is_open) = session.probe(statement).await;
        if is_open {
            return Err(Error::DirtyConnection);
        }
        match next(question, &reply, otherwise.is_some()) {
            Some(statement) => otherwise = statement,
            None => break (reply, sent),
        }
    };
    repair(session, question, reply, sent).await
}

/// As [`ask`], on the caller's connection: in its transaction, if there is one.
pub(crate) async fn ask_on<S: Session, T, U>(
    session: &mut S,
    question: &impl Question<T, U>,
) -> Result<U>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    let is_free = session.transaction().is_none();
    match send(session, question).await {
        Ok(row) => Ok(row),
        Err(error) if !is_free => Err(classify(session, error).await),
        failed => Ok(repair(session, question, failed, Instant::now()).await?.0),
    }
}

/// Repeats a statement that needs READ COMMITTED at that level. Explains every other error.
async fn repair<S: Session, T, U>(
    session: &mut S,
    question: &impl Question<T, U>,
    reply: QueryResult<U>,
    sent: Instant,
) -> Result<(U, Instant)>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    if reply.as_ref().is_err_and(needs_read_committed) {
        match Own::begin(session).await {
            Ok(transaction) => {
                let sent = Instant::now();
                return match send(transaction.conn, question).await {
                    Ok(row) => transaction.end(Ok((row, sent))).await,
                    Err(error) => Err(transaction.fail(error.into()).await),
                };
            }
            Err(error) if error.is_unavailable() => return Err(error),
            // The failure was inside a transaction that plain SQL has opened, and has aborted it.
            // So the first error stays.
            Err(_) => {}
        }
    }
    match reply {
        Ok(row) => Ok((row, sent)),
        Err(error) => Err(explain(session, error).await),
    }
}

/// Asks until there is an answer.
async fn send<S: Session, T, U>(session: &mut S, question: &impl Question<T, U>) -> QueryResult<U>
where
    Pg: QueryMetadata<T>,
    U: FromSqlRow<T, Pg> + Send + 'static,
{
    let mut otherwise = None;
    loop {
        let statement = otherwise.as_ref().unwrap_or(question.statement());
        let reply = session.one(statement).await;
        match next(question, &reply, otherwise.is_some()) {
            Some(statement) => otherwise = statement,
            None => return reply,
        }
    }
}

/// What is to be sent after a reply: nothing, the statement that prepares the answer, or the
/// question (`Some(None)`).
fn next<T, U>(
    question: &impl Question<T, U>,
    reply: &QueryResult<U>,
    is_prepared: bool,
) -> Option<Option<Statement<T>>> {
    let is_answered = match reply {
        Ok(row) => is_prepared || question.is_answered(row),
        Err(error) => !matches!(error, DieselError::NotFound),
    };
    if is_answered {
        None
    } else if is_prepared {
        Some(None)
    } else {
        question.otherwise().map(Some)
    }
}

fn needs_read_committed(error: &DieselError) -> bool {
    match error {
        DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _) => true,
        DieselError::DatabaseError(_, report) => {
            report.constraint_name() == Some("diesel_interlock_isolation")
        }
        _ => false,
    }
}
