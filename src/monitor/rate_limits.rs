//! Rate limits: the keys that are not full, what they owe, and the quotas that operators set.

// Diesel's macro writes aliases without documentation.
#![allow(missing_docs)]

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;

use crate::functions::{clock_timestamp, rate_limit_debt, scaled_up};
use crate::schema::resource_control::{rate_limit, rate_limit_override};
use crate::time::{Elapsed, Timestamp};

/// A row of `resource_control.rate_limit`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = rate_limit, primary_key(name, key, generation), check_for_backend(Pg))]
#[non_exhaustive]
pub struct RateLimitRow {
    /// The name of the limit.
    pub name: String,
    /// The key; empty for the limit without a key.
    pub key: String,
    /// The number of the row's generation, from 1.
    pub generation: i64,
    /// When the key was used first, or first after it was reset or pruned.
    pub created_at: DateTime<Utc>,
    /// When units were spent or given back last.
    pub changed_at: Timestamp,
    /// When the key is full again if no more units are spent. [`NegInfinity`](Timestamp::NegInfinity) in a first generation
    /// that a later one replaced.
    pub full_at: Timestamp,
    /// N of the quota under which the row was written.
    pub n: i64,
    /// The period of the quota under which the row was written, in microseconds.
    pub period_us: i64,
}

/// A row of `resource_control.rate_limit_override`: a quota that an operator set.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = rate_limit_override, primary_key(name, scope), check_for_backend(Pg))]
#[non_exhaustive]
pub struct RateLimitOverride {
    /// The name of the limit.
    pub name: String,
    /// The key, or `None` for all keys of the name.
    pub key: Option<String>,
    /// N of the quota.
    pub n: i64,
    /// The period of the quota.
    #[diesel(deserialize_as = Elapsed)]
    pub period: Duration,
    /// The burst of the quota.
    pub burst: i64,
    /// An equals sign and the key, or an asterisk for all keys of the name.
    pub scope: String,
}

/// Selects how many units a key owes now: those that were spent and have not come back, with a part of a unit counted as one.
/// For queries with `rate_limit`.
///
/// The burst less what is owed is what is left. The row does not have the burst, which the program declares.
#[auto_type]
pub fn units_owed() -> _ {
    scaled_up(
        rate_limit_debt(
            rate_limit::changed_at,
            rate_limit::full_at,
            rate_limit::n,
            rate_limit::period_us,
            clock_timestamp(),
            rate_limit::n,
            rate_limit::period_us,
        ),
        rate_limit::n,
        rate_limit::period_us,
    )
}

/// Selects the keys that owe units, those that owe most first. Loads as [`RateLimitRow`].
///
/// There may be a million rows, so filter or limit the query.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, RateLimitRow};
/// use diesel_interlock::schema::resource_control::rate_limit;
/// use diesel_interlock::{Quota, RateLimit};
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// # let api = RateLimit::named("api", Quota::per_hour(100));
/// # assert!(api.key(7).cost(90).check_on(conn)?.is_allowed());
/// # assert!(api.key(8).cost(95).check_on(conn)?.is_allowed());
/// // The customers who are nearest to the limit.
/// let nearest: Vec<(RateLimitRow, i64)> = monitor::spent_keys()
///     .filter(rate_limit::name.eq("api"))
///     .limit(10)
///     .select((RateLimitRow::as_select(), monitor::units_owed()))
///     .load(conn)?;
/// # assert_eq!((&*nearest[0].0.key, nearest[0].1), ("8", 95));
/// # assert_eq!((&*nearest[1].0.key, nearest[1].1), ("7", 90));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn spent_keys() -> _ {
    let selection: AsSelect<RateLimitRow, Pg> = RateLimitRow::as_select();
    rate_limit::table
        .filter(rate_limit::full_at.gt(clock_timestamp()))
        .order(units_owed().desc())
        .select(selection)
}
