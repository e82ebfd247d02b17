//! Waiting for a lock that another session has.
//!
//! # Session locks
//!
//! A wait is cut into slices, each a transaction of its own: see [`SLICE`]. A slice is one prepared
//! statement, which sets its own `lock_timeout`. Where the session's `statement_timeout` or
//! `transaction_timeout` would end it sooner, an earlier message lifts those, because PostgreSQL arms
//! them as a statement begins: `BEGIN; SET LOCAL …`, the same prepared statement, `COMMIT`. A session
//! lock outlives that transaction, and the settings do not. In a test transaction a savepoint does
//! the same, and keeps a timeout from aborting the test.
//!
//! # Transaction locks
//!
//! A transaction lock is waited for in one message of several statements inside the caller's
//! transaction: they lift the settings, wait, and restore them.
//!
//! # Timeouts
//!
//! A timeout can only be recognised by elapsed time: the server's message is localised, and Diesel
//! does not expose the SQLSTATE. See [`is_timeout`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::DatabaseErrorKind::{ClosedConnection, Unknown};
use diesel::result::Error as DieselError;

use super::guard::Hold;
use super::mode::LockMode;
use super::query::{Look, Looked, Wait, Waited, get_numbered_result};
use crate::error::{Error, Result};
use crate::key::{LockId, LockKey};
use crate::transaction::{self, Transaction};

/// How long one statement waits for a session lock.
///
/// While it waits, its transaction has a snapshot, and a holder who runs `CREATE INDEX
/// CONCURRENTLY` waits for that snapshot to go. That is a circle, which PostgreSQL breaks with
/// "deadlock detected" after `deadlock_timeout` (one second by default), or with the holder's own
/// `lock_timeout`. A slice that ends before then lets the holder pass. Shorter slices would let a
/// smaller `lock_timeout` pass, but each leaves an error entry in the server's log.
pub(super) const SLICE: Duration = Duration::from_millis(200);

/// PostgreSQL's limit for a timeout, in milliseconds: almost 25 days.
const LONGEST: u128 = i32::MAX as u128;

/// When to stop waiting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    pub(super) const NEVER: Self = Self(None);

    /// A moment that the clock cannot express is never.
    pub(super) fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    pub(super) fn remaining(self) -> Duration {
        self.0.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }
}

/// Waits, slice by slice, for a session lock that another session has. Returns whether it was
/// granted; false once the deadline has passed, or once `give_up` says so after a slice.
///
/// The place in the server's queue is lost between two slices.
///
/// Should the timeout strike as the lock is granted, PostgreSQL reports the timeout and the lock is
/// held all the same. So each slice that timed out is followed by a look at `pg_locks`, and a lock
/// that is found held is taken: a session that waits in this mode did not hold it before, or it
/// would not have to wait.
pub(super) fn for_session_lock(
    conn: &mut PgConnection,
    key: &LockKey,
    hold: &mut Hold,
    deadline: Deadline,
    mut give_up: impl FnMut() -> bool,
) -> Result<bool> {
    let mut slice = SLICE;
    let mut settings_strike = transaction::of(conn) == Transaction::Test;
    loop {
        let limit = deadline.remaining().min(slice);
        if limit.is_zero() {
            return Ok(false);
        }
        let waited = if settings_strike {
            with_settings_lifted(conn, |conn| wait(conn, hold, limit))?
        } else {
            wait(conn, hold, limit)?
        };
        let timed_out = waited.is_none();
        let (pid, idle_session_timeout) = match waited {
            Some(waited) => {
                if waited.pid.is_negative() {
                    // It did not wait. The next time, nothing is left that could forbid it.
                    settings_strike = true;
                    slice = slice.min(Duration::from_millis(waited.longest.unsigned_abs().into()));
                }
                (waited.pid, waited.idle_session_timeout)
            }
            None => {
                let looked = look(conn, hold)?;
                (looked.pid, looked.idle_session_timeout)
            }
        };
        if hold.pid != 0 && hold.pid != pid.abs() {
            return Err(Error::SessionMoved {
                key: key.clone(),
                taken_by: hold.pid,
                replied_by: pid.abs(),
            });
        }
        hold.pid = pid.abs();
        if pid.is_positive() {
            // In a test transaction the lifting was rolled back, where it makes no difference.
            hold.idle_session_timeout = idle_session_timeout.filter(|value| value != "0");
            return Ok(true);
        }
        if timed_out && give_up() {
            return Ok(false);
        }
    }
}

/// Waits for one slice; `None` if it timed out.
fn wait(conn: &mut PgConnection, hold: &Hold, limit: Duration) -> QueryResult<Option<Waited>> {
    let query = Wait {
        id: &hold.id,
        mode: hold.mode,
        pid: hold.pid,
        milliseconds: milliseconds(limit),
    };
    let began = Instant::now();
    match get_numbered_result!(query, conn) {
        Err(error) if is_timeout(&error, began.elapsed(), limit) => Ok(None),
        answer => answer.map(Some),
    }
}

fn look(conn: &mut PgConnection, hold: &Hold) -> QueryResult<Looked> {
    let locator = hold.id.into();
    let query = Look {
        locator: &locator,
        mode: hold.mode,
    };
    query.get_result(conn)
}

/// Runs a statement in a transaction of its own, or in a savepoint of a test transaction, where no
/// setting of the session bounds it.
fn with_settings_lifted<T>(
    conn: &mut PgConnection,
    statement: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    // Such as DEFERRABLE might wait by itself. The last setting came with PostgreSQL 17.
    const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0; \
        SET LOCAL idle_in_transaction_session_timeout = 0; \
        SELECT CASE WHEN pg_catalog.current_setting('transaction_timeout', true) \
        OPERATOR(pg_catalog.<>) '0' \
        THEN pg_catalog.set_config('transaction_timeout', '0', true) END";
    const SAVEPOINT: &str = "SAVEPOINT diesel_interlock_wait; SET LOCAL statement_timeout = 0";
    const ROLLBACK_TO_SAVEPOINT: &str = "ROLLBACK TO SAVEPOINT diesel_interlock_wait; \
        RELEASE SAVEPOINT diesel_interlock_wait";
    // A transaction that a timeout has aborted is rolled back by COMMIT. Otherwise there is nothing
    // to commit but that `idle_session_timeout` is lifted.
    let (begin, end, undo) = match transaction::of(conn) {
        Transaction::Test => (SAVEPOINT, ROLLBACK_TO_SAVEPOINT, ROLLBACK_TO_SAVEPOINT),
        _ => (BEGIN, "COMMIT", "ROLLBACK"),
    };
    let mut open = OpenTransaction {
        conn,
        undo: Some(undo),
    };
    open.conn.batch_execute(begin)?;
    let answer = statement(open.conn)?;
    open.conn.batch_execute(end)?;
    open.undo = None;
    Ok(answer)
}

/// A transaction that Diesel does not know of. It ends on every way out, be it an error or a panic.
struct OpenTransaction<'a> {
    conn: &'a mut PgConnection,
    undo: Option<&'static str>,
}

impl Drop for OpenTransaction<'_> {
    fn drop(&mut self) {
        let Some(undo) = self.undo else { return };
        let conn = &mut *self.conn;
        // Diesel's instrumentation is the caller's code and runs with every statement.
        let undone = catch_unwind(AssertUnwindSafe(|| conn.batch_execute(undo)));
        let is_test = transaction::of(self.conn) == Transaction::Test;
        if !matches!(undone, Ok(Ok(()))) && !is_test {
            transaction::mark_broken(self.conn);
        }
    }
}

/// Waits for a transaction lock, in the server's queue and under its deadlock detection.
pub(super) fn for_xact_lock(conn: &mut PgConnection, id: LockId, mode: LockMode) -> Result<()> {
    Ok(conn.batch_execute(&xact_lock_message(id, mode, 0))?)
}

/// Waits for a transaction lock until the deadline; returns whether it was granted.
///
/// In a savepoint, whose rollback keeps the transaction usable after a timeout, restores its
/// settings, and undoes a grant of the last moment.
pub(super) fn for_xact_lock_until(
    conn: &mut PgConnection,
    id: LockId,
    mode: LockMode,
    deadline: Deadline,
) -> Result<bool> {
    let limit = deadline.remaining();
    if limit.is_zero() {
        return Ok(false);
    }
    let milliseconds = milliseconds(limit);
    let limit = limit.min(Duration::from_millis(milliseconds.unsigned_abs().into()));
    let mut timed_out = false;
    let sent = conn.transaction(|conn| {
        let began = Instant::now();
        conn.batch_execute(&xact_lock_message(id, mode, milliseconds))
            .inspect_err(|error| timed_out = is_timeout(error, began.elapsed(), limit))
    });
    match sent {
        Ok(()) => Ok(true),
        Err(DieselError::DatabaseError(Unknown, _)) if timed_out => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The settings of our own keep the caller's values, which a released savepoint does not restore.
fn xact_lock_message(id: LockId, mode: LockMode, lock_timeout: i32) -> String {
    let function = mode.xact_lock_function();
    // In quotes, because the smallest number is no `bigint` without its sign.
    let key = match id {
        LockId::BigInt(number) => format!("'{number}'::bigint"),
        LockId::Pair(first, second) => format!("'{first}'::int, '{second}'::int"),
    };
    format!(
        "SELECT \
         pg_catalog.set_config('diesel_interlock.statement_timeout', \
         pg_catalog.current_setting('statement_timeout'), true), \
         pg_catalog.set_config('diesel_interlock.lock_timeout', \
         pg_catalog.current_setting('lock_timeout'), true), \
         pg_catalog.set_config('statement_timeout', '0', true), \
         pg_catalog.set_config('lock_timeout', '{lock_timeout}', true); \
         SELECT pg_catalog.{function}({key}); \
         SELECT \
         pg_catalog.set_config('statement_timeout', \
         pg_catalog.current_setting('diesel_interlock.statement_timeout'), true), \
         pg_catalog.set_config('lock_timeout', \
         pg_catalog.current_setting('diesel_interlock.lock_timeout'), true)"
    )
}

/// Returns whether an error is the timeout of a wait that began so long ago: no earlier than that.
///
/// The server starts to count after the client did, so only a clock that runs slower, as while it
/// is being adjusted, makes a timeout look early. A hundredth allows for that. Another error in that
/// last hundredth, such as a cancellation, is taken for the timeout.
///
/// Diesel reports a timeout as an error of a closed connection if the connection was closed before
/// the timeout was read.
fn is_timeout(error: &DieselError, elapsed: Duration, limit: Duration) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(Unknown | ClosedConnection, _)
    ) && elapsed >= limit.mul_f64(0.99)
}

/// Whole milliseconds, rounded up, because a timeout of 0 would mean to wait for ever.
fn milliseconds(duration: Duration) -> i32 {
    duration.as_nanos().div_ceil(1_000_000).clamp(1, LONGEST) as i32
}

#[cfg(test)]
mod tests {
    use diesel::result::DatabaseErrorKind;

    use super::*;
    use crate::functions::{pg_advisory_unlock, pg_backend_pid, pg_try_advisory_lock};

    fn hold() -> Hold {
        Hold {
            id: LockId::BigInt(1),
            mode: LockMode::Exclusive,
            pid: 0,
            idle_session_timeout: None,
            fencing_token: None,
        }
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

    fn wait_for(conn: &mut PgConnection, hold: &mut Hold, milliseconds: u64) -> Result<bool> {
        let deadline = Deadline::after(Duration::from_millis(milliseconds));
        for_session_lock(conn, &LockKey::bigint(1), hold, deadline, || false)
    }

    #[test]
    fn timeouts_are_whole_milliseconds_that_postgresql_takes() {
        assert_eq!(milliseconds(Duration::ZERO), 1);
        assert_eq!(milliseconds(Duration::from_nanos(1)), 1);
        assert_eq!(milliseconds(Duration::from_micros(300)), 1);
        assert_eq!(milliseconds(Duration::from_micros(1001)), 2);
        assert_eq!(milliseconds(Duration::from_millis(500)), 500);
        assert_eq!(milliseconds(Duration::MAX), 2_147_483_647);
    }

    #[test]
    fn a_deadline_past_all_time_is_never() {
        assert_eq!(Deadline::after(Duration::MAX).remaining(), Duration::MAX);
        assert_eq!(Deadline::after(Duration::ZERO).remaining(), Duration::ZERO);
    }

    #[test]
    fn a_free_lock_is_taken_and_the_session_known() {
        let database = workbench::Database::new();
        let (conn, hold) = (&mut database.connect(), &mut hold());
        assert!(wait_for(conn, hold, 60_000).unwrap());
        assert_eq!(hold.pid, pid(conn));
        assert!(unlock(conn));
        assert!(!unlock(conn));
    }

    #[test]
    fn a_timeout_is_no_error_and_nothing_is_held() {
        let database = workbench::Database::new();
        let (conn, other, hold) = (
            &mut database.connect(),
            &mut database.connect(),
            &mut hold(),
        );
        assert!(take(other));
        assert!(!wait_for(conn, hold, 20).unwrap());
        assert_eq!(hold.pid, pid(conn));
        assert!(unlock(other));
        assert!(!unlock(conn));
    }

    #[test]
    fn a_lock_that_was_granted_as_the_time_ran_out_is_found() {
        let database = workbench::Database::new();
        let (conn, hold) = (&mut database.connect(), &mut hold());
        assert_eq!(look(conn, hold).unwrap().pid, -pid(conn));
        assert!(take(conn));
        assert_eq!(look(conn, hold).unwrap().pid, pid(conn));
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
            let (conn, hold) = (&mut database.connect(), &mut hold());
            conn.batch_execute(settings).unwrap();
            let waited = wait(conn, hold, SLICE).unwrap().unwrap();
            let expected = if waits { pid(conn) } else { -pid(conn) };
            assert_eq!(waited.pid, expected, "{settings}");
            assert_eq!(unlock(conn), waits, "{settings}");
            assert!(wait_for(conn, hold, 60_000).unwrap(), "{settings}");
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
        let mut hold = hold();
        hold.pid = -1;
        match wait_for(conn, &mut hold, 60_000) {
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
        let (conn, hold) = (&mut database.connect(), &mut hold());
        conn.batch_execute("BEGIN; SAVEPOINT s").unwrap();
        assert!(conn.batch_execute("SELECT 1 / 0").is_err());
        assert!(matches!(
            wait_for(conn, hold, 60_000),
            Err(Error::Database(_))
        ));
    }

    #[test]
    fn only_an_error_of_the_last_hundredth_is_taken_for_the_timeout() {
        let error = |kind| DieselError::DatabaseError(kind, Box::new(String::new()));
        let slice = Duration::from_millis(200);
        for kind in [Unknown, ClosedConnection] {
            assert!(is_timeout(&error(kind), slice, slice));
            assert!(!is_timeout(&error(kind), slice.mul_f64(0.98), slice));
        }
        let other = DatabaseErrorKind::SerializationFailure;
        assert!(!is_timeout(&error(other), slice, slice));
    }

    #[test]
    fn nothing_is_left_open_by_a_statement_that_fails_or_panics() {
        let database = workbench::Database::new();
        let fails = |conn: &mut PgConnection| conn.batch_execute("SELECT 1 / 0");
        let panics = |_: &mut PgConnection| -> QueryResult<()> { panic!("in the statement") };
        for is_test in [false, true] {
            let conn = &mut database.connect();
            if is_test {
                conn.begin_test_transaction().unwrap();
            }
            conn.batch_execute("SET statement_timeout = '7s'").unwrap();
            assert!(with_settings_lifted(conn, fails).is_err());
            let panicked = catch_unwind(AssertUnwindSafe(|| with_settings_lifted(conn, panics)));
            assert!(panicked.is_err());
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

    #[test]
    fn a_message_for_a_transaction_lock_has_the_key_and_the_timeout() {
        let message = xact_lock_message(LockId::BigInt(i64::MIN), LockMode::Shared, 7);
        assert!(message.contains("'lock_timeout', '7', true)"));
        assert!(message.contains(
            "; SELECT pg_catalog.pg_advisory_xact_lock_shared('-9223372036854775808'::bigint); "
        ));
        let message = xact_lock_message(LockId::Pair(-1, 2), LockMode::Exclusive, 0);
        assert!(message.contains("SELECT pg_catalog.pg_advisory_xact_lock('-1'::int, '2'::int); "));
    }
}
