//! Throttled resources and keys: who took them last, and when they are free.

// Diesel's macro writes aliases that carry no documentation of their own.
#![allow(missing_docs)]

use std::time::Duration;

use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;

use super::interval::Elapsed;
use crate::functions::{clock_timestamp, elapsed};
use crate::schema::resource_control::{throttled_key, throttled_resource};
use crate::throttle::ResourceLabel;
use crate::time::Timestamp;

diesel::joinable!(throttled_key -> throttled_resource (resource_id));

/// A row of `resource_control.throttled_resource`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = throttled_resource, primary_key(resource_id), check_for_backend(Pg))]
#[non_exhaustive]
pub struct ThrottledResourceRow {
    /// The resource.
    pub resource_id: ResourceLabel,
    /// How much time passes between two grants, at least.
    #[diesel(deserialize_as = Elapsed)]
    pub throttle_interval: Duration,
    /// When it was handed out last: [`NegInfinity`](Timestamp::NegInfinity) for never,
    /// [`Infinity`](Timestamp::Infinity) if it was closed by hand. Its
    /// [`at()`](Timestamp::at) is `None` for both.
    pub last_locked: Timestamp,
    /// Who took it last, in their own words; empty if nobody did.
    pub last_locker_details: String,
}

/// A row of `resource_control.throttled_key`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = throttled_key, primary_key(resource_id, key), check_for_backend(Pg))]
#[non_exhaustive]
pub struct ThrottledKeyRow {
    /// The resource.
    pub resource_id: ResourceLabel,
    /// The key for which it was handed out.
    pub key: String,
    /// When it was handed out last; [`Infinity`](Timestamp::Infinity) if it was closed by hand.
    pub last_locked: Timestamp,
    /// Who took it last, in their own words.
    pub last_locker_details: String,
}

/// From when on a resource is due again, by the server's clock. Loads as [`Timestamp`], which is
/// [`NegInfinity`](Timestamp::NegInfinity) where it was never handed out.
///
/// `last_locked + resource_control.elapsed(throttle_interval)`, wherever `throttled_resource` is in a
/// query.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, ThrottledResourceRow, Timestamp};
/// use diesel_interlock::schema::resource_control::throttled_resource;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let busy: Vec<(ThrottledResourceRow, Timestamp)> = throttled_resource::table
///     .filter(diesel::dsl::not(monitor::available_now()))
///     .order(monitor::next_free_at())
///     .select((ThrottledResourceRow::as_select(), monitor::next_free_at()))
///     .load(conn)?;
/// # assert!(busy.is_empty());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn next_free_at() -> _ {
    throttled_resource::last_locked + elapsed(throttled_resource::throttle_interval)
}

/// The condition that a resource is due, by `clock_timestamp()`: an attempt would be granted, unless
/// another transaction is just taking it.
///
/// For queries with `throttled_resource`.
#[auto_type]
pub fn available_now() -> _ {
    next_free_at().le(clock_timestamp())
}

/// As [`next_free_at()`], of a key: for queries in which `throttled_key` is joined with
/// `throttled_resource`, whose interval it has.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, Timestamp};
/// use diesel_interlock::schema::resource_control::{throttled_key, throttled_resource};
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let tenant: Option<Timestamp> = throttled_key::table
///     .inner_join(throttled_resource::table)
///     .filter(throttled_key::key.eq("7"))
///     .select(monitor::key_next_free_at())
///     .first(conn)
///     .optional()?;
/// # assert_eq!(tenant, None);
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn key_next_free_at() -> _ {
    throttled_key::last_locked + elapsed(throttled_resource::throttle_interval)
}

/// As [`available_now()`], of a key: for queries in which `throttled_key` is joined with
/// `throttled_resource`.
#[auto_type]
pub fn key_available_now() -> _ {
    key_next_free_at().le(clock_timestamp())
}

/// The resources that were handed out, the latest first, each with its last locker. Loads as
/// [`ThrottledResourceRow`].
///
/// What was closed by hand comes first.
#[auto_type]
pub fn last_lockers() -> _ {
    let never: Timestamp = Timestamp::NegInfinity;
    let selection: AsSelect<ThrottledResourceRow, Pg> = ThrottledResourceRow::as_select();
    throttled_resource::table
        .filter(throttled_resource::last_locked.gt(never))
        .order(throttled_resource::last_locked.desc())
        .select(selection)
}

/// The keys for which a resource was handed out, the latest first, each with its last locker. Loads
/// as [`ThrottledKeyRow`].
///
/// There may be a million: filter, or limit.
#[auto_type]
pub fn last_key_lockers() -> _ {
    let never: Timestamp = Timestamp::NegInfinity;
    let selection: AsSelect<ThrottledKeyRow, Pg> = ThrottledKeyRow::as_select();
    throttled_key::table
        .filter(throttled_key::last_locked.gt(never))
        .order(throttled_key::last_locked.desc())
        .select(selection)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_is_due_by_elapsed_time_and_the_servers_clock() {
        let query = throttled_resource::table
            .filter(available_now())
            .select(next_free_at());
        let next = "\"resource_control\".\"throttled_resource\".\"last_locked\" + \
             resource_control.elapsed(\"resource_control\".\"throttled_resource\".\"throttle_interval\")";
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            format!(
                "SELECT ({next}) FROM \"resource_control\".\"throttled_resource\" \
                 WHERE (({next}) <= pg_catalog.clock_timestamp()) -- binds: []"
            )
        );
    }

    #[test]
    fn a_key_has_the_interval_of_its_resource() {
        let query = throttled_key::table
            .inner_join(throttled_resource::table)
            .filter(key_available_now())
            .select(throttled_key::key);
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT \"resource_control\".\"throttled_key\".\"key\" \
             FROM (\"resource_control\".\"throttled_key\" \
             INNER JOIN \"resource_control\".\"throttled_resource\" \
             ON (\"resource_control\".\"throttled_key\".\"resource_id\" = \
             \"resource_control\".\"throttled_resource\".\"resource_id\")) \
             WHERE ((\"resource_control\".\"throttled_key\".\"last_locked\" + \
             resource_control.elapsed(\"resource_control\".\"throttled_resource\".\"throttle_interval\")) \
             <= pg_catalog.clock_timestamp()) -- binds: []"
        );
    }

    #[test]
    fn the_last_lockers_are_those_that_there_were() {
        let sql = diesel::debug_query::<Pg, _>(&last_lockers()).to_string();
        let (_, rest) = sql.split_once(" WHERE ").unwrap();
        let column = "\"resource_control\".\"throttled_resource\".\"last_locked\"";
        assert_eq!(
            rest,
            format!("({column} > $1) ORDER BY {column} DESC -- binds: [NegInfinity]")
        );
    }
}
