//! Whether a lock is held, as `pg_locks` shows it.

#[cfg(feature = "r2d2")]
use diesel::data_types::PgTimestamp;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
#[cfg(feature = "r2d2")]
use diesel::sql_types::Nullable;
#[cfg(feature = "r2d2")]
use diesel::sql_types::Timestamptz;
use diesel::sql_types::{Bool, Integer, Oid, Text};

use crate::advisory::mode::LockMode;
use crate::key::LockId;

/// Answers whether this session holds the lock in this mode.
#[derive(Debug)]
pub(crate) struct IsHeld<'a> {
    pub(crate) locator: &'a Locator,
    pub(crate) mode: LockMode,
    /// Whether to use a prepared statement, which somebody may have deallocated.
    pub(crate) prepared: bool,
}

/// The advisory locks that this session holds in this database, to be narrowed to one key and mode.
pub(crate) const HELD_BY_THIS_SESSION: &str = "SELECT FROM pg_catalog.pg_locks \
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

/// Returns when this session began, by which its pid is told from a later session's, and whether it holds the lock in
/// this mode.
#[cfg(feature = "r2d2")]
#[derive(Debug)]
pub(crate) struct WatchedFrom<'a> {
    pub(crate) locator: &'a Locator,
    pub(crate) mode: LockMode,
}

#[cfg(feature = "r2d2")]
prepared_query!(WatchedFrom -> (Integer, Nullable<Timestamptz>, Bool));

#[cfg(feature = "r2d2")]
impl QueryFragment<Pg> for WatchedFrom<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT pg_catalog.pg_backend_pid(), (SELECT backend_start \
             FROM pg_catalog.pg_stat_activity \
             WHERE pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()), ",
        );
        push_is_held(&mut out, self.locator, self.mode)
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

pub(super) fn push_is_held<'b>(
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

#[cfg(test)]
mod tests {
    use super::super::texts::*;
    use super::*;

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
