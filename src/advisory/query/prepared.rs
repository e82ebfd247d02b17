//! Prepared statements: how Diesel finds one that it has prepared.

use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};

use crate::advisory::mode::LockMode;
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
        use crate::advisory::query::prepared::{Numbered, text_number};
        let query = $query;
        match text_number(query.mode, query.id) {
            0 => Numbered::<0, _>(query).get_result($conn),
            1 => Numbered::<1, _>(query).get_result($conn),
            2 => Numbered::<2, _>(query).get_result($conn),
            _ => Numbered::<3, _>(query).get_result($conn),
        }
    }};
}
pub(crate) use get_numbered_result;

#[cfg(test)]
mod tests {
    use super::super::take::TryAcquire;
    use super::super::texts::*;
    use super::*;

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
}
