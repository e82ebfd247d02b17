//! Releasing a lock.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Bool, Integer, Nullable, Text};

use super::push_key;
use crate::advisory::mode::LockMode;
use crate::key::LockId;

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

#[cfg(test)]
mod tests {
    use super::super::texts::*;
    use super::*;

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
}
