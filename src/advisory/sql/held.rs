//! The statements that read `pg_locks`: whether a lock is held, and by which session.

#[cfg(any(feature = "r2d2", feature = "async"))]
use diesel::data_types::PgTimestamp;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
#[cfg(any(feature = "r2d2", feature = "async"))]
use diesel::sql_types::Timestamptz;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Oid, Text};

use super::{GRANTED, SESSION_NAME, TOKEN, not_zero};
use crate::advisory::lock::{Lock, LockMode};
use crate::advisory::rules::WaitReply;
use crate::key::LockId;

/// A lock as a row of `pg_locks` shows it: a `bigint` in two halves and the number 1, a pair as it is and the number 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::advisory) struct LockRow {
    classid: u32,
    objid: u32,
    objsubid: i32,
    mode: &'static str,
}

impl From<Lock> for LockRow {
    fn from(lock: Lock) -> Self {
        let (classid, objid, objsubid) = match lock.id {
            LockId::BigInt(number) => ((number >> 32) as u32, number as u32, 1),
            LockId::Pair(first, second) => (first as u32, second as u32, 2),
        };
        Self {
            classid,
            objid,
            objsubid,
            mode: match lock.mode {
                LockMode::Exclusive => "ExclusiveLock",
                LockMode::Shared => "ShareLock",
            },
        }
    }
}

/// The advisory locks that this session holds in this database.
const HELD_BY_THIS_SESSION: &str = "SELECT FROM pg_catalog.pg_locks \
    WHERE locktype OPERATOR(pg_catalog.=) 'advisory' AND granted \
    AND pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() \
    AND database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database \
    WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())";

fn push_is_held<'b>(out: &mut AstPass<'_, 'b, Pg>, row: &'b LockRow) -> QueryResult<()> {
    out.push_sql("EXISTS (");
    out.push_sql(HELD_BY_THIS_SESSION);
    push_lock(out, row)?;
    out.push_sql(")");
    Ok(())
}

/// Restricts `pg_locks` to one lock and mode.
fn push_lock<'b>(out: &mut AstPass<'_, 'b, Pg>, row: &'b LockRow) -> QueryResult<()> {
    out.push_sql(" AND classid OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Oid, _>(&row.classid)?;
    out.push_sql(" AND objid OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Oid, _>(&row.objid)?;
    out.push_sql(" AND objsubid OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Integer, _>(&row.objsubid)?;
    out.push_sql(" AND mode OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Text, _>(row.mode)
}

statement! {
    /// Returns the session's pid, and whether the session holds the lock in this mode.
    pub(super) struct IsHeld {
        row: LockRow,
        /// Whether to prepare the statement. Some code may have deallocated the prepared statements.
        prepared: bool,
    } -> (Integer, Bool),
    |self, out| {
        if !self.prepared {
            out.unsafe_to_cache_prepared();
        }
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), ");
        push_is_held(&mut out, &self.row)?;
    }
}

statement! {
    /// Reads whether a wait that timed out was granted the lock nevertheless, and lifts `idle_session_timeout` if it was.
    pub(super) struct LookAfterTimeout { row: LockRow } -> (Nullable<Text>, Integer),
    |self, out| {
        out.push_sql(
            "SELECT pg_catalog.current_setting('idle_session_timeout', true), CASE WHEN NOT ",
        );
        push_is_held(&mut out, &self.row)?;
        out.push_sql(" THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid()");
        out.push_sql(GRANTED);
    }
}

/// The row of [`LookAfterTimeout`].
#[derive(Debug, Queryable)]
pub(in crate::advisory) struct LookedAfterTimeout {
    /// As it was before the statement. `None` before PostgreSQL 14.
    idle_session_timeout: Option<String>,
    /// Negative if the session does not hold the lock.
    pid: i32,
}

impl LookedAfterTimeout {
    pub(in crate::advisory) fn read(self) -> WaitReply {
        WaitReply {
            pid: self.pid.abs(),
            is_granted: self.pid > 0,
            idle_session_timeout: not_zero(self.idle_session_timeout),
            refused_above: None,
        }
    }
}

statement! {
    /// Draws a fencing token for a lock that this session holds in this mode. The token is null if it does not.
    pub(super) struct DrawToken { row: LockRow } -> (Integer, Text, Nullable<BigInt>),
    |self, out| {
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), ");
        out.push_sql(SESSION_NAME);
        out.push_sql(", CASE WHEN ");
        push_is_held(&mut out, &self.row)?;
        out.push_sql(" THEN ");
        out.push_sql(TOKEN);
        out.push_sql(" END");
    }
}

/// The row of [`DrawToken`].
#[derive(Debug, Queryable)]
pub(in crate::advisory) struct DrawnToken {
    pub(in crate::advisory) pid: i32,
    pub(in crate::advisory) session: String,
    pub(in crate::advisory) number: Option<i64>,
}

#[cfg(any(feature = "r2d2", feature = "async"))]
statement! {
    /// Returns the session's pid, when the session began, which tells it from a later session with the same pid, and whether
    /// it holds the lock in this mode.
    pub(super) struct WatchFrom { row: LockRow } -> (Integer, Nullable<Timestamptz>, Bool),
    |self, out| {
        out.push_sql(
            "SELECT pg_catalog.pg_backend_pid(), (SELECT backend_start \
             FROM pg_catalog.pg_stat_activity \
             WHERE pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()), ",
        );
        push_is_held(&mut out, &self.row)?;
    }
}

#[cfg(any(feature = "r2d2", feature = "async"))]
statement! {
    /// Returns, on any session, whether the session with this pid holds the lock in this mode.
    pub(super) struct HeldBy {
        row: LockRow,
        pid: i32,
        /// When that session began, if it is known.
        session_start: Option<PgTimestamp>,
    } -> Bool,
    |self, out| {
        out.push_sql(
            "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks AS l \
             LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid \
             WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.granted \
             AND l.database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database \
             WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database()) \
             AND l.pid OPERATOR(pg_catalog.=) ",
        );
        out.push_bind_param::<Integer, _>(&self.pid)?;
        out.push_sql(" AND COALESCE(a.backend_start OPERATOR(pg_catalog.=) ");
        out.push_bind_param::<Nullable<Timestamptz>, _>(&self.session_start)?;
        out.push_sql(", true)");
        push_lock(&mut out, &self.row)?;
        out.push_sql(")");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_held_looks_for_the_lock_as_pg_locks_shows_it() {
        let lock = Lock {
            id: LockId::BigInt(-5),
            mode: LockMode::Shared,
        };
        let query = IsHeld {
            row: lock.into(),
            prepared: true,
        };
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT pg_catalog.pg_backend_pid(), EXISTS (SELECT FROM pg_catalog.pg_locks \
             WHERE locktype OPERATOR(pg_catalog.=) 'advisory' AND granted \
             AND pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() \
             AND database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database \
             WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database()) \
             AND classid OPERATOR(pg_catalog.=) $1 AND objid OPERATOR(pg_catalog.=) $2 \
             AND objsubid OPERATOR(pg_catalog.=) $3 AND mode OPERATOR(pg_catalog.=) $4) -- binds: [4294967295, 4294967291, 1, \"ShareLock\"]"
        );
    }

    #[test]
    fn a_key_is_located_by_its_halves() {
        let locate = |id: LockId| {
            let mode = LockMode::Exclusive;
            let row = LockRow::from(Lock { id, mode });
            (row.classid, row.objid, row.objsubid)
        };
        assert_eq!(locate(LockId::BigInt((7 << 32) | 9)), (7, 9, 1));
        assert_eq!(locate(LockId::BigInt(i64::MIN)), (1 << 31, 0, 1));
        assert_eq!(locate(LockId::Pair(-1, 3)), (u32::MAX, 3, 2));
    }
}
