//! The statements behind the locks, one round trip each, for any connection to PostgreSQL.
//!
//! Everything is qualified with `pg_catalog`, so that no `search_path` changes what is called. A
//! lock's name never becomes part of a statement; its numbers are bound.

#[macro_use]
pub(super) mod prepared;
mod held;
mod release;
mod take;
mod token;

use diesel::pg::Pg;
use diesel::query_builder::AstPass;
use diesel::result::QueryResult;
use diesel::sql_types::{BigInt, Integer};

pub(super) use self::held::IsHeld;
#[cfg(feature = "r2d2")]
pub(super) use self::held::{HeldBy, Locator, WatchedFrom};
pub(super) use self::prepared::get_numbered_result;
pub(super) use self::release::{Release, ReleaseCarefully};
pub(super) use self::take::{Answer, Look, Looked, TryAcquireXact, Wait, Waited};
pub(super) use self::token::DrawToken;
use crate::key::LockId;

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

/// For the tests of the texts.
#[cfg(test)]
mod texts {
    use diesel::query_builder::QueryFragment;

    use super::*;

    pub(super) const BIGINT: LockId = LockId::BigInt(-5);
    pub(super) const PAIR: LockId = LockId::Pair(1, 2);

    pub(super) fn sql(query: &impl QueryFragment<Pg>) -> String {
        diesel::debug_query::<Pg, _>(query).to_string()
    }
}
