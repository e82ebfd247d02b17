//! The statements behind the locks, one round trip each, for any connection to PostgreSQL.
//!
//! Everything is qualified with `pg_catalog`, so that no `search_path` changes what is called. A
//! lock's name never becomes part of a statement; its numbers are bound.

#[cfg(feature = "r2d2")]
use diesel::data_types::PgTimestamp;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
#[cfg(feature = "r2d2")]
use diesel::sql_types::Timestamptz;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, Oid, Text};

use super::mode::LockMode;
use crate::key::LockId;

/// Makes a struct with a `QueryFragment` a query that is prepared once per connection.
///
/// There is no static query id, so Diesel caches by the text, of which each statement has one per
/// mode and kind of key. See [`Numbered`] for those that have to be fast.
macro_rules! prepared_query {
    ($name:ident -> $row:ty) => {
        impl Query for $name<'_> {
            type SqlType = $row;
        }

        impl QueryId for $name<'_> {
            type QueryId = $name<'static>;
            const HAS_STATIC_QUERY_ID: bool = false;
        }

        impl<Conn> RunQueryDsl<Conn> for $name<'_> {}
    };
}

/// A query with the number of its text, by which Diesel finds the prepared statement. Composing and
/// hashing the text each time would cost a quarter of what a lock costs on the client.
#[derive(Debug)]
pub(crate) struct Numbered<const TEXT: usize, Q>(pub(crate) Q);

impl<const TEXT: usize, Q: Query> Query for Numbered<TEXT, Q> {
    type SqlType = Q::SqlType;
}

impl<const TEXT: usize, Q: QueryId> QueryId for Numbered<TEXT, Q> {
    type QueryId = Numbered<TEXT, Q::QueryId>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<const TEXT: usize, Q, Conn> RunQueryDsl<Conn> for Numbered<TEXT, Q> {}

impl<const TEXT: usize, Q: QueryFragment<Pg>> QueryFragment<Pg> for Numbered<TEXT, Q> {
    fn walk_ast<'b>(&'b self, out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out)
    }
}

/// The number of the text that a statement has for a mode and a kind of key.
pub(crate) fn text_number(mode: LockMode, id: &LockId) -> usize {
    match (mode, id) {
        (LockMode::Exclusive, LockId::BigInt(_)) => 0,
        (LockMode::Exclusive, LockId::Pair(..)) => 1,
        (LockMode::Shared, LockId::BigInt(_)) => 2,
        (LockMode::Shared, LockId::Pair(..)) => 3,
    }
}

/// Loads the one row of a query that has a mode and an id, under the number of its text.
macro_rules! get_numbered_result {
    ($query:expr, $conn:expr) => {{
        use crate::advisory::query::{Numbered, text_number};
        let query = $query;
        match text_number(query.mode, query.id) {
            0 => Numbered::<0, _>(query).get_result($conn),
            1 => Numbered::<1, _>(query).get_result($conn),
            2 => Numbered::<2, _>(query).get_result($conn),
            _ => Numbered::<3, _>(query).get_result($conn),
        }
    }};
}
pub(super) use get_numbered_result;

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

/// As [`TryAcquireCarefully`], and draws a fencing token if the lock is granted: a transaction id, of which
/// PostgreSQL gives every later one a greater number.
#[derive(Debug)]
pub(crate) struct TryAcquireFenced<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
}

/// What [`TryAcquireFenced`] answers.
#[derive(Debug, Queryable)]
pub(crate) struct TryAcquiredFenced {
    pub(crate) pid: i32,
    /// As it was before; `None` before PostgreSQL 14.
    pub(crate) idle_session_timeout: Option<String>,
    /// `None` on a hot standby, where nothing was tried; 0 if the lock was not granted.
    pub(crate) token: Option<i64>,
}

prepared_query!(TryAcquireFenced -> (Integer, Nullable<Text>, Nullable<BigInt>));

/// Drawn once the lock is held: whoever holds it next draws later.
///
/// A transaction that has only its id is not waited for as it commits, and after a crash of the server
/// the id would be given again. So it writes an empty message to the write-ahead log.
const TOKEN: &str = "CASE WHEN pg_catalog.pg_logical_emit_message(true, 'diesel_interlock', ''::pg_catalog.text) IS NOT NULL \
    THEN pg_catalog.pg_current_xact_id()::pg_catalog.text::bigint END";

impl QueryFragment<Pg> for TryAcquireFenced<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT pg_catalog.pg_backend_pid(), \
             pg_catalog.current_setting('idle_session_timeout', true), \
             CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL \
             WHEN NOT pg_catalog.",
        );
        out.push_sql(self.mode.try_lock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(
            " THEN 0 \
             WHEN pg_catalog.current_setting('idle_session_timeout', true) OPERATOR(pg_catalog.<>) '0' \
             THEN CASE WHEN pg_catalog.set_config('idle_session_timeout', '0', false) IS NOT NULL THEN ",
        );
        out.push_sql(TOKEN);
        out.push_sql(" END ELSE ");
        out.push_sql(TOKEN);
        out.push_sql(" END");
        Ok(())
    }
}

/// Draws a fencing token for a lock that this session holds in this mode; null if it does not.
#[derive(Debug)]
pub(crate) struct DrawToken<'a> {
    pub(crate) locator: &'a Locator,
    pub(crate) mode: LockMode,
}

prepared_query!(DrawToken -> (Integer, Nullable<BigInt>));

impl QueryFragment<Pg> for DrawToken<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), CASE WHEN ");
        push_is_held(&mut out, self.locator, self.mode)?;
        out.push_sql(" THEN ");
        out.push_sql(TOKEN);
        out.push_sql(" END");
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

/// Releases a session lock, if this is still the session that took it.
///
/// On another session nothing is unlocked: it may hold the same lock for somebody else.
///
/// Answers whether the lock was held, and null on another session.
#[derive(Debug)]
pub(crate) struct Release<'a> {
    pub(crate) id: &'a LockId,
    pub(crate) mode: LockMode,
    pub(crate) taken_by: i32,
}

prepared_query!(Release -> Nullable<Bool>);

impl QueryFragment<Pg> for Release<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) ");
        out.push_bind_param::<Integer, _>(&self.taken_by)?;
        out.push_sql(" THEN pg_catalog.");
        out.push_sql(self.mode.unlock_function());
        push_key(&mut out, self.id)?;
        out.push_sql(" END");
        Ok(())
    }
}

/// As [`Release`], for what is rarely needed: to give the session back its `idle_session_timeout`,
/// where that was lifted, and not to use a prepared statement, which somebody may have deallocated.
#[derive(Debug)]
pub(crate) struct ReleaseCarefully<'a> {
    pub(crate) release: Release<'a>,
    pub(crate) idle_session_timeout: Option<&'a str>,
    pub(crate) prepared: bool,
}

prepared_query!(ReleaseCarefully -> (Nullable<Bool>, Nullable<Text>));

impl QueryFragment<Pg> for ReleaseCarefully<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        if !self.prepared {
            out.unsafe_to_cache_prepared();
        }
        self.release.walk_ast(out.reborrow())?;
        if let Some(timeout) = &self.idle_session_timeout {
            out.push_sql(", CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) ");
            out.push_bind_param::<Integer, _>(&self.release.taken_by)?;
            out.push_sql(" THEN pg_catalog.set_config('idle_session_timeout', ");
            out.push_bind_param::<Text, _>(timeout)?;
            out.push_sql(", false) END");
        } else {
            out.push_sql(", NULL");
        }
        Ok(())
    }
}

/// Answers whether this session holds the lock in this mode.
#[derive(Debug)]
pub(crate) struct IsHeld<'a> {
    pub(crate) locator: &'a Locator,
    pub(crate) mode: LockMode,
    /// Whether to use a prepared statement, which somebody may have deallocated.
    pub(crate) prepared: bool,
}

/// The advisory locks that this session holds in this database, to be narrowed to one key and mode.
pub(super) const HELD_BY_THIS_SESSION: &str = "SELECT FROM pg_catalog.pg_locks \
    WHERE locktype OPERATOR(pg_catalog.=) 'advisory' AND granted \
    AND pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid() \
    AND database OPERATOR(pg_catalog.=) (SELECT oid FROM pg_catalog.pg_database \
    WHERE datname OPERATOR(pg_catalog.=) pg_catalog.current_database())";

prepared_query!(IsHeld -> (Integer, Bool));

impl QueryFragment<Pg> for IsHeld<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        if !self.prepared {
            out.unsafe_to_cache_prepared();
        }
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), ");
        push_is_held(&mut out, self.locator, self.mode)
    }
}

/// Answers when this session began, by which its pid is told from a later session's.
#[cfg(feature = "r2d2")]
#[derive(Debug)]
pub(crate) struct SessionStart;

#[cfg(feature = "r2d2")]
impl Query for SessionStart {
    type SqlType = (Integer, Nullable<Timestamptz>);
}

#[cfg(feature = "r2d2")]
impl QueryId for SessionStart {
    type QueryId = Self;
    const HAS_STATIC_QUERY_ID: bool = true;
}

#[cfg(feature = "r2d2")]
impl<Conn> RunQueryDsl<Conn> for SessionStart {}

#[cfg(feature = "r2d2")]
impl QueryFragment<Pg> for SessionStart {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT pg_catalog.pg_backend_pid(), (SELECT backend_start \
             FROM pg_catalog.pg_stat_activity \
             WHERE pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid())",
        );
        Ok(())
    }
}

/// Answers, on any session, whether that session holds the lock in this mode.
#[cfg(feature = "r2d2")]
#[derive(Debug)]
pub(crate) struct HeldBy<'a> {
    pub(crate) locator: &'a Locator,
    pub(crate) mode: LockMode,
    pub(crate) pid: i32,
    /// Of that session, if it is known.
    pub(crate) session_start: Option<PgTimestamp>,
}

#[cfg(feature = "r2d2")]
prepared_query!(HeldBy -> Bool);

#[cfg(feature = "r2d2")]
impl QueryFragment<Pg> for HeldBy<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
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
        push_key_of(&mut out, self.locator, self.mode)?;
        out.push_sql(")");
        Ok(())
    }
}

fn push_is_held<'b>(
    out: &mut AstPass<'_, 'b, Pg>,
    locator: &'b Locator,
    mode: LockMode,
) -> QueryResult<()> {
    out.push_sql("EXISTS (");
    out.push_sql(HELD_BY_THIS_SESSION);
    push_key_of(out, locator, mode)?;
    out.push_sql(")");
    Ok(())
}

/// Narrows `pg_locks` to a key and a mode.
fn push_key_of<'b>(
    out: &mut AstPass<'_, 'b, Pg>,
    locator: &'b Locator,
    mode: LockMode,
) -> QueryResult<()> {
    out.push_sql(" AND classid OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Oid, _>(&locator.classid)?;
    out.push_sql(" AND objid OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Oid, _>(&locator.objid)?;
    out.push_sql(" AND objsubid OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Integer, _>(&locator.objsubid)?;
    out.push_sql(" AND mode OPERATOR(pg_catalog.=) ");
    out.push_bind_param::<Text, _>(mode.pg_locks_mode())
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

/// Where `pg_locks` shows a key: a `bigint` in two halves and the number 1, a pair as it is and
/// the number 2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Locator {
    pub(crate) classid: u32,
    pub(crate) objid: u32,
    pub(crate) objsubid: i32,
}

impl From<LockId> for Locator {
    fn from(id: LockId) -> Self {
        match id {
            LockId::BigInt(number) => Self {
                classid: (number >> 32) as u32,
                objid: number as u32,
                objsubid: 1,
            },
            LockId::Pair(first, second) => Self {
                classid: first as u32,
                objid: second as u32,
                objsubid: 2,
            },
        }
    }
}

fn push_key<'b>(out: &mut AstPass<'_, 'b, Pg>, id: &'b LockId) -> QueryResult<()> {
    out.push_sql("(");
    match id {
        LockId::BigInt(number) => out.push_bind_param::<BigInt, _>(number)?,
        LockId::Pair(first, second) => {
            out.push_bind_param::<Integer, _>(first)?;
            out.push_sql(", ");
            out.push_bind_param::<Integer, _>(second)?;
        }
    }
    out.push_sql(")");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BIGINT: LockId = LockId::BigInt(-5);
    const PAIR: LockId = LockId::Pair(1, 2);

    fn sql(query: &impl QueryFragment<Pg>) -> String {
        diesel::debug_query::<Pg, _>(query).to_string()
    }

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
    fn a_release_unlocks_on_the_session_that_took_the_lock_only() {
        let query = Release {
            id: &BIGINT,
            mode: LockMode::Exclusive,
            taken_by: 42,
        };
        assert_eq!(
            sql(&query),
            "SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $1 \
             THEN pg_catalog.pg_advisory_unlock($2) END -- binds: [42, -5]"
        );
    }

    #[test]
    fn a_careful_release_gives_back_what_was_lifted() {
        let query = ReleaseCarefully {
            release: Release {
                id: &PAIR,
                mode: LockMode::Shared,
                taken_by: 42,
            },
            idle_session_timeout: Some("1min"),
            prepared: true,
        };
        assert_eq!(
            sql(&query),
            "SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $1 \
             THEN pg_catalog.pg_advisory_unlock_shared($2, $3) END, \
             CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $4 \
             THEN pg_catalog.set_config('idle_session_timeout', $5, false) END \
             -- binds: [42, 1, 2, 42, \"1min\"]"
        );
    }

    /// Two statements under one number would be one, for Diesel.
    #[test]
    fn each_text_has_a_number_of_its_own() {
        let mut texts = std::collections::BTreeMap::new();
        for mode in [LockMode::Exclusive, LockMode::Shared] {
            for id in [&BIGINT, &LockId::BigInt(7), &PAIR, &LockId::Pair(-3, 4)] {
                let text = diesel::debug_query::<Pg, _>(&TryAcquire { id, mode }).to_string();
                let text = text.split(" -- ").next().map(str::to_owned);
                let before = texts.insert(text_number(mode, id), text.clone());
                assert!(before.is_none() || before == Some(text));
            }
        }
        let distinct: std::collections::BTreeSet<_> = texts.values().collect();
        assert_eq!((texts.len(), distinct.len()), (4, 4));
    }

    #[test]
    fn is_held_looks_for_the_lock_as_pg_locks_shows_it() {
        let locator = BIGINT.into();
        let query = IsHeld {
            locator: &locator,
            mode: LockMode::Shared,
            prepared: true,
        };
        assert_eq!(
            sql(&query),
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

    #[test]
    fn a_key_is_located_by_its_halves() {
        let locate = |id: LockId| {
            let at = Locator::from(id);
            (at.classid, at.objid, at.objsubid)
        };
        assert_eq!(locate(LockId::BigInt((7 << 32) | 9)), (7, 9, 1));
        assert_eq!(locate(LockId::BigInt(i64::MIN)), (1 << 31, 0, 1));
        assert_eq!(locate(LockId::Pair(-1, 3)), (u32::MAX, 3, 2));
    }
}
