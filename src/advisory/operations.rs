//! What a lock sends: the operations on one session, blocking or asynchronous.

mod wait;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::result::DatabaseErrorKind::Unknown;
use diesel::result::Error as DieselError;

#[cfg(feature = "migrations")]
pub(super) use self::wait::poll_for_session_lock;
pub(super) use self::wait::wait_for_session_lock;
use super::discard::{Doubt, distrusted};
use super::lock::Lock;
use super::rules::{self, AfterTry, Fate, Loss, TryReply, Unlocked};
use super::sql::{self, Numbered};
use super::token::Token;
use crate::attempt::Attempt;
use crate::clock::Deadline;
use crate::error::{Error, Misplaced, Result};
use crate::functions::pg_backend_pid;
use crate::key::LockKey;
use crate::session::Session;
use crate::transaction::Transaction;

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
    rules::check_session_lock(session.transaction())?;
    *doubt = Some(Doubt::Acquiring(held.lock));
    let (reply, is_transaction_open) = send_try(session, held.lock, fenced).await;
    let reply = reply?;
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
        #[cfg(feature = "r2d2")]
        AfterTry::TransactionInPool => Err(Error::TransactionInPool),
        #[cfg(not(feature = "r2d2"))]
        AfterTry::TransactionInPool => Err(Misplaced::SessionLockInTransaction.into()),
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
    static CAREFULLY: AtomicBool = AtomicBool::new(false);
    if fenced {
        let (row, is_open) = session.probe(sql::TryFenced { lock }).await;
        return (row.map(sql::TriedFenced::read), is_open);
    }
    if !CAREFULLY.load(Ordering::Relaxed) {
        let (row, is_open) = session.probe(Numbered(sql::Try { lock })).await;
        if let Some(reply) = row.map(sql::Tried::read).transpose() {
            return (reply, is_open);
        }
        if is_open {
            // The next probe sets the mark again.
            session.clear_mark();
        }
    }
    let (row, is_open) = session.probe(Numbered(sql::TryCarefully { lock })).await;
    let reply = row.map(sql::TriedCarefully::read);
    if let Ok(reply) = &reply {
        CAREFULLY.fetch_or(reply.idle_session_timeout.is_some(), Ordering::Relaxed);
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
        Err(error) if rules::is_closed(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the fencing token of the lock. Draws one in one round trip if the lock has none.
pub(super) async fn fencing_token<S: Session>(session: &mut S, held: &mut HeldLock) -> Result<i64> {
    if let Some(token) = &held.fencing_token {
        return Ok(token.number());
    }
    if session.transaction() == Transaction::Open {
        return Err(Misplaced::TokenInTransaction.into());
    }
    let row = held.lock.into();
    let (drawn, is_transaction_open) = session.probe(sql::DrawToken { row }).await;
    if is_transaction_open && !drawn.as_ref().is_err_and(rules::is_closed) {
        // The transaction is the caller's, who may continue it.
        session.clear_mark();
    }
    let drawn: sql::DrawnToken = match drawn {
        Ok(drawn) => drawn,
        Err(error) if rules::is_closed(&error) => return Err(held.lost(Some(error))),
        Err(error) => return Err(error.into()),
    };
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
    let (reply, did_not_run) = send_release(session, held).await;
    let source = match reply {
        Ok(unlocked) => return conclude(session, doubt, held, before, unlocked).await,
        Err(source) => source,
    };
    if rules::is_closed(&source) {
        *doubt = Some(Doubt::Certain(held.pid));
        return Err(held.lost(Some(source)));
    }
    if before == Transaction::Broken {
        *doubt = Some(Doubt::Certain(held.pid));
    }
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
    if let Ok(unlocked) = send_release_unprepared(session, held).await {
        return conclude(session, doubt, held, before, unlocked).await;
    }
    let key = held.key.clone();
    let is_aborted = session.transaction() == Transaction::Broken;
    if !is_aborted || session.batch("ROLLBACK").await.is_err() {
        return Err(Error::ReleaseFailed { key, source });
    }
    match send_release_unprepared(session, held).await {
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

/// Does what follows from the reply to an unlock.
async fn conclude<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &HeldLock,
    before: Transaction,
    unlocked: Unlocked,
) -> Result<()> {
    // Only a transaction that Diesel does not know of leaves the mark of the probe.
    let is_marked = session.transaction() == Transaction::Broken;
    let release = rules::Release {
        before,
        unlocked,
        left_open: before == Transaction::Open || is_marked,
        is_pooled: session.is_pooled(),
        is_distrusted: session.is_pooled() && distrusted::contains(held.pid),
    };
    let (fate, loss) = release.verdict();
    match fate {
        Fate::Keep => {
            if before == Transaction::None && is_marked {
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
        Loss::Commit => Error::TransactionLeftOpen { key },
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

/// Sends the unlock, and also returns whether the connection was left marked. After an error the mark shows that the unlock
/// did not run: the server's report on an error outside a transaction clears it, unlike a failed `PREPARE` or an error inside
/// a transaction.
async fn send_release<S: Session>(
    session: &mut S,
    held: &HeldLock,
) -> (QueryResult<Unlocked>, bool) {
    if held.idle_session_timeout.is_some() {
        let (row, is_marked) = session.probe(careful_release(held, true)).await;
        return (row.map(sql::ReleasedCarefully::into), is_marked);
    }
    let (row, is_marked) = session.probe(Numbered(release_of(held))).await;
    (row.map(sql::Released::into), is_marked)
}

async fn send_release_unprepared<S: Session>(
    session: &mut S,
    held: &HeldLock,
) -> QueryResult<Unlocked> {
    let row = session.one(careful_release(held, false)).await?;
    Ok(sql::ReleasedCarefully::into(row))
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

/// Takes a transaction lock if it is free, in one round trip.
pub(super) async fn try_xact<S: Session>(session: &mut S, lock: Lock) -> Result<Attempt<()>> {
    rules::check_xact_lock(session.transaction())?;
    let row = session.one(Numbered(sql::TryXact { lock })).await?;
    sql::TriedXact::read(row)
}

/// Takes a transaction lock, and waits indefinitely, in the server's queue and under its deadlock detection.
pub(super) async fn acquire_xact<S: Session>(session: &mut S, lock: Lock) -> Result<()> {
    if try_xact(session, lock).await?.is_busy() {
        session.batch(&sql::wait_for_xact(lock, 0)).await?;
    }
    Ok(())
}

/// Takes a transaction lock, and waits until the deadline.
///
/// It waits in a savepoint. Its rollback keeps the transaction usable after a timeout, restores its settings, and undoes a
/// grant of the last moment.
pub(super) async fn acquire_xact_until<S: Session>(
    session: &mut S,
    lock: Lock,
    deadline: Deadline,
) -> Result<Attempt<()>> {
    if let Attempt::Acquired(()) = try_xact(session, lock).await? {
        return Ok(Attempt::Acquired(()));
    }
    let limit = deadline.remaining();
    if limit.is_zero() {
        return Ok(Attempt::Busy);
    }
    let milliseconds = rules::milliseconds(limit);
    let limit = limit.min(Duration::from_millis(milliseconds.unsigned_abs().into()));
    session.begin().await?;
    let began = Instant::now();
    match session.batch(&sql::wait_for_xact(lock, milliseconds)).await {
        Ok(()) => {
            session.commit().await?;
            Ok(Attempt::Acquired(()))
        }
        Err(error) => {
            let timed_out = rules::is_timeout(&error, began.elapsed(), limit);
            match session.rollback().await {
                Ok(()) | Err(DieselError::BrokenTransactionManager) => {}
                Err(rollback_error) => return Err(rollback_error.into()),
            }
            match error {
                DieselError::DatabaseError(Unknown, _) if timed_out => Ok(Attempt::Busy),
                error => Err(error.into()),
            }
        }
    }
}
