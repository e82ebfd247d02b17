//! The statements that release session locks, and that end a session which may still hold one.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{Bool, Integer, Nullable, Text};

use super::statement::{NumberedText, push_call};
use crate::advisory::lock::{Lock, LockMode};
use crate::advisory::rules::Unlocked;

impl LockMode {
    /// A shared lock stays held if it is released with the exclusive function.
    pub(super) const fn unlock_function(self) -> &'static str {
        match self {
            LockMode::Exclusive => "pg_advisory_unlock",
            LockMode::Shared => "pg_advisory_unlock_shared",
        }
    }
}

statement! {
    /// Releases a session lock if this is still the session that took it. A different session releases nothing, because it
    /// may hold the same lock for another guard.
    ///
    /// Returns whether the lock was held, and null on a different session.
    pub(super) struct Release { lock: Lock, taken_by: i32 } -> (Nullable<Bool>,),
    |self, out| {
        out.push_sql("SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) ");
        out.push_bind_param::<Integer, _>(&self.taken_by)?;
        out.push_sql(" THEN ");
        push_call(&mut out, self.lock.mode.unlock_function(), &self.lock.id)?;
        out.push_sql(" END");
    }
}

statement! {
    /// As [`Release`], for two rare needs: it restores the `idle_session_timeout` that was lifted, and it need not be
    /// prepared, because some code may have deallocated the prepared statements.
    pub(super) struct ReleaseCarefully {
        release: Release,
        idle_session_timeout: Option<String>,
        prepared: bool,
    } -> (Nullable<Bool>, Nullable<Text>),
    |self, out| {
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
    }
}

/// The row of [`Release`].
#[derive(Debug, Queryable)]
pub(in crate::advisory) struct Released {
    was_held: Option<bool>,
}

/// The row of [`ReleaseCarefully`].
#[derive(Debug, Queryable)]
pub(in crate::advisory) struct ReleasedCarefully {
    was_held: Option<bool>,
    _restored: Option<String>,
}

impl From<Released> for Unlocked {
    fn from(row: Released) -> Self {
        match row.was_held {
            Some(true) => Self::WasHeld,
            Some(false) => Self::WasNotHeld,
            None => Self::SessionMoved,
        }
    }
}

impl From<ReleasedCarefully> for Unlocked {
    fn from(row: ReleasedCarefully) -> Self {
        let was_held = row.was_held;
        Released { was_held }.into()
    }
}

/// Ends this session.
pub(in crate::advisory) const END_SESSION: &str =
    "SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())";

/// Releases every session lock of this session.
pub(in crate::advisory) const RELEASE_ALL: &str = "SELECT pg_catalog.pg_advisory_unlock_all()";

numbered_texts!(Release);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::LockId;

    fn text(query: &impl QueryFragment<Pg>) -> String {
        diesel::debug_query::<Pg, _>(query).to_string()
    }

    #[test]
    fn a_release_unlocks_on_the_session_that_took_the_lock_only() {
        let query = Release {
            lock: Lock {
                id: LockId::BigInt(-5),
                mode: LockMode::Exclusive,
            },
            taken_by: 42,
        };
        assert_eq!(
            text(&query),
            "SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $1 \
             THEN pg_catalog.pg_advisory_unlock($2) END -- binds: [42, -5]"
        );
    }

    #[test]
    fn a_careful_release_gives_back_what_was_lifted() {
        let query = ReleaseCarefully {
            release: Release {
                lock: Lock {
                    id: LockId::Pair(1, 2),
                    mode: LockMode::Shared,
                },
                taken_by: 42,
            },
            idle_session_timeout: Some("1min".into()),
            prepared: true,
        };
        assert_eq!(
            text(&query),
            "SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $1 \
             THEN pg_catalog.pg_advisory_unlock_shared($2, $3) END, \
             CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) $4 \
             THEN pg_catalog.set_config('idle_session_timeout', $5, false) END \
             -- binds: [42, 1, 2, 42, \"1min\"]"
        );
    }
}
