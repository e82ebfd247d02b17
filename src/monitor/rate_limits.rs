//! Rate limits: the keys that are nearest to their limit, what keys owe, and the quotas that operators set.

// Diesel's macro writes aliases without documentation.
#![allow(missing_docs)]

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Double};

use crate::error::Result;
use crate::functions::{clock_timestamp, rate_limit_debt, scaled_up};
use crate::installed::{self, Needs};
use crate::rate_limit::{Quota, RateLimit, quota_of};
use crate::schema::resource_control::{rate_limit, rate_limit_override};
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
use crate::time::{Elapsed, Timestamp};

diesel::alias! {
    const OF_KEY: Alias<OverrideOfKey> = rate_limit_override as override_of_key;
    const OF_NAME: Alias<OverrideOfName> = rate_limit_override as override_of_name;
}

/// What the expressions below need of PostgreSQL and of the schema.
mod sql {
    use diesel::sql_types::{BigInt, Interval, Nullable, Text, Timestamptz};

    #[diesel::declare_sql_function]
    extern "SQL" {
        #[sql_name = "pg_catalog.date_part"]
        fn date_part(field: Text, at: Timestamptz) -> Double;

        #[sql_name = "greatest"]
        fn later(one: Timestamptz, other: Timestamptz) -> Timestamptz;

        #[sql_name = "pg_catalog.statement_timestamp"]
        fn statement_timestamp() -> Timestamptz;

        #[sql_name = "coalesce"]
        fn in_force(of_key: Nullable<BigInt>, of_name: Nullable<BigInt>, own: BigInt) -> BigInt;

        #[sql_name = "resource_control.microseconds"]
        fn microseconds(span: Nullable<Interval>) -> Nullable<BigInt>;
    }
}

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
    /// When the key was used first, or first after it was reset, pruned, or given another quota. If the clock was set back since,
    /// just after the last change by the old clock.
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

impl RateLimitOverride {
    /// Returns the quota.
    pub fn quota(&self) -> Quota {
        let period_us = i64::try_from(self.period.as_micros()).unwrap_or(i64::MAX);
        quota_of(self.n, period_us, self.burst)
    }
}

/// A key of a rate limit that is not full, under the quota in force.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeyNearLimit {
    /// The key; empty for the limit without a key.
    pub key: String,
    /// How many units are left.
    pub remaining: u32,
    /// How many units were spent and have not come back, with a part of a unit counted as one. More than the burst after
    /// reservations, or if the burst was lowered. If the reservations were made under another quota, the time until the last of
    /// their moments counts as owed.
    pub owed: u64,
    /// How long until the key is full again if no more units are spent.
    pub full_in: Duration,
    /// The quota in force.
    pub quota: Quota,
    /// Where that quota comes from.
    pub quota_source: QuotaSource,
}

/// Where the quota in force of a key comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QuotaSource {
    /// The program.
    Program,
    /// An override for all keys of the name.
    Name,
    /// An override for this key.
    Key,
}

/// Returns the keys of a limit that are nearest to it, those with the fewest units left first, and at most so many. A key
/// that is full is not returned. The key and the cost of `limit` are not used.
///
/// One round trip, which reads all keys of the limit that are not full, their overrides, and locks and writes nothing. It
/// works on a standby, in a read-only transaction, and for a role with only
/// [the grants of a monitoring role](crate::guide::production#schema-and-rights). A million keys take some seconds. The quota of
/// the program is that of `limit`, because PostgreSQL does not store it.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName), [`Input::BadQuota`](crate::error::Input::BadQuota),
/// [`Schema::NotInstalled`](crate::error::Schema::NotInstalled),
/// [`Schema::MissingRights`](crate::error::Schema::MissingRights),
/// [`Error::Database`](crate::Error::Database).
///
/// # Examples
///
/// ```
/// use diesel_interlock::monitor::{self, QuotaSource};
/// use diesel_interlock::{Quota, RateLimit};
///
/// static API: RateLimit = RateLimit::named("api", Quota::per_hour(100));
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// # assert!(API.key(7).cost(90).check_on(conn)?.is_allowed());
/// # assert!(API.key(8).cost(95).check_on(conn)?.is_allowed());
/// for near in monitor::keys_near_limit(conn, &API, 10)? {
///     let overridden = near.quota_source != QuotaSource::Program;
///     println!("{}: {} of {} left, overridden: {overridden}", near.key, near.remaining, near.quota.burst);
/// }
/// # let near = monitor::keys_near_limit(conn, &API, 1)?;
/// # assert_eq!((&*near[0].key, near[0].remaining, near.len()), ("8", 5, 1));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[cfg(feature = "postgres")]
pub fn keys_near_limit(
    conn: &mut PgConnection,
    limit: &RateLimit,
    rows: u32,
) -> Result<Vec<KeyNearLimit>> {
    now(find_keys_near_limit(&mut Blocking::lent(conn), limit, rows))
}

/// The columns of a key: the key, its debt in microseconds, N, the period in microseconds and the burst of the quota in force,
/// and whether there is an override of the key and one of the name.
type NearRow = (String, i64, i64, i64, i64, bool, bool);

const NEAR_NEEDS: &Needs = &[
    ("rate_limit_debt", "EXECUTE"),
    ("microseconds", "EXECUTE"),
    ("rate_limit", "SELECT"),
    ("rate_limit_override", "SELECT"),
];

pub(super) async fn find_keys_near_limit<S: Session>(
    session: &mut S,
    limit: &RateLimit,
    rows: u32,
) -> Result<Vec<KeyNearLimit>> {
    let name = limit.checked_name(|name| session.name(name))?;
    let quota = limit.checked_quota()?;
    let near = near_limit(name.as_str(), quota, rows.into());
    let near = session.all(near).await;
    let near: Vec<NearRow> = installed::explained(session, near, NEAR_NEEDS).await?;
    Ok(near.into_iter().map(KeyNearLimit::from).collect())
}

impl From<NearRow> for KeyNearLimit {
    fn from(row: NearRow) -> Self {
        let (key, debt_us, n, period_us, burst, has_own, has_names) = row;
        let quota = quota_of(n, period_us, burst);
        let debt_us = debt_us.max(0).unsigned_abs();
        let owed = u64::try_from(quota.units_owed(debt_us.into())).unwrap_or(u64::MAX);
        Self {
            key,
            remaining: u64::from(quota.burst).saturating_sub(owed) as u32,
            owed,
            full_in: Duration::from_micros(debt_us),
            quota,
            quota_source: match (has_own, has_names) {
                (true, _) => QuotaSource::Key,
                (false, true) => QuotaSource::Name,
                (false, false) => QuotaSource::Program,
            },
        }
    }
}

/// The statement of [`keys_near_limit`]. One instant counts for all keys.
///
/// PostgreSQL computes the order for all keys that are not full, so it is an expression without stored functions. With the
/// exact debt, a million keys took six times as long.
#[auto_type]
fn near_limit<'a>(name: &'a str, quota: (i64, i64, i64), rows: i64) -> _ {
    let (own_n, own_period_us, own_burst): (i64, i64, i64) = quota;
    let n = sql::in_force(
        OF_KEY.field(rate_limit_override::n).nullable(),
        OF_NAME.field(rate_limit_override::n).nullable(),
        own_n,
    );
    let period_us = sql::in_force(
        sql::microseconds(OF_KEY.field(rate_limit_override::period).nullable()),
        sql::microseconds(OF_NAME.field(rate_limit_override::period).nullable()),
        own_period_us,
    );
    let burst = sql::in_force(
        OF_KEY.field(rate_limit_override::burst).nullable(),
        OF_NAME.field(rate_limit_override::burst).nullable(),
        own_burst,
    );
    let debt_us = rate_limit_debt(
        rate_limit::changed_at,
        rate_limit::full_at,
        rate_limit::reserved_until,
        rate_limit::n,
        rate_limit::period_us,
        sql::statement_timestamp(),
        n,
        period_us,
        burst,
    );
    let has_own = OF_KEY
        .field(rate_limit_override::scope)
        .nullable()
        .is_not_null();
    let has_names = OF_NAME
        .field(rate_limit_override::scope)
        .nullable()
        .is_not_null();
    rate_limit::table
        .left_join(
            OF_KEY.on(OF_KEY
                .field(rate_limit_override::name)
                .eq(rate_limit::name)
                .and(
                    OF_KEY
                        .field(rate_limit_override::key)
                        .eq(rate_limit::key.nullable()),
                )),
        )
        .left_join(
            OF_NAME.on(OF_NAME
                .field(rate_limit_override::name)
                .eq(rate_limit::name)
                .and(OF_NAME.field(rate_limit_override::key).is_null())),
        )
        .filter(rate_limit::name.eq(name))
        .filter(is_spent())
        .order((
            (burst.cast::<Double>() - owed_about()).asc(),
            rate_limit::key,
        ))
        .limit(rows)
        .select((
            rate_limit::key,
            debt_us,
            n,
            period_us,
            burst,
            has_own,
            has_names,
        ))
}

/// Returns the condition that a key is not full.
#[auto_type]
fn is_spent() -> _ {
    rate_limit::full_at.gt(sql::later(
        rate_limit::changed_at,
        sql::statement_timestamp(),
    ))
}

/// Selects how many units a key owes, with fractions. Fast and exact enough for an order.
#[auto_type]
fn owed_about() -> _ {
    let microsecond: f64 = 1e6;
    (sql::date_part("epoch", rate_limit::full_at)
        - sql::date_part(
            "epoch",
            sql::later(rate_limit::changed_at, sql::statement_timestamp()),
        ))
        * microsecond
        * rate_limit::n.cast::<Double>()
        / rate_limit::period_us.cast::<Double>()
}

/// Selects the quotas that operators set, by name, the one for all keys of a name first. Loads as [`RateLimitOverride`].
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, RateLimitOverride};
/// use diesel_interlock::schema::resource_control::rate_limit_override;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let of_the_api: Vec<RateLimitOverride> = monitor::overrides()
///     .filter(rate_limit_override::name.eq("api"))
///     .load(conn)?;
/// # assert_eq!(of_the_api, []);
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn overrides() -> _ {
    let selection: AsSelect<RateLimitOverride, Pg> = RateLimitOverride::as_select();
    rate_limit_override::table
        .order((rate_limit_override::name, rate_limit_override::scope))
        .select(selection)
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
            rate_limit::reserved_until,
            rate_limit::n,
            rate_limit::period_us,
            clock_timestamp(),
            rate_limit::n,
            rate_limit::period_us,
            // Under the row's own quota the burst does not matter.
            1_i64.into_sql::<BigInt>(),
        ),
        rate_limit::n,
        rate_limit::period_us,
    )
}

/// Selects the keys that owe units, those that owe most first. Loads as [`RateLimitRow`].
///
/// There may be a million rows, so filter or limit the query. [`keys_near_limit`] knows the burst, and so what is left.
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
/// // The customers who owe most.
/// let most: Vec<(RateLimitRow, i64)> = monitor::spent_keys()
///     .filter(rate_limit::name.eq("api"))
///     .limit(10)
///     .select((RateLimitRow::as_select(), monitor::units_owed()))
///     .load(conn)?;
/// # assert_eq!((&*most[0].0.key, most[0].1), ("8", 95));
/// # assert_eq!((&*most[1].0.key, most[1].1), ("7", 90));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn spent_keys() -> _ {
    let selection: AsSelect<RateLimitRow, Pg> = RateLimitRow::as_select();
    rate_limit::table
        .filter(is_spent())
        .order(owed_about().desc())
        .select(selection)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_quotes(query: &impl diesel::query_builder::QueryFragment<Pg>) -> String {
        let sql = diesel::debug_query::<Pg, _>(query).to_string();
        sql.replace("\"resource_control\".", "").replace('"', "")
    }

    #[test]
    fn the_keys_near_a_limit_are_one_query_with_the_override_of_the_key_else_of_the_name() {
        let sql = without_quotes(&near_limit("api", (100, 60_000_000, 20), 10));
        let (_, from) = sql.split_once(" FROM ").unwrap();
        let (from, order) = from.split_once(" ORDER BY ").unwrap();
        assert_eq!(
            from,
            "((rate_limit \
             LEFT OUTER JOIN rate_limit_override AS override_of_key \
             ON ((override_of_key.name = rate_limit.name) AND (override_of_key.key = rate_limit.key))) \
             LEFT OUTER JOIN rate_limit_override AS override_of_name \
             ON ((override_of_name.name = rate_limit.name) AND (override_of_name.key IS NULL))) \
             WHERE ((rate_limit.name = $7) AND (rate_limit.full_at > \
             greatest(rate_limit.changed_at, pg_catalog.statement_timestamp())))"
        );
        let (order, binds) = order.split_once(" -- ").unwrap();
        assert_eq!(
            order,
            "(CAST(coalesce(override_of_key.burst, override_of_name.burst, $8) AS float8) - \
             ((((pg_catalog.date_part($9, rate_limit.full_at) - pg_catalog.date_part($10, \
             greatest(rate_limit.changed_at, pg_catalog.statement_timestamp()))) * $11) * \
             CAST(rate_limit.n AS float8)) / CAST(rate_limit.period_us AS float8))) ASC, \
             rate_limit.key LIMIT $12"
        );
        assert_eq!(
            binds,
            "binds: [100, 60000000, 20, 100, 60000000, 20, api, 20, epoch, epoch, 1000000.0, 10]"
        );
    }
}
