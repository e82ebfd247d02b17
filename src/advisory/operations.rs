//! What a lock sends: the operations on one session, blocking or asynchronous.
//!
//! # Waiting for a session lock
//!
//! A wait is cut into slices, each a transaction of its own: see [`rules::Slices`]. A slice is one prepared statement, which
//! sets its own `lock_timeout`. If the session's `statement_timeout` or `transaction_timeout` would end it sooner, an earlier
//! message lifts them, because PostgreSQL arms them as a statement begins: `BEGIN; SET LOCAL …`, the same prepared
//! statement, `COMMIT`. A session lock outlives that transaction, and the settings do not. In a test transaction a savepoint
//! does the same, and keeps a timeout from aborting the test.
//!
//! # Waiting for a transaction lock
//!
//! The wait is one message of several statements inside the caller's transaction, which lift the settings, wait, and restore
//! them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::result::DatabaseErrorKind::Unknown;
use diesel::result::Error as DieselError;

use super::discard::{Doubt, distrusted};
use super::lock::Lock;
use super::rules::{self, AfterTry, Fate, Loss, Slice, Slices, TryReply, Unlocked, WaitReply};
use super::sql::{self, Numbered};
use super::token::Token;
use crate::attempt::Attempt;
#[cfg(feature = "migrations")]
use crate::backoff::Backoff;
use crate::clock::Deadline;
use crate::error::{Error, Misplaced, Result};
use crate::functions::pg_backend_pid;
use crate::key::LockKey;
use crate::panics::caught;
use crate::session::{Session, started};
use crate::transaction::Transaction;

/// A session lock that a session holds or requests, and what its release needs to know.
#[derive(Debug)]
pub(super) struct HeldLock {
    pub(super) key: LockKey,
    pub(super) lock: Lock,
    /// The pid of the session. 0 until a reply has told it.
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

/// Waits, slice by slice, for a session lock that another session holds. Returns whether it was granted. It was not if the
/// deadline has passed, or if `give_up` returns true after a slice.
///
/// The place in the server's queue is lost between two slices.
///
/// If the timeout strikes as the lock is granted, PostgreSQL reports the timeout and the session holds the lock. So each
/// slice that timed out is followed by a look at `pg_locks`, and a lock that is found there is taken: a session that waits in
/// this mode did not hold the lock before, because otherwise it would not wait.
pub(super) async fn wait_for_session_lock<S: Session>(
    session: &mut S,
    held: &mut HeldLock,
    deadline: Deadline,
    mut give_up: impl FnMut() -> bool,
) -> Result<bool> {
    let mut slices = Slices::in_transaction(session.transaction());
    while let Some(slice) = slices.next(deadline.remaining()) {
        let waited = wait_for_slice(session, held, slice).await?;
        let timed_out = waited.is_none();
        let reply = match waited {
            Some(reply) => reply,
            None => look_after_timeout(session, held.lock).await?,
        };
        if held.pid != 0 && held.pid != reply.pid {
            return Err(Error::SessionMoved {
                key: held.key.clone(),
                taken_by: held.pid,
                replied_by: reply.pid,
            });
        }
        held.pid = reply.pid;
        if reply.is_granted {
            // In a test transaction the rollback to the savepoint restored the setting. To restore it again is harmless.
            held.idle_session_timeout = reply.idle_session_timeout;
            return Ok(true);
        }
        slices.learn(&reply);
        if timed_out && give_up() {
            break;
        }
    }
    Ok(false)
}

/// Waits for one slice. Returns `None` if it timed out.
async fn wait_for_slice<S: Session>(
    session: &mut S,
    held: &HeldLock,
    slice: Slice,
) -> QueryResult<Option<WaitReply>> {
    if !slice.lift_settings {
        return send_wait(session, held, slice.limit).await;
    }
    let lifted = LiftedSettings::begin(session).await?;
    let reply = send_wait(lifted.session, held, slice.limit).await;
    lifted.end(reply.is_ok()).await?;
    reply
}

async fn send_wait<S: Session>(
    session: &mut S,
    held: &HeldLock,
    limit: Duration,
) -> QueryResult<Option<WaitReply>> {
    let statement = sql::WaitForSlice {
        lock: held.lock,
        pid: held.pid,
        milliseconds: rules::milliseconds(limit),
    };
    let began = Instant::now();
    match session.one(Numbered(statement)).await {
        Err(error) if rules::is_timeout(&error, began.elapsed(), limit) => Ok(None),
        reply => reply.map(|row| Some(sql::WaitedForSlice::read(row))),
    }
}

async fn look_after_timeout<S: Session>(session: &mut S, lock: Lock) -> QueryResult<WaitReply> {
    let row = session
        .one(sql::LookAfterTimeout { row: lock.into() })
        .await?;
    Ok(sql::LookedAfterTimeout::read(row))
}

/// A transaction of this crate's own, or a savepoint inside a test transaction, in which no setting of the session ends a
/// wait. Dropping it rolls it back, on every way out: an error, or a panic.
struct LiftedSettings<'a, S: Session> {
    session: &'a mut S,
    end: &'static str,
    undo: Option<&'static str>,
}

impl<'a, S: Session> LiftedSettings<'a, S> {
    async fn begin(session: &'a mut S) -> QueryResult<Self> {
        // COMMIT rolls back a transaction that a timeout has aborted. Otherwise it commits only that
        // `idle_session_timeout` is lifted.
        let (begin, end, undo) = match session.transaction() {
            Transaction::Test => (
                sql::SAVEPOINT_WITHOUT_TIMEOUTS,
                sql::ROLLBACK_TO_SAVEPOINT,
                sql::ROLLBACK_TO_SAVEPOINT,
            ),
            _ => (sql::BEGIN_WITHOUT_TIMEOUTS, "COMMIT", "ROLLBACK"),
        };
        let lifted = Self {
            session,
            end,
            undo: Some(undo),
        };
        lifted.session.batch(begin).await?;
        Ok(lifted)
    }

    /// Ends it. After an error the drop rolls it back.
    async fn end(mut self, is_ok: bool) -> QueryResult<()> {
        if is_ok {
            self.session.batch(self.end).await?;
            self.undo = None;
        }
        Ok(())
    }
}

impl<S: Session> Drop for LiftedSettings<'_, S> {
    fn drop(&mut self) {
        let Some(undo) = self.undo else { return };
        // It may run while another panic unwinds.
        let undone = caught(|| started(self.session.batch(undo))).flatten();
        let is_test = self.session.transaction() == Transaction::Test;
        if !matches!(undone, Some(Ok(()))) && !is_test {
            self.session.mark_broken();
        }
    }
}

/// Takes a session lock, and waits without end, but never on the server: it tries again and again, with a growing pause of
/// 20 to 250 milliseconds on average. The session has no snapshot in between, so nothing that the holder does waits for it.
#[cfg(feature = "migrations")]
pub(super) async fn poll_for_session_lock<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &mut HeldLock,
) -> Result<()> {
    const SHORTEST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_millis(250);
    let mut backoff = Backoff::between(SHORTEST, LONGEST);
    while !try_session_lock(session, doubt, held, false).await? {
        let pause = backoff.next(Duration::ZERO, Duration::MAX, Duration::MAX);
        session.pause(pause.unwrap_or(LONGEST)).await;
    }
    Ok(())
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

/// Releases a session lock, in one round trip. `doubt` then tells whether the connection is to be discarded.
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
    let key = held.key.clone();
    match loss {
        None => Ok(()),
        Some(Loss::Lock) => Err(held.lost(None)),
        Some(Loss::Commit) => Err(Error::TransactionLeftOpen { key }),
        Some(Loss::SessionMoved) => {
            let replied_by = session.one(diesel::select(pg_backend_pid())).await;
            Err(Error::SessionMoved {
                key,
                taken_by: held.pid,
                replied_by: replied_by.unwrap_or_default(),
            })
        }
    }
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

/// Takes a transaction lock, and waits without end, in the server's queue and under its deadlock detection.
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

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;
    use diesel::pg::PgConnection;

    use super::super::lock::LockMode;
    use super::*;
    use crate::functions::{pg_advisory_unlock, pg_try_advisory_lock};
    use crate::key::LockId;
    use crate::session::{Blocking, now};
    use crate::transaction;

    const LOCK: Lock = Lock {
        id: LockId::BigInt(1),
        mode: LockMode::Exclusive,
    };
    const WHOLE_SLICE: Slice = Slice {
        limit: Duration::from_millis(200),
        lift_settings: false,
    };

    fn requested() -> HeldLock {
        HeldLock::requested(&LockKey::bigint(1), LOCK)
    }

    fn pid(conn: &mut PgConnection) -> i32 {
        diesel::select(pg_backend_pid()).get_result(conn).unwrap()
    }

    fn take(conn: &mut PgConnection) -> bool {
        diesel::select(pg_try_advisory_lock(1_i64))
            .get_result(conn)
            .unwrap()
    }

    fn unlock(conn: &mut PgConnection) -> bool {
        diesel::select(pg_advisory_unlock(1_i64))
            .get_result(conn)
            .unwrap()
    }

    fn wait_for(conn: &mut PgConnection, held: &mut HeldLock, milliseconds: u64) -> Result<bool> {
        let deadline = Deadline::after(Duration::from_millis(milliseconds));
        let session = &mut Blocking::lent(conn);
        now(wait_for_session_lock(session, held, deadline, || false))
    }

    fn look(conn: &mut PgConnection) -> WaitReply {
        now(look_after_timeout(&mut Blocking::lent(conn), LOCK)).unwrap()
    }

    #[test]
    fn a_free_lock_is_taken_and_the_session_known() {
        let database = workbench::Database::new();
        let (conn, held) = (&mut database.connect(), &mut requested());
        assert!(wait_for(conn, held, 60_000).unwrap());
        assert_eq!(held.pid, pid(conn));
        assert!(unlock(conn));
        assert!(!unlock(conn));
    }

    #[test]
    fn a_timeout_is_no_error_and_nothing_is_held() {
        let database = workbench::Database::new();
        let (conn, other) = (&mut database.connect(), &mut database.connect());
        let held = &mut requested();
        assert!(take(other));
        assert!(!wait_for(conn, held, 20).unwrap());
        assert_eq!(held.pid, pid(conn));
        assert!(unlock(other));
        assert!(!unlock(conn));
    }

    #[test]
    fn a_lock_that_was_granted_as_the_time_ran_out_is_found() {
        let database = workbench::Database::new();
        let conn = &mut database.connect();
        let pid = pid(conn);
        let is_held = |conn: &mut PgConnection| {
            let reply = look(conn);
            assert_eq!(reply.pid, pid);
            reply.is_granted
        };
        assert!(!is_held(conn));
        assert!(take(conn));
        assert!(is_held(conn));
        assert!(unlock(conn));
        assert!(!unlock(conn), "it was not taken twice");
    }

    #[test]
    fn a_slice_is_not_waited_for_where_a_setting_would_strike_sooner() {
        let database = workbench::Database::new();
        for (settings, waits) in [
            ("SET statement_timeout = '699ms'", false),
            ("SET statement_timeout = '700ms'", true),
            ("SET statement_timeout = '1d'", true),
            (
                "SET IntervalStyle = 'sql_standard'; SET statement_timeout = '2h'",
                true,
            ),
            ("SET deadlock_timeout = '398ms'", false),
            (
                "SET deadlock_timeout = '400ms'; SET lock_timeout = '1ms'",
                true,
            ),
        ] {
            let (conn, held) = (&mut database.connect(), &mut requested());
            conn.batch_execute(settings).unwrap();
            let reply = now(wait_for_slice(&mut Blocking::lent(conn), held, WHOLE_SLICE));
            let reply = reply.unwrap().unwrap();
            assert_eq!(reply.pid, pid(conn), "{settings}");
            assert_eq!(reply.is_granted, waits, "{settings}");
            assert_eq!(reply.refused_above.is_none(), waits, "{settings}");
            assert_eq!(unlock(conn), waits, "{settings}");
            assert!(wait_for(conn, held, 60_000).unwrap(), "{settings}");
            assert!(unlock(conn));
            assert_eq!(transaction::of(conn), Transaction::None);
            assert!(
                conn.batch_execute("SAVEPOINT s").is_err(),
                "no transaction is open"
            );
        }
    }

    #[test]
    fn a_wait_on_another_session_than_was_tried_takes_nothing() {
        let database = workbench::Database::new();
        let conn = &mut database.connect();
        let mut held = requested();
        held.pid = -1;
        match wait_for(conn, &mut held, 60_000) {
            Err(Error::SessionMoved {
                taken_by: -1,
                replied_by,
                ..
            }) => assert_eq!(replied_by, pid(conn)),
            other => panic!("{other:?}"),
        }
        assert!(!unlock(conn));
    }

    #[test]
    fn another_error_is_not_taken_for_the_timeout() {
        let database = workbench::Database::new();
        let (conn, held) = (&mut database.connect(), &mut requested());
        conn.batch_execute("BEGIN; SAVEPOINT s").unwrap();
        assert!(conn.batch_execute("SELECT 1 / 0").is_err());
        assert!(matches!(
            wait_for(conn, held, 60_000),
            Err(Error::Database(_))
        ));
    }

    #[test]
    fn nothing_is_left_open_by_a_statement_that_fails_or_panics() {
        async fn fails(session: &mut Blocking<'_>) -> QueryResult<()> {
            let lifted = LiftedSettings::begin(session).await?;
            let reply = lifted.session.batch("SELECT 1 / 0").await;
            lifted.end(reply.is_ok()).await?;
            reply
        }
        async fn panics(session: &mut Blocking<'_>) -> QueryResult<()> {
            let _lifted = LiftedSettings::begin(session).await?;
            panic!("in the statement")
        }
        let database = workbench::Database::new();
        for is_test in [false, true] {
            let conn = &mut database.connect();
            if is_test {
                conn.begin_test_transaction().unwrap();
            }
            conn.batch_execute("SET statement_timeout = '7s'").unwrap();
            assert!(now(fails(&mut Blocking::lent(conn))).is_err());
            assert!(caught(|| now(panics(&mut Blocking::lent(conn)))).is_none());
            let is_as_before = conn.batch_execute(
                "DO $$ BEGIN ASSERT current_setting('statement_timeout') = '7s'; END $$",
            );
            is_as_before.unwrap();
            assert!(
                conn.batch_execute("RELEASE SAVEPOINT diesel_interlock_wait")
                    .is_err()
            );
            if !is_test {
                assert_eq!(transaction::of(conn), Transaction::None);
                let committed = conn.batch_execute("SAVEPOINT s");
                assert!(committed.is_err(), "no transaction is open");
            }
        }
    }
}
