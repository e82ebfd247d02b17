//! Waiting for a lock: messages of several statements, since a setting that bounds a statement
//! must be changed before that statement begins. Where none does, `first_wait` comes first.
//!
//! # A message, and not a prepared statement
//!
//! `lock_timeout` bounds the wait, and the caller's own `statement_timeout` must not cut it short.
//! PostgreSQL arms `statement_timeout` as a statement starts, so `set_config` in the same statement
//! comes too late, while an earlier statement of the same message is in time. The message is one
//! round trip and one implicit transaction, at whose end the settings are as they were; inside the
//! caller's transaction the last statement puts them back.
//!
//! # How a time-out is told from other errors
//!
//! Diesel hands out no SQLSTATE, and the server's messages are localised. So the block turns
//! `lock_not_available` into a `check_violation`, which Diesel tells by its kind, with the name of a
//! constraint of ours.

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::guard::Hold;
use super::mode::LockMode;
use super::query::{HELD_BY_THIS_SESSION, Locator};
use crate::error::{Error, Result};
use crate::key::{LockId, LockKey};
use crate::transaction::{self, Transaction};

/// How long one message waits for a session lock.
///
/// While it waits, its transaction has a snapshot, and a holder who runs `CREATE INDEX
/// CONCURRENTLY` waits for that snapshot to go: a circle, which PostgreSQL breaks with "deadlock
/// detected" after `deadlock_timeout` (one second by default). A wait that gives way before then
/// lets the holder pass. Where `deadlock_timeout` is set lower, so is the slice.
pub(super) const SLICE: Duration = Duration::from_millis(500);

/// What PostgreSQL takes for a time-out, in milliseconds: almost 25 days.
const LONGEST: u128 = i32::MAX as u128;

const NOT_GRANTED: &str = "diesel_interlock_lock_not_granted";
const SESSION_MOVED: &str = "diesel_interlock_session_moved";

/// When to stop waiting.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(Option<Instant>);

impl Deadline {
    pub(super) const NEVER: Self = Self(None);

    /// What the clock cannot express is never.
    pub(super) fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    #[cfg(feature = "r2d2")]
    pub(super) fn instant(self) -> Option<Instant> {
        self.0
    }

    pub(super) fn remaining(self) -> Duration {
        self.0.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }
}

/// Waits for one slice, or for `limit` if that is shorter, for a session lock that another session
/// has, on the session with this pid; answers whether it was granted.
///
/// The place in the server's queue is lost between two slices. A slice that ends without the lock
/// leaves an error entry in the server's log.
///
/// Should the time-out strike as the lock is granted, PostgreSQL reports the time-out and the lock
/// is held all the same. The block therefore looks at `pg_locks`, and what it finds held is taken:
/// a session that waits in this mode did not hold it before, or it would not have to wait.
pub(super) fn for_session_lock(
    conn: &mut PgConnection,
    key: &LockKey,
    hold: &Hold,
    limit: Duration,
) -> Result<bool> {
    let limit = limit.min(SLICE);
    let sent = match transaction::of(conn) {
        // A savepoint keeps a time-out from aborting the test.
        Transaction::Test => {
            conn.transaction(|conn| conn.batch_execute(&session_lock_message(hold, limit)))
        }
        // What bounds a transaction must not bound a slice (PostgreSQL 17 and later).
        _ => conn.batch_execute(&format!(
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_timeout', true) \
             OPERATOR(pg_catalog.<>) '0' \
             THEN pg_catalog.set_config('transaction_timeout', '0', true) END; {}",
            session_lock_message(hold, limit)
        )),
    };
    was_granted(sent, key, hold.pid)
}

/// Waits for a transaction lock, in the server's queue and under its deadlock detection.
pub(super) fn for_xact_lock(conn: &mut PgConnection, id: LockId, mode: LockMode) -> Result<()> {
    Ok(conn.batch_execute(&xact_lock_message(id, mode))?)
}

/// Waits for a transaction lock until the deadline; answers whether it was granted.
///
/// In a savepoint, whose rollback keeps the transaction usable after a time-out and undoes a grant
/// of the last moment.
pub(super) fn for_xact_lock_until(
    conn: &mut PgConnection,
    key: &LockKey,
    id: LockId,
    mode: LockMode,
    deadline: Deadline,
) -> Result<bool> {
    let left = deadline.remaining();
    if left.is_zero() {
        return Ok(false);
    }
    let message = xact_lock_timeout_message(id, mode, left);
    let sent = conn.transaction(|conn| conn.batch_execute(&message));
    was_granted(sent, key, 0)
}

fn was_granted(sent: QueryResult<()>, key: &LockKey, taken_by: i32) -> Result<bool> {
    let error = match sent {
        Ok(()) => return Ok(true),
        Err(error) => error,
    };
    if let DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, information) = &error {
        match information.constraint_name() {
            Some(NOT_GRANTED) => return Ok(false),
            Some(SESSION_MOVED) => {
                return Err(Error::SessionMoved {
                    key: key.clone(),
                    taken_by,
                    answered_by: information
                        .details()
                        .and_then(|pid| pid.parse().ok())
                        .unwrap_or_default(),
                });
            }
            _ => {}
        }
    }
    Err(error.into())
}

fn session_lock_message(hold: &Hold, slice: Duration) -> String {
    let &Hold { id, mode, pid, .. } = hold;
    let lock = lock_call(mode.lock_function(), id);
    let pg_locks_mode = mode.pg_locks_mode();
    let slice = milliseconds(slice);
    let Locator {
        classid,
        objid,
        objsubid,
    } = id.into();
    bounded(
        id,
        &format!(
            "greatest(1, least({slice}, (extract(epoch FROM \
             pg_catalog.current_setting('deadlock_timeout')::interval) \
             OPERATOR(pg_catalog.*) 500)::int))::pg_catalog.text"
        ),
        &[
            ("pid", pid.into()),
            ("classid", classid.into()),
            ("objid", objid.into()),
            ("objsubid", objsubid.into()),
        ],
        &format!(
            "DO $interlock$ BEGIN \
             IF pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.<>) \
             pg_catalog.current_setting('diesel_interlock.pid')::int THEN \
             RAISE check_violation USING CONSTRAINT = '{SESSION_MOVED}', \
             DETAIL = pg_catalog.pg_backend_pid()::pg_catalog.text, \
             MESSAGE = 'diesel_interlock: another session answers than the one that was asked'; \
             END IF; \
             BEGIN PERFORM {lock}; \
             EXCEPTION WHEN lock_not_available THEN \
             IF NOT EXISTS ({HELD_BY_THIS_SESSION} \
             AND classid OPERATOR(pg_catalog.=) \
             pg_catalog.current_setting('diesel_interlock.classid')::pg_catalog.oid \
             AND objid OPERATOR(pg_catalog.=) \
             pg_catalog.current_setting('diesel_interlock.objid')::pg_catalog.oid \
             AND objsubid OPERATOR(pg_catalog.=) \
             pg_catalog.current_setting('diesel_interlock.objsubid')::int \
             AND mode OPERATOR(pg_catalog.=) '{pg_locks_mode}') \
             THEN {NOT_GRANTED_NOW} END IF; \
             END; \
             IF pg_catalog.current_setting('idle_session_timeout', true) \
             OPERATOR(pg_catalog.<>) '0' THEN \
             PERFORM pg_catalog.set_config('idle_session_timeout', '0', false); END IF; \
             END $interlock$"
        ),
    )
}

fn xact_lock_message(id: LockId, mode: LockMode) -> String {
    let lock = lock_call(mode.xact_lock_function(), id);
    bounded(id, "'0'", &[], &format!("SELECT {lock}"))
}

fn xact_lock_timeout_message(id: LockId, mode: LockMode, timeout: Duration) -> String {
    let lock = lock_call(mode.xact_lock_function(), id);
    bounded(
        id,
        &format!("'{}'", milliseconds(timeout)),
        &[],
        &format!(
            "DO $interlock$ BEGIN PERFORM {lock}; \
             EXCEPTION WHEN lock_not_available THEN {NOT_GRANTED_NOW} \
             END $interlock$"
        ),
    )
}

const NOT_GRANTED_NOW: &str = "RAISE check_violation USING \
     CONSTRAINT = 'diesel_interlock_lock_not_granted', \
     MESSAGE = 'diesel_interlock: the advisory lock is still held by another session';";

/// Runs a statement with the given `lock_timeout` and no `statement_timeout`.
///
/// What differs from call to call is handed over as settings of our own: `pg_stat_statements` keeps
/// each text of a `DO` apart, and would keep one for every key and session.
fn bounded(id: LockId, lock_timeout: &str, ours: &[(&str, i64)], statement: &str) -> String {
    let key = match id {
        LockId::BigInt(number) => vec![("key", number)],
        LockId::Pair(first, second) => vec![("key", first.into()), ("key2", second.into())],
    };
    let ours: String = key
        .iter()
        .chain(ours)
        .map(|(name, value)| {
            format!("pg_catalog.set_config('diesel_interlock.{name}', '{value}', true), ")
        })
        .collect();
    format!(
        "SELECT {ours}\
         pg_catalog.set_config('diesel_interlock.statement_timeout', \
         pg_catalog.current_setting('statement_timeout'), true), \
         pg_catalog.set_config('diesel_interlock.lock_timeout', \
         pg_catalog.current_setting('lock_timeout'), true), \
         pg_catalog.set_config('statement_timeout', '0', true), \
         pg_catalog.set_config('lock_timeout', {lock_timeout}, true); \
         {statement}; \
         SELECT \
         pg_catalog.set_config('statement_timeout', \
         pg_catalog.current_setting('diesel_interlock.statement_timeout'), true), \
         pg_catalog.set_config('lock_timeout', \
         pg_catalog.current_setting('diesel_interlock.lock_timeout'), true)"
    )
}

fn lock_call(function: &str, id: LockId) -> String {
    let key = "pg_catalog.current_setting('diesel_interlock.key')";
    match id {
        LockId::BigInt(_) => format!("pg_catalog.{function}({key}::bigint)"),
        LockId::Pair(..) => format!(
            "pg_catalog.{function}({key}::int, \
             pg_catalog.current_setting('diesel_interlock.key2')::int)"
        ),
    }
}

/// Whole milliseconds, rounded up: a time-out of 0 would mean to wait for ever.
pub(super) fn milliseconds(duration: Duration) -> u128 {
    duration.as_nanos().div_ceil(1_000_000).clamp(1, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_outs_are_whole_milliseconds_that_postgresql_takes() {
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
    fn a_wait_on_another_session_than_was_asked_takes_nothing() {
        let database = workbench::Database::new();
        let conn = &mut database.connect();
        let key = LockKey::bigint(1);
        let hold = Hold {
            id: LockId::BigInt(1),
            mode: LockMode::Exclusive,
            pid: -1,
            idle_session_timeout: None,
            fencing_token: None,
        };
        let moved = for_session_lock(conn, &key, &hold, SLICE);
        let pid: i32 = diesel::select(crate::functions::pg_backend_pid())
            .get_result(conn)
            .unwrap();
        match moved {
            Err(Error::SessionMoved {
                taken_by: -1,
                answered_by,
                ..
            }) => assert_eq!(answered_by, pid),
            other => panic!("{other:?}"),
        }
        let unlocked: bool = diesel::select(crate::functions::pg_advisory_unlock(1_i64))
            .get_result(conn)
            .unwrap();
        assert!(!unlocked);
    }

    #[test]
    fn the_text_of_a_wait_differs_in_its_settings_alone() {
        let message = |number| {
            xact_lock_timeout_message(
                LockId::BigInt(number),
                LockMode::Shared,
                Duration::from_millis(7),
            )
        };
        let mut statements = message(i64::MIN)
            .split("; ")
            .map(str::to_owned)
            .collect::<Vec<_>>();
        assert_eq!(
            statements.remove(0),
            "SELECT pg_catalog.set_config('diesel_interlock.key', '-9223372036854775808', true), \
             pg_catalog.set_config('diesel_interlock.statement_timeout', \
             pg_catalog.current_setting('statement_timeout'), true), \
             pg_catalog.set_config('diesel_interlock.lock_timeout', \
             pg_catalog.current_setting('lock_timeout'), true), \
             pg_catalog.set_config('statement_timeout', '0', true), \
             pg_catalog.set_config('lock_timeout', '7', true)"
        );
        assert_eq!(
            statements.remove(0),
            "DO $interlock$ BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(\
             pg_catalog.current_setting('diesel_interlock.key')::bigint)"
        );
        let other = message(5);
        assert!(statements.iter().all(|statement| other.contains(statement)));
    }
}
