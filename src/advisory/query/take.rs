//! Taking a lock, or finding that another session has it.

use std::sync::atomic::{AtomicBool, Ordering};

use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Integer, Nullable, Text};

use super::held::{Locator, push_is_held};
use super::push_key;
use super::token::{TryAcquireFenced, TryAcquiredFenced};
use crate::advisory::mode::LockMode;
use crate::advisory::token::Token;
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
        out.push_sql(" THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid()");
        out.push_sql(GRANTED);
        Ok(())
    }
}

/// The answer to a try of any kind.
#[derive(Debug)]
pub(crate) struct Answer {
    /// 0 if it was not told.
    pub(crate) pid: i32,
    pub(crate) idle_session_timeout: Option<String>,
    /// `None` on a hot standby.
    pub(crate) granted: Option<bool>,
    pub(crate) token: Option<Token>,
}

impl Answer {
    /// Tries in one prepared round trip. The first of this process that meets a session with an
    /// `idle_session_timeout` takes two, and from then on all are careful: nobody knows which session is next.
    ///
    /// The careful statement alone would do. But PostgreSQL looks up each function of a statement whenever it
    /// is executed: of the 15.5 µs that a lock and its release cost the server, the careful one costs 1.4 more,
    /// and over a Unix socket the pair takes 3 % longer.
    pub(crate) fn to(
        conn: &mut PgConnection,
        id: &LockId,
        mode: LockMode,
        fenced: bool,
    ) -> QueryResult<Self> {
        static CAREFULLY: AtomicBool = AtomicBool::new(false);
        if fenced {
            let query = TryAcquireFenced { id, mode };
            let answer = query.get_result::<TryAcquiredFenced>(conn)?;
            let token = answer.token(*id, mode);
            return Ok(Self {
                token,
                ..Self::from(answer)
            });
        }
        if !CAREFULLY.load(Ordering::Relaxed) {
            let pid: Option<i32> = get_numbered_result!(TryAcquire { id, mode }, conn)?;
            if pid != Some(0) {
                return Ok(Self {
                    pid: pid.unwrap_or_default(),
                    idle_session_timeout: None,
                    granted: Some(pid.is_some()),
                    token: None,
                });
            }
        }
        let answer: TryAcquired = get_numbered_result!(TryAcquireCarefully { id, mode }, conn)?;
        let answer = Self::from(answer);
        CAREFULLY.fetch_or(answer.idle_session_timeout.is_some(), Ordering::Relaxed);
        Ok(answer)
    }
}

/// The timeout, if there is one.
fn not_zero(idle_session_timeout: Option<String>) -> Option<String> {
    idle_session_timeout.filter(|value| value != "0")
}

impl From<TryAcquired> for Answer {
    fn from(answer: TryAcquired) -> Self {
        Self {
            pid: answer.pid.map_or(0, i32::abs),
            idle_session_timeout: not_zero(answer.idle_session_timeout),
            granted: answer.pid.map(|pid| pid > 0),
            token: None,
        }
    }
}

impl From<TryAcquiredFenced> for Answer {
    fn from(answer: TryAcquiredFenced) -> Self {
        Self {
            pid: answer.pid,
            idle_session_timeout: not_zero(answer.idle_session_timeout),
            granted: answer.token.map(|token| token != 0),
            token: None,
        }
    }
}

/// Waits for a session lock in one prepared statement, for one slice, and lifts
/// `idle_session_timeout` as [`TryAcquireCarefully`] does.
///
/// `set_config` in the same statement sets `lock_timeout` in time, because PostgreSQL arms it when
/// the wait begins. `statement_timeout` is armed as the statement starts, so the statement does not
/// wait where that, or another setting of the session, would end it before the slice is over.
#[derive(Debug)]
pub(crate) struct Wait<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
    /// The session that is to wait; 0 for any.
    pub(crate) pid: i32,
    pub(crate) milliseconds: i32,
}

/// The row of [`Wait`].
#[derive(Debug, Queryable)]
pub(crate) struct Waited {
    /// As it was before; `None` before PostgreSQL 14.
    pub(crate) idle_session_timeout: Option<String>,
    /// Negative if the statement did not wait.
    pub(crate) pid: i32,
    /// How many milliseconds a slice may have, half of `deadlock_timeout`.
    pub(crate) longest: i32,
}

prepared_query!(Wait -> (Nullable<Text>, Integer, Integer));

impl QueryFragment<Pg> for Wait<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT pg_catalog.current_setting('idle_session_timeout', true), CASE WHEN ");
        // Another session than the one that was tried takes nothing.
        out.push_bind_param::<Integer, _>(&self.pid)?;
        out.push_sql(" OPERATOR(pg_catalog.<>) 0 AND ");
        out.push_bind_param::<Integer, _>(&self.pid)?;
        out.push_sql(" OPERATOR(pg_catalog.<>) pg_catalog.pg_backend_pid() OR ");
        out.push_bind_param::<Integer, _>(&self.milliseconds)?;
        out.push_sql(" OPERATOR(pg_catalog.>) ");
        out.push_sql(LONGEST_SLICE);
        for setting in ["statement_timeout", "transaction_timeout"] {
            out.push_sql(&format!(
                " OR pg_catalog.current_setting('{setting}', true) OPERATOR(pg_catalog.<>) '0' \
                 AND extract(epoch FROM \
                 pg_catalog.current_setting('{setting}', true)::pg_catalog.interval) \
                 OPERATOR(pg_catalog.*) 1000 OPERATOR(pg_catalog.<) (500 OPERATOR(pg_catalog.+) "
            ));
            out.push_bind_param::<Integer, _>(&self.milliseconds)?;
            out.push_sql(")");
        }
        out.push_sql(
            " THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid() \
             WHEN pg_catalog.set_config('lock_timeout', ",
        );
        out.push_bind_param::<Integer, _>(&self.milliseconds)?;
        out.push_sql("::pg_catalog.text, true) IS NULL OR pg_catalog.");
        out.push_sql(self.mode.lock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(" IS NULL THEN 0");
        out.push_sql(GRANTED);
        out.push_sql(", ");
        out.push_sql(LONGEST_SLICE);
        Ok(())
    }
}

/// A waiter's snapshot and the holder's `CREATE INDEX CONCURRENTLY` wait for each other, which
/// PostgreSQL calls a deadlock after `deadlock_timeout`.
const LONGEST_SLICE: &str = "greatest(1, (extract(epoch FROM \
    pg_catalog.current_setting('deadlock_timeout')::pg_catalog.interval) \
    OPERATOR(pg_catalog.*) 500)::int)";

/// The end of a `CASE` whose other branches are for a lock that was not granted.
const GRANTED: &str = " WHEN pg_catalog.current_setting('idle_session_timeout', true) \
    OPERATOR(pg_catalog.<>) '0' \
    THEN CASE WHEN pg_catalog.set_config('idle_session_timeout', '0', false) IS NOT NULL \
    THEN pg_catalog.pg_backend_pid() END \
    ELSE pg_catalog.pg_backend_pid() END";

/// Looks whether a wait that timed out was granted the lock all the same, and lifts
/// `idle_session_timeout` if it was.
#[derive(Debug)]
pub(crate) struct Look<'a> {
    pub(crate) locator: &'a Locator,
    pub(crate) mode: LockMode,
}

/// The row of [`Look`].
#[derive(Debug, Queryable)]
pub(crate) struct Looked {
    /// As it was before; `None` before PostgreSQL 14.
    pub(crate) idle_session_timeout: Option<String>,
    /// Negative if the session does not hold the lock.
    pub(crate) pid: i32,
}

prepared_query!(Look -> (Nullable<Text>, Integer));

impl QueryFragment<Pg> for Look<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT pg_catalog.current_setting('idle_session_timeout', true), CASE WHEN NOT ",
        );
        push_is_held(&mut out, self.locator, self.mode)?;
        out.push_sql(" THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid()");
        out.push_sql(GRANTED);
        Ok(())
    }
}

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
