//! The statements of a lock, one round trip each, and how their rows are read.
//!
//! Every function, operator and table is qualified with `pg_catalog`, so that no `search_path` changes what is called. The
//! numbers of a lock are bound, except in the message that waits for a transaction lock.

#[macro_use]
mod statement;
mod held;
#[cfg(feature = "async")]
mod queued;
mod release;
mod xact;

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Integer, Nullable, Text};

pub(super) use self::held::{DrawToken, DrawnToken, IsHeld, LookAfterTimeout, LookedAfterTimeout};
#[cfg(any(feature = "r2d2", feature = "async"))]
pub(super) use self::held::{HeldBy, LockRow, WatchFrom};
#[cfg(feature = "async")]
pub(super) use self::queued::{Condition, IsIdleTimeoutOff, release_if};
pub(super) use self::release::{
    END_SESSION, RELEASE_ALL, Release, ReleaseCarefully, Released, ReleasedCarefully,
};
pub(super) use self::statement::Numbered;
use self::statement::{NumberedText, push_call};
pub(super) use self::xact::{TriedXact, TryXact, wait_for_xact};
use super::lock::{Lock, LockMode};
use super::rules::{Grant, TryReply, WaitReply};

impl LockMode {
    const fn lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_advisory_lock",
            LockMode::Shared => "pg_advisory_lock_shared",
        }
    }

    const fn try_lock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_try_advisory_lock",
            LockMode::Shared => "pg_try_advisory_lock_shared",
        }
    }
}

/// The timeout to restore at the release, if the session had one.
fn not_zero(idle_session_timeout: Option<String>) -> Option<String> {
    idle_session_timeout.filter(|value| value != "0")
}

// Taking a session lock that is free.

statement! {
    /// Takes a session lock if it is free, on a session that needs nothing else for it.
    ///
    /// Returns one column: the session's pid, null if another session holds the lock, and 0 if nothing was tried and
    /// [`TryCarefully`] must be sent instead. PostgreSQL looks up each function of a statement at every execution, which
    /// costs more than the call, so this statement has as few as possible.
    pub(super) struct Try { lock: Lock } -> (Nullable<Integer>,),
    |self, out| {
        // A flat SELECT, because a subquery costs as much again as the lock itself.
        out.push_sql(
            "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() \
             OR pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN 0 WHEN ",
        );
        push_call(&mut out, self.lock.mode.try_lock_function(), &self.lock.id)?;
        out.push_sql(" THEN pg_catalog.pg_backend_pid() END");
    }
}

/// The row of [`Try`].
#[derive(Debug, Queryable)]
pub(super) struct Tried {
    pid: Option<i32>,
}

impl Tried {
    /// What the reply says, or `None` if nothing was tried.
    pub(super) fn read(self) -> Option<TryReply> {
        let grant = match self.pid {
            Some(0) => return None,
            Some(_) => Grant::Granted,
            None => Grant::Busy,
        };
        Some(TryReply {
            grant,
            pid: self.pid,
            idle_session_timeout: None,
            token: None,
        })
    }
}

statement! {
    /// Takes a session lock if it is free, and lifts `idle_session_timeout` (PostgreSQL 14 and later) from the session that
    /// was granted the lock. Otherwise the server would end that session, and with it the lock.
    pub(super) struct TryCarefully { lock: Lock } -> (Nullable<Text>, Nullable<Integer>),
    |self, out| {
        // PostgreSQL evaluates the columns in their order, so the setting is read before it is lifted.
        out.push_sql(
            "SELECT pg_catalog.current_setting('idle_session_timeout', true), \
             CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN NOT ",
        );
        push_call(&mut out, self.lock.mode.try_lock_function(), &self.lock.id)?;
        out.push_sql(" THEN OPERATOR(pg_catalog.-) pg_catalog.pg_backend_pid()");
        out.push_sql(GRANTED);
    }
}

/// The row of [`TryCarefully`].
#[derive(Debug, Queryable)]
pub(super) struct TriedCarefully {
    /// As it was before the statement. `None` before PostgreSQL 14.
    idle_session_timeout: Option<String>,
    /// Negative if another session holds the lock. `None` on a hot standby, where nothing was tried.
    pid: Option<i32>,
}

impl TriedCarefully {
    pub(super) fn read(self) -> TryReply {
        TryReply {
            grant: match self.pid {
                None => Grant::Standby,
                Some(pid) if pid > 0 => Grant::Granted,
                Some(_) => Grant::Busy,
            },
            pid: self.pid.map(i32::abs),
            idle_session_timeout: not_zero(self.idle_session_timeout),
            token: None,
        }
    }
}

statement! {
    /// As [`TryCarefully`], and draws a fencing token if the lock is granted: a transaction id, because every later one is
    /// greater.
    pub(super) struct TryFenced { lock: Lock } -> (Integer, Text, Nullable<Text>, Nullable<BigInt>),
    |self, out| {
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), ");
        out.push_sql(SESSION_NAME);
        out.push_sql(
            ", pg_catalog.current_setting('idle_session_timeout', true), \
             CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN NOT ",
        );
        push_call(&mut out, self.lock.mode.try_lock_function(), &self.lock.id)?;
        out.push_sql(
            " THEN 0 \
             WHEN pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN CASE WHEN pg_catalog.set_config('idle_session_timeout', '0', false) IS NOT NULL THEN ",
        );
        out.push_sql(TOKEN);
        out.push_sql(" END ELSE ");
        out.push_sql(TOKEN);
        out.push_sql(" END");
    }
}

/// The row of [`TryFenced`].
#[derive(Debug, Queryable)]
pub(super) struct TriedFenced {
    pid: i32,
    session: String,
    /// As it was before the statement. `None` before PostgreSQL 14.
    idle_session_timeout: Option<String>,
    /// 0 if the lock was not granted. `None` on a hot standby, where nothing was tried.
    token: Option<i64>,
}

impl TriedFenced {
    pub(super) fn read(self) -> TryReply {
        TryReply {
            grant: match self.token {
                None => Grant::Standby,
                Some(0) => Grant::Busy,
                Some(_) => Grant::Granted,
            },
            pid: Some(self.pid),
            idle_session_timeout: not_zero(self.idle_session_timeout),
            token: self
                .token
                .filter(|number| *number != 0)
                .map(|number| (self.session, number)),
        }
    }
}

/// The name of a session, which it is given when it draws its first token. The server reuses pids, and the cost of
/// `pg_stat_activity` grows with the number of sessions.
const SESSION_NAME: &str = "CASE WHEN COALESCE(pg_catalog.current_setting('diesel_interlock.session', true), '') \
    OPERATOR(pg_catalog.<>) '' THEN pg_catalog.current_setting('diesel_interlock.session') \
    ELSE pg_catalog.set_config('diesel_interlock.session', \
    pg_catalog.gen_random_uuid()::pg_catalog.text, false) END";

/// A fencing token. It is drawn while the lock is held, so the next holder draws a later one.
///
/// PostgreSQL does not flush the log for a transaction that has only an id, and after a crash of the server it would assign
/// the id again. So the transaction also writes an empty message to the write-ahead log.
const TOKEN: &str = "CASE WHEN pg_catalog.pg_logical_emit_message(true, 'diesel_interlock', ''::pg_catalog.text) IS NOT NULL \
    THEN pg_catalog.pg_current_xact_id()::pg_catalog.text::bigint END";

/// The end of a `CASE` whose other branches are for a lock that was not granted.
const GRANTED: &str = " WHEN pg_catalog.current_setting('idle_session_timeout', true) \
    OPERATOR(pg_catalog.<>) '0' \
    THEN CASE WHEN pg_catalog.set_config('idle_session_timeout', '0', false) IS NOT NULL \
    THEN pg_catalog.pg_backend_pid() END \
    ELSE pg_catalog.pg_backend_pid() END";

// Waiting for a session lock.

statement! {
    /// Waits for a session lock in one prepared statement, for one slice, and lifts `idle_session_timeout` as
    /// [`TryCarefully`] does.
    ///
    /// `set_config` in the same statement sets `lock_timeout` in time, because PostgreSQL arms that timeout when the wait
    /// begins. It arms `statement_timeout` when the statement begins. So the statement does not wait if that or another
    /// setting of the session would end it before the slice is over.
    pub(super) struct WaitForSlice {
        lock: Lock,
        /// The session that is to wait. 0 for any.
        pid: i32,
        milliseconds: i32,
    } -> (Nullable<Text>, Integer, Integer),
    |self, out| {
        out.push_sql("SELECT pg_catalog.current_setting('idle_session_timeout', true), CASE WHEN ");
        // A different session than the one that tried takes nothing.
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
        out.push_sql("::pg_catalog.text, true) IS NULL OR ");
        push_call(&mut out, self.lock.mode.lock_function(), &self.lock.id)?;
        out.push_sql(" IS NULL THEN 0");
        out.push_sql(GRANTED);
        out.push_sql(", ");
        out.push_sql(LONGEST_SLICE);
    }
}

/// The row of [`WaitForSlice`].
#[derive(Debug, Queryable)]
pub(super) struct WaitedForSlice {
    /// As it was before the statement. `None` before PostgreSQL 14.
    idle_session_timeout: Option<String>,
    /// Negative if the statement did not wait.
    pid: i32,
    /// How many milliseconds a slice may have: half of `deadlock_timeout`.
    longest: i32,
}

impl WaitedForSlice {
    pub(super) fn read(self) -> WaitReply {
        WaitReply {
            pid: self.pid.abs(),
            is_granted: self.pid > 0,
            idle_session_timeout: not_zero(self.idle_session_timeout),
            refused_above: (self.pid <= 0).then_some(self.longest),
        }
    }
}

/// A waiter's snapshot and the holder's `CREATE INDEX CONCURRENTLY` wait for each other. PostgreSQL reports this as a
/// deadlock after `deadlock_timeout`.
const LONGEST_SLICE: &str = "greatest(1, (extract(epoch FROM \
    pg_catalog.current_setting('deadlock_timeout')::pg_catalog.interval) \
    OPERATOR(pg_catalog.*) 500)::int)";

/// Opens a transaction in which no setting of the session ends a wait. A default such as DEFERRABLE could make the
/// transaction itself wait, so the level is named. `transaction_timeout` came with PostgreSQL 17.
pub(super) const BEGIN_WITHOUT_TIMEOUTS: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0; \
    SET LOCAL idle_in_transaction_session_timeout = 0; \
    SELECT CASE WHEN pg_catalog.current_setting('transaction_timeout', true) \
    OPERATOR(pg_catalog.<>) '0' \
    THEN pg_catalog.set_config('transaction_timeout', '0', true) END";

pub(super) const COMMIT: &str = "COMMIT";
pub(super) const ROLLBACK: &str = "ROLLBACK";

/// As [`BEGIN_WITHOUT_TIMEOUTS`], inside a test transaction.
pub(super) const SAVEPOINT_WITHOUT_TIMEOUTS: &str =
    "SAVEPOINT diesel_interlock_wait; SET LOCAL statement_timeout = 0";
pub(super) const ROLLBACK_TO_SAVEPOINT: &str = "ROLLBACK TO SAVEPOINT diesel_interlock_wait; \
    RELEASE SAVEPOINT diesel_interlock_wait";

/// The savepoint around a wait for a transaction lock.
pub(super) const SAVEPOINT: &str = "SAVEPOINT diesel_interlock_wait";
pub(super) const RELEASE_SAVEPOINT: &str = "RELEASE SAVEPOINT diesel_interlock_wait";

/// Fails in an aborted transaction, and if the session has ended.
pub(super) const PING: &str = "SELECT 1";

numbered_texts!(Try, TryCarefully, WaitForSlice);

#[cfg(test)]
mod tests {
    use super::LockMode::{Exclusive, Shared};
    use super::*;
    use crate::key::LockId;

    const BIGINT: LockId = LockId::BigInt(-5);
    const PAIR: LockId = LockId::Pair(1, 2);

    fn text(query: &impl QueryFragment<Pg>) -> String {
        diesel::debug_query::<Pg, _>(query).to_string()
    }

    fn lock(id: LockId, mode: LockMode) -> Lock {
        Lock { id, mode }
    }

    #[test]
    fn a_try_is_one_column() {
        let lock = lock(PAIR, Shared);
        assert_eq!(
            text(&Try { lock }),
            "SELECT CASE WHEN pg_catalog.pg_is_in_recovery() \
             OR pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN 0 WHEN pg_catalog.pg_try_advisory_lock_shared($1, $2) \
             THEN pg_catalog.pg_backend_pid() END -- binds: [1, 2]"
        );
    }

    #[test]
    fn a_careful_try_asks_for_everything_at_once() {
        let lock = lock(BIGINT, Exclusive);
        assert_eq!(
            text(&TryCarefully { lock }),
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
    fn the_reply_to_a_try_says_whether_the_lock_was_granted() {
        let grant = |pid| Tried { pid }.read().map(|reply| (reply.grant, reply.pid));
        assert_eq!(grant(Some(7)), Some((Grant::Granted, Some(7))));
        assert_eq!(grant(None), Some((Grant::Busy, None)));
        assert_eq!(grant(Some(0)), None);

        let careful = |timeout: Option<&str>, pid| {
            let idle_session_timeout = timeout.map(str::to_owned);
            let reply = TriedCarefully {
                idle_session_timeout,
                pid,
            }
            .read();
            (reply.grant, reply.pid, reply.idle_session_timeout)
        };
        assert_eq!(careful(None, Some(7)), (Grant::Granted, Some(7), None));
        assert_eq!(careful(Some("0"), Some(7)), (Grant::Granted, Some(7), None));
        assert_eq!(
            careful(Some("1min"), Some(-7)),
            (Grant::Busy, Some(7), Some("1min".into()))
        );
        assert_eq!(careful(None, None), (Grant::Standby, None, None));

        let fenced = |token| {
            let reply = TriedFenced {
                pid: 7,
                session: "here".into(),
                idle_session_timeout: None,
                token,
            }
            .read();
            (reply.grant, reply.token)
        };
        assert_eq!(
            fenced(Some(9)),
            (Grant::Granted, Some(("here".to_owned(), 9)))
        );
        assert_eq!(fenced(Some(0)), (Grant::Busy, None));
        assert_eq!(fenced(None), (Grant::Standby, None));
    }
}
