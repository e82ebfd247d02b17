//! Fencing tokens, drawn with the lock or afterwards.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Integer, Nullable, Text};

use super::held::{Locator, push_is_held};
use super::push_key;
use crate::advisory::mode::LockMode;
use crate::advisory::token::Token;
use crate::key::LockId;

/// As [`TryAcquireCarefully`](super::TryAcquireCarefully), and draws a fencing token if the lock is granted: a transaction id, of which
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
    pub(crate) session: String,
    /// As it was before; `None` before PostgreSQL 14.
    pub(crate) idle_session_timeout: Option<String>,
    /// `None` on a hot standby, where nothing was tried; 0 if the lock was not granted.
    pub(crate) token: Option<i64>,
}

prepared_query!(TryAcquireFenced -> (Integer, Text, Nullable<Text>, Nullable<BigInt>));

impl TryAcquiredFenced {
    /// The token, if the lock was granted.
    pub(crate) fn token(&self, id: LockId, mode: LockMode) -> Option<Token> {
        let number = self.token.filter(|number| *number != 0)?;
        Some(Token::drawn(self.session.clone(), id, mode, number))
    }
}

/// Which session this is: a name that it is given when it draws its first token. The pid is used again, and
/// `pg_stat_activity` costs more the more sessions there are.
const SESSION: &str = "CASE WHEN COALESCE(pg_catalog.current_setting('diesel_interlock.session', true), '') \
    OPERATOR(pg_catalog.<>) '' THEN pg_catalog.current_setting('diesel_interlock.session') \
    ELSE pg_catalog.set_config('diesel_interlock.session', \
    pg_catalog.gen_random_uuid()::pg_catalog.text, false) END";

/// Drawn once the lock is held: whoever holds it next draws later.
///
/// A transaction that has only its id is not waited for as it commits, and after a crash of the server
/// the id would be given again. So it writes an empty message to the write-ahead log.
const TOKEN: &str = "CASE WHEN pg_catalog.pg_logical_emit_message(true, 'diesel_interlock', ''::pg_catalog.text) IS NOT NULL \
    THEN pg_catalog.pg_current_xact_id()::pg_catalog.text::bigint END";

impl QueryFragment<Pg> for TryAcquireFenced<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), ");
        out.push_sql(SESSION);
        out.push_sql(
            ", pg_catalog.current_setting('idle_session_timeout', true), \
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

prepared_query!(DrawToken -> (Integer, Text, Nullable<BigInt>));

impl QueryFragment<Pg> for DrawToken<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql("SELECT pg_catalog.pg_backend_pid(), ");
        out.push_sql(SESSION);
        out.push_sql(", CASE WHEN ");
        push_is_held(&mut out, self.locator, self.mode)?;
        out.push_sql(" THEN ");
        out.push_sql(TOKEN);
        out.push_sql(" END");
        Ok(())
    }
}
