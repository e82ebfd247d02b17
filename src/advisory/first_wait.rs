//! The first slice of a wait: one prepared statement, since most waits are over within it.
//!
//! It has no more to tell a time-out by than the time: PostgreSQL's words for it are in the language of the
//! server, and Diesel does not hand out its code.

use std::time::{Duration, Instant};

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::DatabaseErrorKind::{ClosedConnection, Unknown};
use diesel::result::Error as DieselError;

use super::guard::Hold;
use super::query::{Acquire, IsHeld, get_numbered_result};
use super::wait::{SLICE, milliseconds};
use crate::error::Result;
use crate::transaction::{self, Transaction};

/// Waits for a session lock that another session has, for one slice, or for `limit` if that is shorter; on
/// whatever session answers, whose pid it notes. Answers whether the lock was granted.
///
/// Does not wait where the statement cannot: in a transaction, which a time-out would abort, and where the
/// session's settings forbid.
pub(super) fn for_session_lock(
    conn: &mut PgConnection,
    hold: &mut Hold,
    limit: Duration,
) -> Result<bool> {
    if transaction::of(conn) == Transaction::None {
        let limit = limit.min(SLICE);
        let began = Instant::now();
        match wait(conn, hold, limit) {
            Ok(pid) => {
                hold.pid = pid.abs();
                return Ok(pid.is_positive());
            }
            Err(error) if is_time_out(&error, began.elapsed(), limit) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // Should the time-out strike as the lock is granted, PostgreSQL reports the time-out and the lock is held
    // all the same. Nobody who has to wait in this mode held it before.
    let locator = hold.id.into();
    let (pid, held) = IsHeld {
        locator: &locator,
        mode: hold.mode,
        prepared: true,
    }
    .get_result(conn)?;
    hold.pid = pid;
    Ok(held)
}

/// Whatever strikes sooner is something else, and news for the caller. To Diesel the time-out, too, is an error of a
/// closed connection, if that has been closed before it was read.
fn is_time_out(error: &DieselError, elapsed: Duration, limit: Duration) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(Unknown | ClosedConnection, _)
    ) && elapsed >= limit.mul_f64(0.9)
}

fn wait(conn: &mut PgConnection, hold: &Hold, limit: Duration) -> QueryResult<i32> {
    let query = Acquire {
        id: &hold.id,
        mode: hold.mode,
        milliseconds: &milliseconds(limit).to_string(),
    };
    get_numbered_result!(query, conn)
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;
    use diesel::result::DatabaseErrorKind;

    use super::*;
    use crate::advisory::mode::LockMode;
    use crate::error::Error;
    use crate::functions::{pg_advisory_unlock, pg_backend_pid, pg_try_advisory_lock};
    use crate::key::LockId;

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

    #[test]
    fn a_free_lock_is_taken_and_the_session_known() {
        let database = workbench::Database::new();
        let (conn, hold) = (&mut database.connect(), &mut hold());
        assert!(for_session_lock(conn, hold, Duration::MAX).unwrap());
        assert_eq!(hold.pid, pid(conn));
        assert!(unlock(conn));
        assert!(!unlock(conn));
    }

    #[test]
    fn a_time_out_is_no_error_and_nothing_is_held() {
        let database = workbench::Database::new();
        let (conn, other, hold) = (
            &mut database.connect(),
            &mut database.connect(),
            &mut hold(),
        );
        assert!(take(other));
        assert!(!for_session_lock(conn, hold, Duration::from_millis(20)).unwrap());
        assert_eq!(hold.pid, pid(conn));
        assert!(unlock(other));
        assert!(!unlock(conn));
    }

    #[test]
    fn what_was_granted_as_the_time_ran_out_is_found() {
        let database = workbench::Database::new();
        let (conn, hold) = (&mut database.connect(), &mut hold());
        conn.begin_test_transaction().unwrap();
        assert!(take(conn));
        assert!(for_session_lock(conn, hold, SLICE).unwrap());
        assert_eq!(hold.pid, pid(conn));
        assert!(unlock(conn));
        assert!(!unlock(conn), "it was not taken twice");
    }

    #[test]
    fn a_session_whose_settings_strike_sooner_does_not_wait_here() {
        let database = workbench::Database::new();
        for (settings, waits) in [
            ("SET statement_timeout = '1s'", false),
            ("SET statement_timeout = '1001ms'", true),
            ("SET statement_timeout = '1d'", true),
            (
                "SET IntervalStyle = 'sql_standard'; SET statement_timeout = '2h'",
                true,
            ),
            ("SET deadlock_timeout = '999ms'", false),
            (
                "SET deadlock_timeout = '1s'; SET lock_timeout = '1ms'",
                true,
            ),
        ] {
            let (conn, hold) = (&mut database.connect(), &mut hold());
            conn.batch_execute(settings).unwrap();
            assert_eq!(
                for_session_lock(conn, hold, SLICE).unwrap(),
                waits,
                "{settings}"
            );
            assert_eq!(hold.pid, pid(conn));
            assert_eq!(unlock(conn), waits);
        }
    }

    #[test]
    fn another_error_is_not_taken_for_the_time_out() {
        let database = workbench::Database::new();
        let (conn, hold) = (&mut database.connect(), &mut hold());
        conn.batch_execute("BEGIN; SAVEPOINT s").unwrap();
        assert!(conn.batch_execute("SELECT 1 / 0").is_err());
        assert!(matches!(
            for_session_lock(conn, hold, SLICE),
            Err(Error::Database(_))
        ));
    }

    #[test]
    fn a_time_out_that_is_read_after_the_connection_was_closed_is_one() {
        let error = |kind| DieselError::DatabaseError(kind, Box::new(String::new()));
        let (slice, early) = (Duration::from_millis(500), Duration::from_millis(400));
        for kind in [Unknown, ClosedConnection] {
            assert!(is_time_out(&error(kind), slice, slice));
        }
        assert!(!is_time_out(&error(ClosedConnection), early, slice));
        let other = DatabaseErrorKind::SerializationFailure;
        assert!(!is_time_out(&error(other), slice, slice));
    }
}
