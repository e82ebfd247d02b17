//! What a lock sends: the operations on one session, blocking or asynchronous.

mod wait;
mod xact;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use diesel::prelude::*;
use diesel::result::Error as DieselError;

#[cfg(feature = "migrations")]
pub(super) use self::wait::poll_for_session_lock;
pub(super) use self::wait::wait_for_session_lock;
pub(super) use self::xact::begin_transaction;
use super::doubt::{Doubt, distrusted};
use super::lock::Lock;
use super::rules::{self, AfterTry, Fate, Loss, TryReply, Unlocked};
use super::sql::{self, Numbered};
use super::token::Token;
use crate::error::{Error, Misplaced, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::functions::pg_backend_pid;
use crate::key::LockKey;
#[cfg(feature = "async")]
use crate::panics::caught;
use crate::session::{Session, is_closed, leftover_explained, probe};
use crate::transaction::{self, Transaction};

/// A session lock that a session holds or requests, and what its release needs to know.
#[derive(Debug)]
pub(super) struct HeldLock {
    pub(super) key: LockKey,
    pub(super) lock: Lock,
    /// The pid of the session. 0 until a reply contained it.
    pub(super) pid: i32,
    /// The value to restore at the release, if it was lifted.
    pub(super) idle_session_timeout: Option<String>,
    /// The fencing token, if one was drawn.
    pub(super) fencing_token: Option<Token>,
}

impl HeldLock {
    pub(super) fn requested(key: &LockKey, lock: Lock) -> Self {
        Self {
            key: key.with_id(lock.id),
            lock,
            pid: 0,
            idle_session_timeout: None,
            fencing_token: None,
        }
    }

    pub(super) fn record_release(&self, since: Instant, released: &Result<()>) {
        let event = Event::of("release", self.subject(), released, |()| Outcome::Released);
        events::record(&event.held_since(since));
    }

    /// Records that a release is left to what becomes of the connection.
    #[cfg(feature = "async")]
    pub(super) fn record_deferral(&self, since: Instant) {
        let deferred = Event::new("release", self.subject(), Outcome::Deferred);
        caught(|| events::record(&deferred.held_since(since)));
    }

    fn subject(&self) -> Subject<'_> {
        Subject::Lock(self.key.shown())
    }

    /// Returns the lock as a task releases it, and leaves nothing here that it needs.
    #[cfg(feature = "async")]
    pub(super) fn take(&mut self) -> Self {
        Self {
            key: self.key.clone(),
            lock: self.lock,
            pid: self.pid,
            idle_session_timeout: self.idle_session_timeout.take(),
            fencing_token: self.fencing_token.take(),
        }
    }

    fn lost(&self, source: Option<DieselError>) -> Error {
        let key = self.key.clone();
        Error::LockLost { key, source }
    }
}

/// Takes a session lock if it is free, in one round trip. Returns whether it was granted. A wait begins with a try, because
/// PostgreSQL lets no try overtake the sessions that wait.
///
/// After an error that leaves `doubt`, the session may hold the lock.
pub(super) async fn try_session_lock<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &mut HeldLock,
    fenced: bool,
) -> Result<bool> {
    transaction::refuse_open(session.transaction(), Misplaced::SessionLockInTransaction)?;
    *doubt = Some(Doubt::Acquiring(held.lock));
    let (reply, is_transaction_open) = send_try(session, held.lock, fenced).await;
    if let Err(error) = &reply {
        roll_back_try(session, error).await;
    }
    let reply = leftover_explained(session, reply, is_transaction_open).await?;
    held.pid = reply.pid.unwrap_or_default();
    held.idle_session_timeout = reply.idle_session_timeout;
    held.fencing_token = reply
        .token
        .map(|(name, number)| Token::drawn(name, held.lock, number));
    match rules::after_try(reply.grant, is_transaction_open, session.is_pooled()) {
        AfterTry::Granted => Ok(true),
        AfterTry::Busy => Ok(false),
        AfterTry::Standby => {
            *doubt = None;
            Err(Error::Standby)
        }
        AfterTry::TransactionInPool => Err(Error::TransactionInPool),
        AfterTry::OpenTransaction { is_granted } => {
            session.clear_mark();
            if is_granted {
                // Its error is the open transaction, which is reported here.
                let _ = release(session, doubt, held).await;
            } else {
                *doubt = None;
            }
            Err(Misplaced::SessionLockInTransaction.into())
        }
    }
}

/// After the error of a try on a connection that the caller lends, rolls back the caller's transaction if the try has aborted it.
///
/// A try that is cancelled at its end has taken the lock. Diesel does not know of a transaction that was opened by a plain SQL
/// `BEGIN`. While it is aborted, nobody can find out whether the session holds the lock. If it was aborted before, the try did not
/// run, and fails with the same error as any statement. Then the transaction stays as it is, for a savepoint of the caller's.
async fn roll_back_try<S: Session>(session: &mut S, error: &DieselError) {
    if session.is_pooled() || session.transaction() == Transaction::Test || is_closed(error) {
        return;
    }
    let Err(aborted) = session.batch(sql::PING).await else {
        return;
    };
    if aborted.to_string() != error.to_string() && !session.has_ended(&aborted).await {
        let _ = session.batch(sql::ROLLBACK).await;
    }
}

/// Whether this process has met a session with an `idle_session_timeout`.
static MET_IDLE_TIMEOUT: AtomicBool = AtomicBool::new(false);

/// Whether this process has sent a statement that lifts an `idle_session_timeout`. Its reply may never have been read.
static LIFTS_IDLE_TIMEOUT: AtomicBool = AtomicBool::new(false);

/// Returns whether a try may have lifted an `idle_session_timeout`.
#[cfg(feature = "async")]
pub(super) fn lifts_idle_session_timeout() -> bool {
    LIFTS_IDLE_TIMEOUT.load(Ordering::Relaxed)
}

/// Sends a try, and also returns whether a transaction is open that Diesel does not know of.
///
/// The first try of this process that meets a session with an `idle_session_timeout` takes two round trips. All later tries
/// send the careful statement at once, because it is unknown which session is next.
///
/// The careful statement alone would do. But PostgreSQL looks up each function of a statement at every execution: of the
/// 15.5 µs that a lock and its release cost the server, the careful one costs 1.4 more, and over a Unix socket the pair
/// takes 3 % longer.
async fn send_try<S: Session>(
    session: &mut S,
    lock: Lock,
    fenced: bool,
) -> (QueryResult<TryReply>, bool) {
    if fenced {
        LIFTS_IDLE_TIMEOUT.store(true, Ordering::Relaxed);
        let (row, is_open) = probe(session, sql::TryFenced { lock }).await;
        return (row.map(sql::TriedFenced::read), is_open);
    }
    if !MET_IDLE_TIMEOUT.load(Ordering::Relaxed) {
        let (row, is_open) = probe(session, Numbered(sql::Try { lock })).await;
        if let Some(reply) = row.map(sql::Tried::read).transpose() {
            return (reply, is_open);
        }
        if is_open {
            // The next probe sets the mark again.
            session.clear_mark();
        }
    }
    LIFTS_IDLE_TIMEOUT.store(true, Ordering::Relaxed);
    let (row, is_open) = probe(session, Numbered(sql::TryCarefully { lock })).await;
    let reply = row.map(sql::TriedCarefully::read);
    if let Ok(reply) = &reply {
        MET_IDLE_TIMEOUT.fetch_or(reply.idle_session_timeout.is_some(), Ordering::Relaxed);
    }
    (reply, is_open)
}

/// Returns whether the session still holds the lock, in one round trip.
pub(super) async fn is_held<S: Session>(session: &mut S, held: &HeldLock) -> Result<bool> {
    let query = sql::IsHeld {
        row: held.lock.into(),
        prepared: true,
    };
    let reply: QueryResult<(i32, bool)> = session.one(query).await;
    match reply {
        Ok((pid, is_held)) => Ok(is_held && pid == held.pid),
        Err(error) if session.has_ended(&error).await => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns whether the session holds the lock. Not prepared, because the prepared statements may be what is missing.
pub(super) async fn holds<S: Session>(session: &mut S, lock: Lock) -> QueryResult<bool> {
    let query = sql::IsHeld {
        row: lock.into(),
        prepared: false,
    };
    let (_, is_held): (i32, bool) = session.one(query).await?;
    Ok(is_held)
}

/// Ends the session, because only its end certainly frees its locks. If the role may not end its own sessions, all session
/// locks are released, and an outer guard reports that it lost its own.
pub(super) async fn end_session<S: Session>(session: &mut S) {
    let ended = session.batch(sql::END_SESSION).await;
    if ended.is_ok() || session.batch(sql::PING).await.is_ok() {
        let _ = session.batch(sql::RELEASE_ALL).await;
    }
}

/// Returns the fencing token of the lock. Draws one in one round trip if the lock has none.
pub(super) async fn fencing_token<S: Session>(session: &mut S, held: &mut HeldLock) -> Result<i64> {
    if let Some(token) = &held.fencing_token {
        return Ok(token.number());
    }
    let before = session.transaction();
    if before == Transaction::Open {
        return Err(Misplaced::TokenInTransaction.into());
    }
    let row = held.lock.into();
    let (drawn, is_open) = probe(session, sql::DrawToken { row }).await;
    // A mark that was there before is the caller's, and stays.
    let is_transaction_open = is_open && before != Transaction::Broken;
    let drawn: sql::DrawnToken = match drawn {
        Ok(drawn) => drawn,
        Err(error) if session.has_ended(&error).await => return Err(held.lost(Some(error))),
        Err(error) => {
            if is_transaction_open {
                session.clear_mark();
            }
            return Err(error.into());
        }
    };
    if is_transaction_open {
        // The transaction is the caller's, who may continue it.
        session.clear_mark();
    }
    let Some(number) = drawn.number.filter(|_| drawn.pid == held.pid) else {
        return Err(held.lost(None));
    };
    if is_transaction_open {
        return Err(Misplaced::TokenInTransaction.into());
    }
    let token = Token::drawn(drawn.session, held.lock, number);
    let number = token.number();
    held.fencing_token = Some(token);
    Ok(number)
}

/// Releases a session lock, in one round trip. Afterwards `doubt` shows whether to discard the connection.
pub(super) async fn release<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &HeldLock,
) -> Result<()> {
    let before = session.transaction();
    *doubt = Some(Doubt::Releasing(held.lock, held.pid));
    let (reply, is_open) = send_release(session, held).await;
    let source = match reply {
        Ok(unlocked) => return conclude(session, doubt, held, before, unlocked, is_open).await,
        Err(source) => source,
    };
    if session.has_ended(&source).await {
        *doubt = Some(Doubt::Certain(held.pid));
        return Err(held.lost(Some(source)));
    }
    if before == Transaction::Broken {
        *doubt = Some(Doubt::Certain(held.pid));
    }
    let did_not_run = before == Transaction::None && is_open;
    if session.is_pooled() || !did_not_run {
        let key = held.key.clone();
        return Err(Error::ReleaseFailed { key, source });
    }
    release_again(session, doubt, held, before, source).await
}

/// Sends an unlock again that certainly did not run on a borrowed connection: unprepared, and once more after the caller's
/// aborted transaction was rolled back. A pooled connection is discarded instead, which costs its owner nothing.
async fn release_again<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &HeldLock,
    before: Transaction,
    source: DieselError,
) -> Result<()> {
    let (reply, is_aborted) = send_release_unprepared(session, held).await;
    if let Ok(unlocked) = reply {
        return conclude(session, doubt, held, before, unlocked, is_aborted).await;
    }
    let key = held.key.clone();
    if !is_aborted || session.batch(sql::ROLLBACK).await.is_err() {
        return Err(Error::ReleaseFailed { key, source });
    }
    match send_release_unprepared(session, held).await.0 {
        Ok(Unlocked::WasHeld) => {
            *doubt = None;
            Err(Error::TransactionLeftOpen { key })
        }
        Ok(Unlocked::WasNotHeld) => {
            *doubt = None;
            Err(held.lost(None))
        }
        Ok(Unlocked::SessionMoved) | Err(_) => Err(Error::ReleaseFailed { key, source }),
    }
}

/// Does what follows from the reply to an unlock, and from whether a transaction is open that Diesel does not know of.
async fn conclude<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &HeldLock,
    before: Transaction,
    unlocked: Unlocked,
    is_open: bool,
) -> Result<()> {
    let release = rules::Release {
        before,
        unlocked,
        left_open: before == Transaction::Open || is_open,
        is_pooled: session.is_pooled(),
        is_distrusted: session.is_pooled() && distrusted::contains(held.pid),
    };
    let (fate, loss) = release.verdict();
    match fate {
        Fate::Keep => {
            if before == Transaction::None && is_open {
                session.clear_mark();
            }
            *doubt = None;
        }
        Fate::Discard => *doubt = Some(Doubt::Certain(held.pid)),
    }
    let Some(loss) = loss else { return Ok(()) };
    let key = held.key.clone();
    Err(match loss {
        Loss::Lock => held.lost(None),
        Loss::TransactionLeftOpen => Error::TransactionLeftOpen { key },
        Loss::SessionMoved => {
            let replied_by = session.one(diesel::select(pg_backend_pid())).await;
            Error::SessionMoved {
                key,
                taken_by: held.pid,
                replied_by: replied_by.unwrap_or_default(),
            }
        }
    })
}

/// Sends the unlock, and also returns whether a transaction is open that Diesel does not know of. After an error, that shows
/// that the unlock did not run, because a `PREPARE` failed, or because the transaction is aborted.
async fn send_release<S: Session>(
    session: &mut S,
    held: &HeldLock,
) -> (QueryResult<Unlocked>, bool) {
    if held.idle_session_timeout.is_some() {
        let (row, is_open) = probe(session, careful_release(held, true)).await;
        return (row.map(sql::ReleasedCarefully::into), is_open);
    }
    let (row, is_open) = probe(session, Numbered(release_of(held))).await;
    (row.map(sql::Released::into), is_open)
}

async fn send_release_unprepared<S: Session>(
    session: &mut S,
    held: &HeldLock,
) -> (QueryResult<Unlocked>, bool) {
    let (row, is_open) = probe(session, careful_release(held, false)).await;
    (row.map(sql::ReleasedCarefully::into), is_open)
}

fn release_of(held: &HeldLock) -> sql::Release {
    sql::Release {
        lock: held.lock,
        taken_by: held.pid,
    }
}

fn careful_release(held: &HeldLock, prepared: bool) -> sql::ReleaseCarefully {
    sql::ReleaseCarefully {
        release: release_of(held),
        idle_session_timeout: held.idle_session_timeout.clone(),
        prepared,
    }
}
