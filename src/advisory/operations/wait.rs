//! The wait for a session lock, which is the only place that waits for one on the server.
//!
//! A wait is cut into slices, each a separate transaction: see [`Slices`]. A slice is one prepared statement, which sets its
//! own `lock_timeout`. If the session's `statement_timeout` or `transaction_timeout` would end it sooner, an earlier message
//! lifts them, because PostgreSQL arms them as a statement begins: `BEGIN; SET LOCAL …`, the same prepared statement,
//! `COMMIT`. A session lock outlives that transaction, and the settings do not. In a test transaction a savepoint does the
//! same, and keeps a timeout from aborting the test.

use std::time::{Duration, Instant};

use diesel::prelude::*;

use super::HeldLock;
#[cfg(feature = "migrations")]
use super::try_session_lock;
#[cfg(feature = "migrations")]
use crate::advisory::doubt::Doubt;
use crate::advisory::lock::Lock;
use crate::advisory::rules::{self, Slice, Slices, WaitReply};
use crate::advisory::sql::{self, Numbered};
#[cfg(feature = "migrations")]
use crate::backoff::Backoff;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::panics::caught;
use crate::session::{Session, started};
use crate::transaction::Transaction;

/// Waits, slice by slice, for a session lock that another session holds. Returns whether it was granted. It was not if the
/// deadline has passed, or if `give_up` returns true after a slice.
///
/// The place in the server's queue is lost between two slices.
///
/// If the timeout strikes as the lock is granted, PostgreSQL reports the timeout and the session holds the lock. So each
/// slice that timed out is followed by a look at `pg_locks`, and a lock that is found there is taken: a session that waits in
/// this mode did not hold the lock before, because otherwise it would not wait.
pub(in crate::advisory) async fn wait_for_session_lock<S: Session>(
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
/// wait. Dropping it rolls it back, on every way out: an error, a panic, or a future that was dropped. Only a panic of the caller's
/// instrumentation, as the end is sent in a test transaction, may leave the savepoint open.
struct LiftedSettings<'a, S: Session> {
    session: &'a mut S,
    end: &'static str,
    undo: Option<&'static str>,
    /// Whether the end is being sent, and its reply is to come.
    is_ending: bool,
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
            _ => (sql::BEGIN_WITHOUT_TIMEOUTS, sql::COMMIT, sql::ROLLBACK),
        };
        let lifted = Self {
            session,
            end,
            undo: Some(undo),
            is_ending: false,
        };
        lifted.session.batch(begin).await?;
        Ok(lifted)
    }

    /// Ends it. After an error the drop rolls it back.
    async fn end(mut self, is_ok: bool) -> QueryResult<()> {
        if is_ok {
            self.is_ending = true;
            let ended = self.session.batch(self.end).await;
            self.is_ending = false;
            ended?;
            self.undo = None;
        }
        Ok(())
    }
}

impl<S: Session> Drop for LiftedSettings<'_, S> {
    fn drop(&mut self) {
        let Some(undo) = self.undo else { return };
        let is_test = self.session.transaction() == Transaction::Test;
        if self.is_ending && is_test {
            // A second rollback to the same savepoint would abort the test transaction.
            return;
        }
        // It may run while another panic unwinds. An asynchronous session has queued the message, and its reply is to come.
        let is_sent = caught(|| !matches!(started(self.session.batch(undo)), Some(Err(_))));
        if is_sent != Some(true) && !is_test {
            self.session.mark_broken();
        }
    }
}

/// Takes a session lock, and waits indefinitely, but never on the server. It polls with a growing pause of 20 to 250
/// milliseconds on average, for which `pause` waits. The session has no snapshot in between, so the holder never waits for it.
#[cfg(feature = "migrations")]
pub(in crate::advisory) async fn poll_for_session_lock<S: Session>(
    session: &mut S,
    doubt: &mut Option<Doubt>,
    held: &mut HeldLock,
    pause: impl AsyncFn(Duration),
) -> Result<()> {
    const SHORTEST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_millis(250);
    let mut backoff = Backoff::between(SHORTEST, LONGEST);
    while !try_session_lock(session, doubt, held, false).await? {
        let next = backoff.next(Duration::ZERO, Duration::MAX, Duration::MAX);
        pause(next.unwrap_or(LONGEST)).await;
    }
    Ok(())
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use diesel::connection::SimpleConnection;
    use diesel::pg::PgConnection;

    use super::*;
    use crate::advisory::lock::LockMode;
    use crate::functions::{pg_advisory_unlock, pg_backend_pid, pg_try_advisory_lock};
    use crate::key::{LockId, LockKey};
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
