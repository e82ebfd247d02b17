//! Taking a lock, or finding that another session has it.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Integer, Nullable, Text};

use super::push_key;
use crate::advisory::mode::LockMode;
use crate::key::LockId;

/// Takes a session lock if it is free, on a session where nothing else is to be done for it.
///
/// Answers the session's pid, null if another session has the lock, and 0 if nothing was tried, since it
/// takes [`TryAcquireCarefully`]. One column, and as few functions as possible: PostgreSQL looks each up
/// whenever the statement is executed, which costs more than to call it.
#[derive(Debug)]
pub(crate) struct TryAcquire<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
}

prepared_query!(TryAcquire -> Nullable<Integer>);

impl QueryFragment<Pg> for TryAcquire<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        // A flat SELECT, since a subquery costs as much again as the lock itself.
        out.push_sql(
            "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() \
             OR pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN 0 WHEN pg_catalog.",
        );
        out.push_sql(self.mode.try_lock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(" THEN pg_catalog.pg_backend_pid() END");
        Ok(())
    }
}

/// Takes a session lock if it is free, and lifts `idle_session_timeout` (PostgreSQL 14 and later)
/// from the session that got it, or the server would end the session and with it the lock.
#[derive(Debug)]
pub(crate) struct TryAcquireCarefully<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
}

/// What [`TryAcquireCarefully`] answers.
#[derive(Debug, Queryable)]
pub(crate) struct TryAcquired {
    /// As it was before; `None` before PostgreSQL 14.
    pub(crate) idle_session_timeout: Option<String>,
    /// Negative if another session has the lock; `None` on a hot standby, where nothing was tried.
    pub(crate) pid: Option<i32>,
}

prepared_query!(TryAcquireCarefully -> (Nullable<Text>, Nullable<Integer>));

impl QueryFragment<Pg> for TryAcquireCarefully<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        // PostgreSQL evaluates the columns in their order, so the setting is read before it is lifted.
        out.push_sql(
            "SELECT pg_catalog.current_setting('idle_session_timeout', true), \
             CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN NOT pg_catalog.",
        );
        out.push_sql(self.mode.try_lock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(
            " THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid() \
             WHEN pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN CASE WHEN pg_catalog.set_config('idle_session_timeout', '0', false) IS NOT NULL \
             THEN pg_catalog.pg_backend_pid() END \
             ELSE pg_catalog.pg_backend_pid() END",
        );
        Ok(())
    }
}

/// Waits for a session lock in one prepared statement.
///
/// Answers the session's pid, negative if it did not try: where a setting of the session would strike before
/// `lock_timeout`, which only a message of several statements can change in time. Those that strike have
/// to leave room for the slice of a wait, half a second.
///
/// Not to be used where `idle_session_timeout` is to be lifted.
#[derive(Debug)]
pub(crate) struct Acquire<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
    /// Its `lock_timeout`.
    pub(crate) milliseconds: &'a str,
}

prepared_query!(Acquire -> Integer);

impl QueryFragment<Pg> for Acquire<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT CASE WHEN ");
        out.push_sql(TOO_SHORT);
        out.push_sql(
            " THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid() \
             WHEN pg_catalog.set_config('lock_timeout', ",
        );
        out.push_bind_param::<Text, _>(self.milliseconds)?;
        out.push_sql(", true) IS NULL OR pg_catalog.");
        out.push_sql(self.mode.lock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(" IS NULL THEN 0 ELSE pg_catalog.pg_backend_pid() END");
        Ok(())
    }
}

/// That a time-out of this session leaves a slice no room. The last came with PostgreSQL 17.
const TOO_SHORT: &str = "pg_catalog.current_setting('deadlock_timeout')::pg_catalog.interval \
    OPERATOR(pg_catalog.<) '1s' \
    OR pg_catalog.current_setting('statement_timeout') OPERATOR(pg_catalog.<>) '0' \
    AND pg_catalog.current_setting('statement_timeout')::pg_catalog.interval \
    OPERATOR(pg_catalog.<=) '1s' \
    OR pg_catalog.current_setting('transaction_timeout', true) OPERATOR(pg_catalog.<>) '0' \
    AND pg_catalog.current_setting('transaction_timeout', true)::pg_catalog.interval \
    OPERATOR(pg_catalog.<=) '1s'";

/// Takes a transaction lock if it is free, unless the isolation level makes it useless.
///
/// Answers 1 if it was granted, 0 if another session has it, and if nothing was tried, -1 at REPEATABLE
/// READ and null on a hot standby.
#[derive(Debug)]
pub(crate) struct TryAcquireXact<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
}

prepared_query!(TryAcquireXact -> Nullable<Integer>);

impl QueryFragment<Pg> for TryAcquireXact<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_isolation') \
             OPERATOR(pg_catalog.=) 'repeatable read' THEN -1 \
             WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN pg_catalog.",
        );
        out.push_sql(self.mode.try_xact_lock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(" THEN 1 ELSE 0 END");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::texts::*;
    use super::*;

    #[test]
    fn a_try_is_one_column() {
        let query = TryAcquire {
            id: &PAIR,
            mode: LockMode::Shared,
        };
        assert_eq!(
            sql(&query),
            "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() \
             OR pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN 0 WHEN pg_catalog.pg_try_advisory_lock_shared($1, $2) \
             THEN pg_catalog.pg_backend_pid() END -- binds: [1, 2]"
        );
    }

    #[test]
    fn a_careful_try_asks_for_everything_at_once() {
        let query = TryAcquireCarefully {
            id: &BIGINT,
            mode: LockMode::Exclusive,
        };
        assert_eq!(
            sql(&query),
            "SELECT pg_catalog.current_setting('idle_session_timeout', true), \
             CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN NOT pg_catalog.pg_try_advisory_lock($1) \
             THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid() \
             WHEN pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN CASE WHEN pg_catalog.set_config('idle_session_timeout', '0', false) IS NOT NULL \
             THEN pg_catalog.pg_backend_pid() END \
             ELSE pg_catalog.pg_backend_pid() END -- binds: [-5]"
        );
    }

    #[test]
    fn a_transaction_lock_is_not_tried_where_it_would_not_protect() {
        let query = TryAcquireXact {
            id: &BIGINT,
            mode: LockMode::Exclusive,
        };
        assert_eq!(
            sql(&query),
            "SELECT CASE WHEN pg_catalog.current_setting('transaction_isolation') \
             OPERATOR(pg_catalog.=) 'repeatable read' THEN -1 \
             WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN pg_catalog.pg_try_advisory_xact_lock($1) THEN 1 ELSE 0 END -- binds: [-5]"
        );
    }
}
