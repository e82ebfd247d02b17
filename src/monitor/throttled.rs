//! Throttled resources and keys: the last grant of each, and when each is due.

// Diesel's macro writes aliases without documentation.
#![allow(missing_docs)]

use std::time::Duration;

use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;

use crate::functions::{clock_timestamp, elapsed};
use crate::schema::resource_control::{throttled_key, throttled_resource};
use crate::throttle::ResourceLabel;
use crate::time::{Elapsed, Timestamp};

diesel::joinable!(throttled_key -> throttled_resource (resource_id));

/// A row of `resource_control.throttled_resource`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = throttled_resource, primary_key(resource_id), check_for_backend(Pg))]
#[non_exhaustive]
pub struct ThrottledResourceRow {
    /// The resource.
    pub resource_id: ResourceLabel,
    /// The minimum time between two grants.
    #[diesel(deserialize_as = Elapsed)]
    pub throttle_interval: Duration,
    /// When it was granted last: [`NegInfinity`](Timestamp::NegInfinity) for never, [`Infinity`](Timestamp::Infinity) if it
    /// was closed by hand. Its [`at()`](Timestamp::at) is `None` for both.
    pub last_locked: Timestamp,
    /// The details of the last grant; empty if it was never granted.
    pub last_locker_details: String,
}

/// A row of `resource_control.throttled_key`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = throttled_key, primary_key(resource_id, key), check_for_backend(Pg))]
#[non_exhaustive]
pub struct ThrottledKeyRow {
    /// The resource.
    pub resource_id: ResourceLabel,
    /// The key for which it was granted.
    pub key: String,
    /// When it was granted last; [`Infinity`](Timestamp::Infinity) if it was closed by hand.
    pub last_locked: Timestamp,
    /// The details of the last grant.
    pub last_locker_details: String,
}

/// Selects when a resource is due again, by the server's clock. Loads as [`Timestamp`], which is
/// [`NegInfinity`](Timestamp::NegInfinity) if it was never granted.
///
/// The expression is `last_locked + resource_control.elapsed(throttle_interval)`, for queries with `throttled_resource`.
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

/// Returns the condition that a resource is due, by `clock_timestamp()`. An attempt would then be granted, unless another
/// transaction is taking the resource.
///
/// For queries with `throttled_resource`.
#[auto_type]
pub fn available_now() -> _ {
    next_free_at().le(clock_timestamp())
}

/// Selects when a key is due again, as [`next_free_at()`] does for a resource. For queries that join `throttled_key` with
/// `throttled_resource`, which has the interval.
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

/// Returns the condition that a key is due, as [`available_now()`] does for a resource. For queries that join
/// `throttled_key` with `throttled_resource`.
#[auto_type]
pub fn key_available_now() -> _ {
    key_next_free_at().le(clock_timestamp())
}

/// Selects the resources that were granted, the latest grant first. Loads as [`ThrottledResourceRow`].
///
/// Resources that were closed by hand come first.
#[auto_type]
pub fn last_lockers() -> _ {
    let never: Timestamp = Timestamp::NegInfinity;
    let selection: AsSelect<ThrottledResourceRow, Pg> = ThrottledResourceRow::as_select();
    throttled_resource::table
        .filter(throttled_resource::last_locked.gt(never))
        .order(throttled_resource::last_locked.desc())
        .select(selection)
}

/// Selects the keys for which a resource was granted, the latest grant first. Loads as [`ThrottledKeyRow`].
///
/// There may be a million rows, so filter or limit the query.
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
