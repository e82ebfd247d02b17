//! The sessions that block others.

// Diesel's macros write aliases and modules without documentation.
#![allow(missing_docs)]

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;

use super::locks::LOCKS;
use super::view::view;
use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::time::Elapsed;

diesel::table! {
    /// Each session that waits for an advisory lock, with each session that it waits for.
    blocking (blocked_pid) {
        /// The `bigint` that the session waits for; `NULL` for a pair.
        key -> Nullable<BigInt>,
        /// The first number of a pair; `NULL` for a `bigint`.
        key1 -> Nullable<Integer>,
        /// The second number of a pair; `NULL` for a `bigint`.
        key2 -> Nullable<Integer>,
        /// When the wait started; `NULL` before PostgreSQL 14.
        waiting_since -> Nullable<Timestamptz>,
        /// How long it has waited, by the server's clock; `NULL` before PostgreSQL 14.
        waited -> Nullable<Interval>,
        /// The process id of the session that waits.
        blocked_pid -> Integer,
        /// The `application_name` of that session.
        blocked_application_name -> Nullable<Text>,
        /// The process id of the session that it waits for; `NULL` for a prepared transaction.
        blocking_pid -> Nullable<Integer>,
        /// The `application_name` of that session.
        blocking_application_name -> Nullable<Text>,
        /// `active`, `idle`, `idle in transaction` and the like; `NULL` where it is hidden.
        blocking_state -> Nullable<Text>,
        /// When the blocking session's open transaction started; `NULL` where there is none, or where it is hidden.
        blocking_xact_start -> Nullable<Timestamptz>,
    }
}

view! {
    /// The source of [`blocked()`].
    Blocking of blocking [
        key, key1, key2, waiting_since, waited, blocked_pid, blocked_application_name, blocking_pid,
        blocking_application_name, blocking_state, blocking_xact_start,
    ] = "SELECT w.key, w.key1, w.key2, w.waiting_since, w.waited, w.pid AS blocked_pid, \
        w.application_name AS blocked_application_name, b.pid AS blocking_pid, \
        a.application_name AS blocking_application_name, a.state AS blocking_state, \
        a.xact_start AS blocking_xact_start FROM (",
        LOCKS,
        // Parallel workers may list a session twice; 0 stands for a prepared transaction.
        ") AS w CROSS JOIN LATERAL \
        (SELECT DISTINCT CASE WHEN u.pid OPERATOR(pg_catalog.<>) 0 THEN u.pid END AS pid \
        FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) AS u (pid)) AS b \
        LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) b.pid \
        WHERE NOT w.granted";
}

/// A session that waits for an advisory lock, and one of those that it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[diesel(table_name = blocking, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Blocked {
    /// The lock that it waits for.
    #[diesel(select_expression = (blocking::key, blocking::key1, blocking::key2))]
    #[diesel(select_expression_type = (blocking::key, blocking::key1, blocking::key2))]
    pub key: LockId,
    /// When the wait started; `None` before PostgreSQL 14.
    pub waiting_since: Option<DateTime<Utc>>,
    /// The duration of the wait, by the server's clock; `None` before PostgreSQL 14.
    #[diesel(deserialize_as = Elapsed<Option<Duration>>)]
    pub waited: Option<Duration>,
    /// The process id of the session that waits.
    pub blocked_pid: i32,
    /// The `application_name` of that session.
    pub blocked_application_name: Option<String>,
    /// The process id of the session that it waits for; `None` for a prepared transaction.
    pub blocking_pid: Option<i32>,
    /// The `application_name` of that session.
    pub blocking_application_name: Option<String>,
    /// `active`, `idle`, `idle in transaction` and the like; `None` where the server hides it.
    pub blocking_state: Option<String>,
    /// When the blocking session's open transaction started; `None` where there is none, or where the server hides it.
    pub blocking_xact_start: Option<DateTime<Utc>>,
}

/// Selects the sessions that wait for an advisory lock of the current database, each with every session that it waits for:
/// holders, and waiters ahead of it in the queue. Loads as [`Blocked`].
///
/// One row per pair, in one round trip over `pg_locks`, `pg_blocking_pids` and `pg_stat_activity`. Its columns are in
/// [`blocking`].
///
/// # Cost
///
/// `pg_blocking_pids` locks the server's whole lock table for a short time, once for each waiter. Run this query when an
/// operator looks. For a graph, poll [`waiters`](super::waiters()).
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, blocking};
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// let idle_blockers = monitor::blocked()
///     .filter(blocking::blocking_state.like("idle%"))
///     .order(blocking::waited.desc())
///     .load::<monitor::Blocked>(conn)?;
/// # assert_eq!(idle_blockers, []);
/// # Ok::<(), diesel::result::Error>(())
/// ```
#[auto_type]
pub fn blocked() -> _ {
    let selection: AsSelect<Blocked, Pg> = Blocked::as_select();
    Blocking.select(selection)
}

/// Returns the condition that a row of [`blocked()`] is about this lock.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName).
pub fn blocked_on(key: &LockKey) -> Result<blocked_on_id> {
    key.id().map(blocked_on_id)
}

#[auto_type]
pub(super) fn blocked_on_id(id: LockId) -> _ {
    let (key, key1, key2): (Option<i64>, Option<i32>, Option<i32>) = id.numbers();
    blocking::key
        .is_not_distinct_from(key)
        .and(blocking::key1.is_not_distinct_from(key1))
        .and(blocking::key2.is_not_distinct_from(key2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blockers_are_asked_for_once_per_waiter() {
        let query = Blocking
            .filter(blocked_on(&LockKey::pair(1, 2)).unwrap())
            .select(blocking::blocking_pid);
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            format!(
                "SELECT \"blocking\".\"blocking_pid\" FROM (\
                 SELECT w.key, w.key1, w.key2, w.waiting_since, w.waited, w.pid AS blocked_pid, \
                 w.application_name AS blocked_application_name, b.pid AS blocking_pid, \
                 a.application_name AS blocking_application_name, a.state AS blocking_state, \
                 a.xact_start AS blocking_xact_start FROM ({LOCKS}) AS w CROSS JOIN LATERAL \
                 (SELECT DISTINCT CASE WHEN u.pid OPERATOR(pg_catalog.<>) 0 THEN u.pid END AS pid \
                 FROM pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) AS u (pid)) AS b \
                 LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) b.pid \
                 WHERE NOT w.granted) AS \"blocking\" \
                 WHERE (((\"blocking\".\"key\" IS NOT DISTINCT FROM $1) \
                 AND (\"blocking\".\"key1\" IS NOT DISTINCT FROM $2)) \
                 AND (\"blocking\".\"key2\" IS NOT DISTINCT FROM $3)) -- binds: [None, Some(1), Some(2)]"
            )
        );
    }
}
