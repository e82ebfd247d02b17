//! The numbers of a lock, in queries.

// Diesel's macro writes an alias that carries no documentation of its own.
#![allow(missing_docs)]

use diesel::deserialize;
use diesel::dsl::auto_type;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Integer, Nullable};

use super::locks::advisory_lock;
use crate::error::Result;
use crate::key::{LockId, LockKey};

/// The condition that a holder's or a waiter's lock is this one.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName).
pub fn of_key(key: &LockKey) -> Result<of_id> {
    Ok(of_id(key.id()?))
}

#[auto_type]
pub(super) fn of_id(id: LockId) -> _ {
    let (key, key1, key2): (Option<i64>, Option<i32>, Option<i32>) = id.numbers();
    advisory_lock::key
        .is_not_distinct_from(key)
        .and(advisory_lock::key1.is_not_distinct_from(key1))
        .and(advisory_lock::key2.is_not_distinct_from(key2))
}

/// `key`, or `key1` and `key2`.
type Numbers = (Option<i64>, Option<i32>, Option<i32>);

impl LockId {
    /// The number of a `bigint`, and those of a pair.
    pub(super) const fn numbers(self) -> Numbers {
        match self {
            LockId::BigInt(key) => (Some(key), None, None),
            LockId::Pair(key1, key2) => (None, Some(key1), Some(key2)),
        }
    }
}

impl Queryable<(Nullable<BigInt>, Nullable<Integer>, Nullable<Integer>), Pg> for LockId {
    type Row = Numbers;

    fn build(row: Self::Row) -> deserialize::Result<Self> {
        match row {
            (Some(key), None, None) => Ok(LockId::BigInt(key)),
            (None, Some(key1), Some(key2)) => Ok(LockId::Pair(key1, key2)),
            _ => Err("neither the number of an advisory lock nor a pair".into()),
        }
    }
}

impl Selectable<Pg> for LockId {
    type SelectExpression = (advisory_lock::key, advisory_lock::key1, advisory_lock::key2);

    fn construct_selection() -> Self::SelectExpression {
        (advisory_lock::key, advisory_lock::key1, advisory_lock::key2)
    }
}

#[cfg(test)]
mod tests {
    use super::super::locks::AdvisoryLocks;
    use super::*;

    #[test]
    fn a_key_is_compared_in_both_spaces_at_once() {
        let of = |key: LockKey| {
            let query = AdvisoryLocks
                .filter(of_key(&key).unwrap())
                .select(advisory_lock::pid);
            let sql = diesel::debug_query::<Pg, _>(&query).to_string();
            sql.rsplit_once(" WHERE ").unwrap().1.to_owned()
        };
        let condition = "((\"advisory_lock\".\"key\" IS NOT DISTINCT FROM $1) \
             AND (\"advisory_lock\".\"key1\" IS NOT DISTINCT FROM $2)) \
             AND (\"advisory_lock\".\"key2\" IS NOT DISTINCT FROM $3)";
        assert_eq!(
            of(LockKey::bigint(-5)),
            format!("({condition}) -- binds: [Some(-5), None, None]")
        );
        assert_eq!(
            of(LockKey::pair(1, -2)),
            format!("({condition}) -- binds: [None, Some(1), Some(-2)]")
        );
    }

    #[test]
    fn a_row_without_a_number_is_an_error_and_no_guess() {
        assert_eq!(
            LockId::build((Some(-1), None, None)).unwrap(),
            LockId::BigInt(-1)
        );
        assert_eq!(
            LockId::build((None, Some(1), Some(2))).unwrap(),
            LockId::Pair(1, 2)
        );
        assert!(LockId::build((None, Some(1), None)).is_err());
        assert!(LockId::build((None, None, None)).is_err());
    }
}
