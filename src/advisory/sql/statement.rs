//! How the statements of a lock are declared, and how Diesel finds one that it has prepared.

use diesel::pg::Pg;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::sql_types::{BigInt, Integer};
#[cfg(feature = "async")]
use diesel_async::AsyncPgConnection;

use crate::advisory::lock::{Lock, LockMode};
use crate::key::LockId;
#[cfg(feature = "postgres")]
use crate::session::BlockingStatement;
#[cfg(feature = "async")]
use crate::session::{AsyncProbe, AsyncStatement, ProbeColumns, Probed, Reply};

/// Declares a statement that is prepared once per connection: its fields, the types of its row, and its text.
///
/// The statement has no static query id, because its text depends on the lock. So Diesel caches it by its text. See
/// [`Numbered`] for the statements that have to be fast.
macro_rules! statement {
    (
        $(#[$doc:meta])*
        pub(super) struct $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)?
        } -> $row:ty,
        |$self:ident, $out:ident| $text:block
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub(in crate::advisory) struct $name {
            $($(#[$field_doc])* pub(in crate::advisory) $field: $type,)*
        }

        impl Query for $name {
            type SqlType = $row;
        }

        impl QueryId for $name {
            type QueryId = Self;
            const HAS_STATIC_QUERY_ID: bool = false;
        }

        impl<Conn> RunQueryDsl<Conn> for $name {}

        #[cfg(feature = "async")]
        impl crate::session::Probed for $name {}

        impl QueryFragment<Pg> for $name {
            fn walk_ast<'b>(&'b $self, mut $out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
                $text
                Ok(())
            }
        }
    };
}

/// Pushes the call of a function with the numbers of a lock.
pub(super) fn push_call<'b>(
    out: &mut AstPass<'_, 'b, Pg>,
    function: &str,
    id: &'b LockId,
) -> QueryResult<()> {
    out.push_sql("pg_catalog.");
    out.push_sql(function);
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

/// A statement that has one text for each mode and kind of key, and no other.
pub(in crate::advisory) trait NumberedText: Clone {
    fn lock(&self) -> Lock;
}

macro_rules! numbered_texts {
    ($($statement:ty),*) => {
        $(impl NumberedText for $statement {
            fn lock(&self) -> Lock {
                self.lock
            }
        })*
    };
}

/// Calls a method of the statement under the number of its text.
macro_rules! numbered {
    ($statement:expr, |$text:ident| $call:expr) => {{
        let statement = $statement;
        match text_number(statement.lock()) {
            0 => {
                let $text = Text::<0, Q>(statement);
                $call
            }
            1 => {
                let $text = Text::<1, Q>(statement);
                $call
            }
            2 => {
                let $text = Text::<2, Q>(statement);
                $call
            }
            _ => {
                let $text = Text::<3, Q>(statement);
                $call
            }
        }
    }};
}

/// A statement that Diesel finds by the number of its text. To compose and hash the text each time would cost a quarter of
/// what a lock costs on the client.
#[derive(Debug, Clone)]
pub(in crate::advisory) struct Numbered<Q>(pub(in crate::advisory) Q);

#[cfg(feature = "postgres")]
impl<U, Q> BlockingStatement<U> for Numbered<Q>
where
    Q: NumberedText,
    Text<0, Q>: BlockingStatement<U>,
    Text<1, Q>: BlockingStatement<U>,
    Text<2, Q>: BlockingStatement<U>,
    Text<3, Q>: BlockingStatement<U>,
{
    fn load(&self, conn: &mut PgConnection) -> QueryResult<U> {
        numbered!(self.0.clone(), |text| BlockingStatement::<U>::load(
            &text, conn
        ))
    }

    fn load_all(&self, conn: &mut PgConnection) -> QueryResult<Vec<U>> {
        numbered!(self.0.clone(), |text| BlockingStatement::<U>::load_all(
            &text, conn
        ))
    }
}

#[cfg(feature = "async")]
impl<U, Q> AsyncStatement<U> for Numbered<Q>
where
    Q: NumberedText,
    Text<0, Q>: AsyncStatement<U>,
    Text<1, Q>: AsyncStatement<U>,
    Text<2, Q>: AsyncStatement<U>,
    Text<3, Q>: AsyncStatement<U>,
{
    fn send<'conn>(self, conn: &'conn mut AsyncPgConnection) -> Reply<'conn, QueryResult<Vec<U>>>
    where
        U: Send + 'conn,
    {
        numbered!(self.0, |text| AsyncStatement::<U>::send(text, conn))
    }
}

#[cfg(feature = "async")]
impl<U, Q> AsyncProbe<U> for Numbered<Q>
where
    Q: NumberedText,
    Text<0, Q>: AsyncProbe<U>,
    Text<1, Q>: AsyncProbe<U>,
    Text<2, Q>: AsyncProbe<U>,
    Text<3, Q>: AsyncProbe<U>,
{
    fn send_probed<'conn>(
        self,
        conn: &'conn AsyncPgConnection,
        columns: ProbeColumns,
    ) -> Reply<'conn, QueryResult<(U, Option<bool>)>>
    where
        U: Send + 'conn,
    {
        numbered!(self.0, |text| AsyncProbe::<U>::send_probed(
            text, conn, columns
        ))
    }
}

/// The number of the text that a statement has for a lock.
fn text_number(lock: Lock) -> usize {
    match (lock.mode, lock.id) {
        (LockMode::Exclusive, LockId::BigInt(_)) => 0,
        (LockMode::Exclusive, LockId::Pair(..)) => 1,
        (LockMode::Shared, LockId::BigInt(_)) => 2,
        (LockMode::Shared, LockId::Pair(..)) => 3,
    }
}

/// A statement with the number of its text as a part of its type.
#[derive(Debug, Clone)]
pub(in crate::advisory) struct Text<const NUMBER: usize, Q>(Q);

impl<const NUMBER: usize, Q: Query> Query for Text<NUMBER, Q> {
    type SqlType = Q::SqlType;
}

impl<const NUMBER: usize, Q: QueryId> QueryId for Text<NUMBER, Q> {
    type QueryId = Text<NUMBER, Q::QueryId>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<const NUMBER: usize, Q, Conn> RunQueryDsl<Conn> for Text<NUMBER, Q> {}

#[cfg(feature = "async")]
impl<const NUMBER: usize, Q: QueryFragment<Pg>> Probed for Text<NUMBER, Q> {}

impl<const NUMBER: usize, Q: QueryFragment<Pg>> QueryFragment<Pg> for Text<NUMBER, Q> {
    fn walk_ast<'b>(&'b self, out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        self.0.walk_ast(out)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::super::Try;
    use super::*;

    /// Diesel takes two statements with one number for the same.
    #[test]
    fn each_text_has_a_number_of_its_own() {
        let mut texts = BTreeMap::new();
        for mode in [LockMode::Exclusive, LockMode::Shared] {
            for id in [
                LockId::BigInt(-5),
                LockId::BigInt(7),
                LockId::Pair(1, 2),
                LockId::Pair(-3, 4),
            ] {
                let lock = Lock { id, mode };
                let text = diesel::debug_query::<Pg, _>(&Try { lock }).to_string();
                let text = text.split(" -- ").next().map(str::to_owned);
                let before = texts.insert(text_number(lock), text.clone());
                assert!(before.is_none() || before == Some(text));
            }
        }
        let distinct: BTreeSet<_> = texts.values().collect();
        assert_eq!((texts.len(), distinct.len()), (4, 4));
    }
}
