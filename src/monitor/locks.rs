//! Advisory locks in queries: the view of them, the condition that a row has a key, and the names of known keys.

// Diesel's macros write aliases and modules without documentation.
#![allow(missing_docs)]

use std::collections::HashMap;

use diesel::deserialize;
use diesel::dsl::auto_type;
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Integer, Nullable};

use super::view::view;
use crate::error::Result;
use crate::key::{LockId, LockKey};

/// The advisory locks of the current database, each with its session.
///
/// The join is an outer one, because a lock that a prepared transaction holds has no session.
pub(super) const LOCKS: &str = "\
    SELECT CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 1 \
    THEN (l.classid::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) l.objid::bigint END AS key, \
    CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.classid::integer END AS key1, \
    CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.objid::integer END AS key2, \
    l.mode OPERATOR(pg_catalog.=) 'ShareLock' AS shared, l.granted, w.waiting_since, \
    pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) w.waiting_since AS waited, l.pid, \
    a.application_name, pg_catalog.host(a.client_addr) AS client_addr, a.client_hostname, \
    a.usename::pg_catalog.text AS usename, a.state, \
    CASE WHEN a.query OPERATOR(pg_catalog.<>) '<insufficient privilege>' THEN a.query END AS query, \
    a.backend_start, a.xact_start \
    FROM pg_catalog.pg_locks AS l \
    CROSS JOIN LATERAL (SELECT (pg_catalog.to_jsonb(l.*) OPERATOR(pg_catalog.->>) 'waitstart')\
    ::pg_catalog.timestamptz AS waiting_since) AS w \
    LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid \
    WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.database OPERATOR(pg_catalog.=) \
    (SELECT d.oid FROM pg_catalog.pg_database AS d \
    WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())";

diesel::table! {
    /// The advisory locks of the current database, held or waited for, each with its session.
    advisory_lock (pid) {
        /// The `bigint` that is locked; `NULL` for a pair.
        key -> Nullable<BigInt>,
        /// The first number of a pair; `NULL` for a `bigint`.
        key1 -> Nullable<Integer>,
        /// The second number of a pair; `NULL` for a `bigint`.
        key2 -> Nullable<Integer>,
        /// Whether the lock is shared.
        shared -> Bool,
        /// Whether the session holds the lock. Otherwise it waits for it.
        granted -> Bool,
        /// When the session started to wait; `NULL` before PostgreSQL 14, and for a lock that is held.
        waiting_since -> Nullable<Timestamptz>,
        /// How long the session has waited, by the server's clock; `NULL` where `waiting_since` is.
        waited -> Nullable<Interval>,
        /// The process id of the server session; `NULL` where a prepared transaction holds the lock.
        pid -> Nullable<Integer>,
        /// The `application_name` of the session.
        application_name -> Nullable<Text>,
        /// The client's address; `NULL` over a Unix socket, and where it is hidden.
        client_addr -> Nullable<Text>,
        /// The client's host name; `NULL` unless the server looks names up (`log_hostname`).
        client_hostname -> Nullable<Text>,
        /// The role that the session logged in as.
        usename -> Nullable<Text>,
        /// `active`, `idle`, `idle in transaction` and the like; `NULL` where it is hidden.
        state -> Nullable<Text>,
        /// The statement that runs, or ran last; `NULL` where it is hidden.
        query -> Nullable<Text>,
        /// When the session began; `NULL` where it is hidden.
        backend_start -> Nullable<Timestamptz>,
        /// When the session's open transaction began; `NULL` where there is none or it is hidden.
        xact_start -> Nullable<Timestamptz>,
    }
}

view! {
    /// The source of [`holders`](super::holders()) and [`waiters`](super::waiters()).
    AdvisoryLocks of advisory_lock [
        key, key1, key2, shared, granted, waiting_since, waited, pid, application_name, client_addr,
        client_hostname, usename, state, query, backend_start, xact_start,
    ] = LOCKS;
}

/// Returns the condition that a row of [`holders()`](super::holders()) or [`waiters()`](super::waiters()) is about this lock.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName).
pub fn of_key(key: &LockKey) -> Result<of_id> {
    key.id().map(of_id)
}

#[auto_type]
pub(super) fn of_id(id: LockId) -> _ {
    let (key, key1, key2): (Option<i64>, Option<i32>, Option<i32>) = id.numbers();
    advisory_lock::key
        .is_not_distinct_from(key)
        .and(advisory_lock::key1.is_not_distinct_from(key1))
        .and(advisory_lock::key2.is_not_distinct_from(key2))
}

/// The columns `key`, `key1` and `key2`.
type Numbers = (Option<i64>, Option<i32>, Option<i32>);

impl LockId {
    /// Returns the number of a `bigint`, and the two of a pair.
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
            _ => Err("neither the number of an advisory lock nor a pair of numbers".into()),
        }
    }
}

impl Selectable<Pg> for LockId {
    type SelectExpression = (advisory_lock::key, advisory_lock::key1, advisory_lock::key2);

    fn construct_selection() -> Self::SelectExpression {
        (advisory_lock::key, advisory_lock::key1, advisory_lock::key2)
    }
}

/// The names of the keys that an application knows, to show names instead of numbers.
///
/// PostgreSQL stores only the number of a lock, and a name cannot be computed from it.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{AdvisoryLock, LockKey, monitor};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// let names = monitor::Names::new([NIGHTLY.key(), &LockKey::parts(["tenant", "7"])])?;
///
/// # let database = workbench::Database::new();
/// # let (pool, conn) = (database.pool(2), &mut database.connect());
/// # let _guard = NIGHTLY.acquire(&pool)?;
/// for holder in monitor::holders().load(conn)? {
///     match names.of(holder.key) {
///         Some(name) => println!("{name}: {:?}", holder.session.application_name),
///         None => println!("{}: {:?}", holder.key, holder.session.application_name),
///     }
/// #   assert_eq!(names.of(holder.key), Some("nightly report"));
/// }
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Names(HashMap<LockId, String>);

impl Names {
    /// Collects the names of the keys. A key that is only a number has no name. If two names have the same number, the last
    /// one is kept.
    ///
    /// # Errors
    ///
    /// [`Input::EmptyName`](crate::error::Input::EmptyName).
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a LockKey>) -> Result<Self> {
        let mut names = HashMap::new();
        for key in keys {
            let id = key.id()?;
            if let Some(name) = key.name() {
                names.insert(id, name.to_owned());
            }
        }
        Ok(Self(names))
    }

    /// Returns the name of a key, if it is known.
    pub fn of(&self, id: LockId) -> Option<&str> {
        self.0.get(&id).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_those_of_this_database_with_names_fully_qualified() {
        let query = AdvisoryLocks.select(advisory_lock::key);
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT \"advisory_lock\".\"key\" FROM (\
             SELECT CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 1 \
             THEN (l.classid::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) l.objid::bigint END AS key, \
             CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.classid::integer END AS key1, \
             CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.objid::integer END AS key2, \
             l.mode OPERATOR(pg_catalog.=) 'ShareLock' AS shared, l.granted, w.waiting_since, \
             pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) w.waiting_since AS waited, l.pid, \
             a.application_name, pg_catalog.host(a.client_addr) AS client_addr, a.client_hostname, \
             a.usename::pg_catalog.text AS usename, a.state, \
             CASE WHEN a.query OPERATOR(pg_catalog.<>) '<insufficient privilege>' THEN a.query END AS query, \
             a.backend_start, a.xact_start \
             FROM pg_catalog.pg_locks AS l \
             CROSS JOIN LATERAL (SELECT (pg_catalog.to_jsonb(l.*) OPERATOR(pg_catalog.->>) 'waitstart')\
             ::pg_catalog.timestamptz AS waiting_since) AS w \
             LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid \
             WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.database OPERATOR(pg_catalog.=) \
             (SELECT d.oid FROM pg_catalog.pg_database AS d \
             WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())\
             ) AS \"advisory_lock\" -- binds: []"
        );
    }

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

    #[test]
    fn known_keys_have_their_names_and_others_none() {
        let gem = LockKey::with_advisory_lock("nightly");
        let keys = [LockKey::named("a"), gem.clone(), LockKey::bigint(7)];
        let names = Names::new(&keys).unwrap();
        assert_eq!(names.of(keys[0].id().unwrap()), Some("a"));
        assert_eq!(names.of(gem.id().unwrap()), Some("nightly"));
        assert_eq!(names.of(LockId::BigInt(7)), None);
        assert!(Names::new([&LockKey::named("")]).is_err());
        assert_eq!(Names::default().of(LockId::Pair(0, 1)), None);
    }
}
