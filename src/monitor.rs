//! Shows who holds, who waits and what is due: the views of `resource_control` as rows and filters
//! for Diesel.
//!
//! The views are in the database, so psql and Grafana read the same data. [`views`] has their
//! columns. Each row type here has a function `all`, which selects all rows and can be filtered
//! further. The tables are in [`schema`](crate::schema), and their row types are [`ServiceRequest`]
//! and [`ThrottledResource`].
//!
//! ```
//! use diesel::prelude::*;
//! use diesel_interlock::LockKey;
//! use diesel_interlock::monitor::{RateLimitState, Lock, views};
//!
//! # let database = workbench::Database::new();
//! # diesel_interlock::migrations::install(&database.pool(1))?;
//! # let conn = &mut database.connect();
//! let nightly = Lock::of(&LockKey::named("nightly report"));
//! let holders = nightly.filter(views::advisory_lock::is_held).load(conn)?;
//! let nearly = RateLimitState::all().filter(views::rate_limit_state::used.ge(0.8));
//! let nearly_limited = nearly.load(conn)?;
//! # assert!(holders.is_empty() && nearly_limited.is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With the feature `serde`, the rows can be serialized, for example for a status page: times in
//! chrono's format, and intervals as seconds.

// Diesel's macro writes aliases without documentation.
#![allow(missing_docs)]

pub mod views;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::dsl::{AsSelect, Select, SqlTypeOf, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::sql_types::Timestamptz;

use self::comparison::{is_after, is_not_after};
use self::views::{
    advisory_lock, leader, rate_limit_state, schedule_state, slot_in_flight, throttle_state,
};
use crate::key::{LockId, LockKey};
use crate::schema::resource_control::{service_request, throttled_resource};
use crate::throttle::ResourceLabel;

diesel::define_sql_function! {
    /// The server's clock.
    #[sql_name = "pg_catalog.clock_timestamp"]
    fn clock_timestamp() -> Timestamptz;
}

/// The functions of `>` and `<=`. PostgreSQL would look for the operators in the whole search path,
/// because it has none for exactly the domain of a column.
mod comparison {
    use diesel::sql_types::Timestamptz;

    diesel::define_sql_function! {
        #[sql_name = "pg_catalog.timestamptz_gt"]
        fn is_after(time: Timestamptz, other: Timestamptz) -> Bool;
    }

    diesel::define_sql_function! {
        #[sql_name = "pg_catalog.timestamptz_le"]
        fn is_not_after(time: Timestamptz, other: Timestamptz) -> Bool;
    }
}

/// An advisory lock that a session or a prepared transaction holds, or that a session waits for on
/// the server. Waiters that poll do not appear.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = advisory_lock, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Lock {
    /// The number of the lock. `None` for a pair.
    pub number: Option<i64>,
    /// The first number of a pair.
    pub first: Option<i32>,
    /// The second number of a pair.
    pub second: Option<i32>,
    /// Whether the lock is shared.
    pub is_shared: bool,
    /// Whether the session holds the lock. If not, the session waits for it.
    pub is_held: bool,
    /// The process id of the session. `None` for a prepared transaction.
    pub pid: Option<i32>,
    /// The `application_name` of the session. Empty for a prepared transaction, of which the next
    /// fields are `None`.
    pub application_name: String,
    /// The role of the session.
    pub role: Option<String>,
    /// The address of the session's client. `None` for a socket, too.
    pub client: Option<String>,
    /// What the session is doing: `active`, `idle`, `idle in transaction` …
    pub state: Option<String>,
    /// When the session's transaction began.
    pub transaction_since: Option<DateTime<Utc>>,
    /// Since when the session has been waiting.
    pub waiting_since: Option<DateTime<Utc>>,
    /// The process ids of the sessions that block this one, and 0 for a prepared transaction.
    pub blocked_by: Vec<i32>,
}

/// A slot of a semaphore that is in use.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = slot_in_flight, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Slot {
    /// The id of the request, which is its fencing token.
    pub id: i64,
    /// The service.
    pub service: String,
    /// The slot, from 0.
    pub slot: i16,
    /// When the slot was claimed.
    pub created_at: DateTime<Utc>,
    /// When the slot expires unless the request is renewed.
    pub expires_at: DateTime<Utc>,
    /// How long from now until it expires.
    #[cfg_attr(feature = "serde", serde(serialize_with = "in_seconds"))]
    pub remaining: PgInterval,
    /// The details of the semaphore.
    pub details: String,
}

/// A throttle of either kind.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = throttle_state, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ThrottleState {
    /// The name, or the label of the resource.
    pub name: String,
    /// The key. Empty without one.
    pub key: String,
    /// Whether the throttle is of a declared resource.
    pub is_resource: bool,
    /// The interval, as elapsed time.
    #[cfg_attr(feature = "serde", serde(serialize_with = "in_seconds"))]
    pub throttle_interval: PgInterval,
    /// When it was granted last. `None` for never.
    pub last_granted: Option<DateTime<Utc>>,
    /// Who was granted it last.
    pub details: String,
    /// When it is due. `None` if it was never granted.
    pub due_at: Option<DateTime<Utc>>,
    /// Whether it is due.
    pub is_due: bool,
}

/// A key of a rate limit.
#[derive(Debug, Clone, PartialEq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = rate_limit_state, check_for_backend(Pg))]
#[non_exhaustive]
pub struct RateLimitState {
    /// The name of the limit.
    pub name: String,
    /// The key. Empty without one.
    pub key: String,
    /// How many units the key has when it is full.
    pub burst: i64,
    /// How many units it has now.
    pub remaining: i64,
    /// The used part of the burst: 0 for a full key, 1 for a limited one.
    pub used: f64,
    /// When the key is full if no more units are spent.
    pub full_at: DateTime<Utc>,
    /// When units were spent last.
    pub spent_at: DateTime<Utc>,
}

/// Who leads.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = leader, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Leadership {
    /// The name of the election.
    pub name: String,
    /// The details of the leader.
    pub holder: String,
    /// Since when it leads.
    pub since: DateTime<Utc>,
    /// When the term ends, unless it is renewed.
    pub until: DateTime<Utc>,
    /// The fencing token of the term.
    pub fencing_token: i64,
}

/// A schedule: what comes next, and the tick that ran last.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = schedule_state, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ScheduleState {
    /// The name of the schedule.
    pub name: String,
    /// `new`, `running`, `done`, `failed`, `crashed` or `given back`.
    pub state: String,
    /// The next scheduled tick. `None` if there is none, or if no instance has looked yet. If it is
    /// in the past, the tick is due: the run before it lasts, or the schedule is paused, or no
    /// instance that runs it is up.
    pub next_at: Option<DateTime<Utc>>,
    /// The tick, and `None` before the first one.
    pub tick: Option<DateTime<Utc>>,
    /// Which run of the tick this is or was.
    pub attempt: i32,
    /// The fencing token of the run.
    pub token: i64,
    /// The details of the instance that runs or ran it.
    pub runner: String,
    /// When the run began.
    pub started_at: Option<DateTime<Utc>>,
    /// Until when the run holds the tick, while it is running.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it ended.
    pub ended_at: Option<DateTime<Utc>>,
    /// The error with which it failed.
    pub error: Option<String>,
    /// When the failed tick is run again.
    pub retry_at: Option<DateTime<Utc>>,
    /// When a run was asked for that has not begun yet.
    pub triggered_at: Option<DateTime<Utc>>,
    /// Since when the schedule has been paused. It takes no scheduled tick while it is paused.
    pub paused_at: Option<DateTime<Utc>>,
}

/// Serializes an interval as seconds. The views have elapsed time, so a month is always 30 days,
/// and a day always 24 hours.
#[cfg(feature = "serde")]
fn in_seconds<S: serde::Serializer>(
    interval: &PgInterval,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    const DAY: f64 = 86_400.0;
    let days = f64::from(interval.days) + 30.0 * f64::from(interval.months);
    serializer.serialize_f64(days * DAY + interval.microseconds as f64 / 1e6)
}

macro_rules! all {
    ($($row:ident $view:ident,)*) => { $(
        impl $row {
            /// Selects all rows, for further filters.
            pub fn all() -> Select<$view::table, AsSelect<Self, Pg>> {
                $view::table.select(Self::as_select())
            }
        }
    )* };
}

all! {
    Lock advisory_lock,
    Slot slot_in_flight,
    ThrottleState throttle_state,
    RateLimitState rate_limit_state,
    Leadership leader,
    ScheduleState schedule_state,
    ServiceRequest service_request,
    ThrottledResource throttled_resource,
}

impl Lock {
    /// Selects the sessions that hold a lock, and those that wait for it on the server. For a key
    /// with an invalid name, selects nothing.
    pub fn of(
        key: &LockKey,
    ) -> advisory_lock::BoxedQuery<'static, Pg, SqlTypeOf<AsSelect<Self, Pg>>> {
        let all = Self::all().into_boxed();
        match key.id() {
            Ok(LockId::BigInt(number)) => all.filter(advisory_lock::number.eq(number)),
            Ok(LockId::Pair(first, second)) => all
                .filter(advisory_lock::first.eq(first))
                .filter(advisory_lock::second.eq(second)),
            Err(_) => all.filter(advisory_lock::pid.eq(0)),
        }
    }
}

/// A row of `service_request`: a request in flight, or one in the log.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = service_request, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ServiceRequest {
    /// The id of the request, which is its fencing token.
    pub id: i64,
    /// The service.
    pub service: String,
    /// The slot, from 0.
    pub slot: i16,
    /// When the slot was claimed.
    pub created_at: DateTime<Utc>,
    /// When the request expires, and stops counting as in flight.
    pub expires_at: DateTime<Utc>,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// When it was marked as timed out, which may be long after it expired.
    pub timed_out_at: Option<DateTime<Utc>>,
    /// The details of the semaphore.
    pub details: String,
}

/// Builds the condition that a [request](ServiceRequest) is in flight, by the server's clock.
#[auto_type]
pub fn is_in_flight() -> _ {
    service_request::completed_at
        .is_null()
        .and(service_request::timed_out_at.is_null())
        .and(is_after(service_request::expires_at, clock_timestamp()))
}

/// Builds the condition that a [request](ServiceRequest) has expired, whether it is marked as timed
/// out or not.
#[auto_type]
pub fn has_timed_out() -> _ {
    service_request::timed_out_at
        .is_not_null()
        .or(service_request::completed_at
            .is_null()
            .and(is_not_after(service_request::expires_at, clock_timestamp())))
}

/// A row of `throttled_resource`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = throttled_resource, check_for_backend(Pg), primary_key(resource_id))]
#[non_exhaustive]
pub struct ThrottledResource {
    /// The label of the resource.
    pub resource_id: ResourceLabel,
    /// The interval of the resource.
    #[cfg_attr(feature = "serde", serde(serialize_with = "in_seconds"))]
    pub throttle_interval: PgInterval,
    /// When it was granted last.
    #[diesel(deserialize_as = Never)]
    pub last_locked: Option<DateTime<Utc>>,
    /// Who was granted it last.
    pub last_locker_details: String,
}

/// A time where `-infinity`, which chrono cannot represent, means never.
#[doc(hidden)]
#[derive(Debug, diesel::deserialize::FromSqlRow)]
pub struct Never(PgTimestamp);

impl diesel::deserialize::FromSql<Timestamptz, Pg> for Never {
    fn from_sql(value: diesel::pg::PgValue<'_>) -> diesel::deserialize::Result<Self> {
        diesel::deserialize::FromSql::<Timestamptz, Pg>::from_sql(value).map(Self)
    }
}

impl From<Never> for Option<DateTime<Utc>> {
    fn from(Never(at): Never) -> Self {
        crate::input::time(at)
    }
}
