//! Joins with the tables of an application.

use super::tables::{advisory_lock, blocking};
use super::{AdvisoryLocks, Blocking};
use crate::schema::resource_control::{
    fence, rate_limit, rate_limit_override, service_request, throttled_key, throttled_resource,
};

/// Allows the tables of an application in queries with those of this crate:
/// [`schema::resource_control`](crate::schema::resource_control) and the sources of [`monitor`](crate::monitor).
///
/// Diesel's `allow_tables_to_appear_in_same_query!` does not compile for tables of two crates. This macro writes the same
/// implementations for each given table. Name each table once, with or without its path. Then `.inner_join(table.on(…))`
/// and the like, and Diesel's `joinable!`, work in both directions.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor;
/// use diesel_interlock::schema::resource_control::throttled_key;
///
/// mod schema {
///     diesel::table! { tenants (slug) { slug -> Text, plan -> Text } }
///     diesel::table! { billing.invoices (id) { id -> BigInt, tenant -> Text } }
///     diesel::allow_tables_to_appear_in_same_query!(tenants, invoices);
/// }
/// use schema::tenants;
///
/// diesel_interlock::allow_joins_with!(tenants, schema::invoices);
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// # diesel::sql_query("CREATE TABLE tenants (slug text PRIMARY KEY, plan text)").execute(conn)?;
/// // The plans of the tenants that were throttled last.
/// let plans: Vec<(String, String)> = monitor::last_key_lockers()
///     .inner_join(tenants::table.on(tenants::slug.eq(throttled_key::key)))
///     .select((tenants::slug, tenants::plan))
///     .limit(10)
///     .load(conn)?;
/// # assert!(plans.is_empty());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[macro_export]
macro_rules! allow_joins_with {
    ($($($segment:ident)::+),+ $(,)?) => {
        $( $crate::allow_joins_with!(@table $($segment)::+); )+
    };
    (@table $($segment:ident)::+) => {
        $crate::allow_joins_with!(@pairs $($segment)::+::table =>
            $crate::schema::resource_control::fence::table,
            $crate::schema::resource_control::rate_limit::table,
            $crate::schema::resource_control::rate_limit_override::table,
            $crate::schema::resource_control::service_request::table,
            $crate::schema::resource_control::throttled_key::table,
            $crate::schema::resource_control::throttled_resource::table,
            $crate::monitor::AdvisoryLocks,
            $crate::monitor::tables::advisory_lock::table,
            $crate::monitor::Blocking,
            $crate::monitor::tables::blocking::table,
        );
    };
    (@pairs $theirs:ty => $($ours:ty,)+) => {
        $(
            impl ::diesel::query_source::TableNotEqual<$ours> for $theirs {}
            impl ::diesel::query_source::TableNotEqual<$theirs> for $ours {}
        )+
    };
}

// The schema allows its tables in one query with each other. These allow the sources of this module with them.
allow_joins_with!(@pairs AdvisoryLocks =>
    fence::table, rate_limit::table, rate_limit_override::table, service_request::table, throttled_key::table,
    throttled_resource::table,
    Blocking, blocking::table,
);
allow_joins_with!(@pairs advisory_lock::table =>
    fence::table, rate_limit::table, rate_limit_override::table, service_request::table, throttled_key::table,
    throttled_resource::table,
    Blocking, blocking::table,
);
allow_joins_with!(@pairs Blocking =>
    fence::table, rate_limit::table, rate_limit_override::table, service_request::table, throttled_key::table,
    throttled_resource::table,
);
allow_joins_with!(@pairs blocking::table =>
    fence::table, rate_limit::table, rate_limit_override::table, service_request::table, throttled_key::table,
    throttled_resource::table,
);
