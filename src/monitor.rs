//! Who holds, who waits, what is due: the views of `resource_control`, as rows and filters of
//! Diesel.
//!
//! The views are the database's, so psql and Grafana read the same. [`views`] has their columns,
//! and each row type here a function `all` that selects it, for further filters. The tables are in
//! [`schema`](crate::schema), with [`ServiceRequest`] and [`ThrottledResource`] for their rows.
//!
//! ```
//! use diesel::prelude::*;
//! use diesel_interlock::LockKey;
//! use diesel_interlock::monitor::{KeyOfLimit, Lock, views};
//!
//! # let database = workbench::Database::new();
//! # diesel_interlock::migrations::install(&database.pool(1))?;
//! # let conn = &mut database.connect();
//! let nightly = Lock::of(&LockKey::named("nightly report"));
//! let holders = nightly.filter(views::advisory_lock::is_held).load(conn)?;
//! let nearly = KeyOfLimit::all().filter(views::rate_limit_state::used.ge(0.8));
//! let nearly_limited = nearly.load(conn)?;
//! # assert!(holders.is_empty() && nearly_limited.is_empty());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With the feature `serde` the rows are serialized, for a status page: times as chrono does, and
//! intervals as seconds.

// Diesel's macro writes aliases without documentation.
#![allow(missing_docs)]

pub mod views;

use chrono::{DateTime, Utc};
use diesel::data_types::{PgInterval, PgTimestamp};
use diesel::dsl::{AsSelect, Select, SqlTypeOf, auto_type};
use diesel::pg::Pg;
use diesel::prelude::*;
use diesel::sql_types::Timestamptz;

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

/// An advisory lock that a session holds, or waits for on the server. Waiters that poll are not
/// seen.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = advisory_lock, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Lock {
    /// The number, and `None` for a pair.
    pub number: Option<i64>,
    /// The first of a pair.
    pub first: Option<i32>,
    /// The second of a pair.
    pub second: Option<i32>,
    /// Whether it is shared.
    pub is_shared: bool,
    /// Whether the session holds it. Otherwise it waits for it.
    pub is_held: bool,
    /// The session.
    pub pid: i32,
    /// Its `application_name`.
    pub application_name: String,
    /// Its role.
    pub role: Option<String>,
    /// The address of its client, and `None` for a socket.
    pub client: Option<String>,
    /// What it does: `active`, `idle`, `idle in transaction` …
    pub state: Option<String>,
    /// Since when it has a transaction.
    pub transaction_since: Option<DateTime<Utc>>,
    /// Since when it waits.
    pub waiting_since: Option<DateTime<Utc>>,
    /// The sessions that it waits for.
    pub blocked_by: Vec<i32>,
}

/// A slot of a semaphore that is in use.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = slot_in_flight, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Slot {
    /// The request, and its fencing token.
    pub id: i64,
    /// The service.
    pub service: String,
    /// The slot, from 0.
    pub slot: i16,
    /// When it was claimed.
    pub created_at: DateTime<Utc>,
    /// When it expires unless it is renewed.
    pub expires_at: DateTime<Utc>,
    /// How long that is from now.
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
    /// The key, and empty without one.
    pub key: String,
    /// Whether it is a resource of the database.
    pub is_resource: bool,
    /// The interval, as elapsed time.
    #[cfg_attr(feature = "serde", serde(serialize_with = "in_seconds"))]
    pub throttle_interval: PgInterval,
    /// When it was granted last, and `None` for never.
    pub last_granted: Option<DateTime<Utc>>,
    /// Who was granted it last.
    pub details: String,
    /// When it is due, and `None` for one that was never granted.
    pub due_at: Option<DateTime<Utc>>,
    /// Whether it is due.
    pub is_due: bool,
}

/// A key of a rate limit.
#[derive(Debug, Clone, PartialEq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = rate_limit_state, check_for_backend(Pg))]
#[non_exhaustive]
pub struct KeyOfLimit {
    /// The name of the limit.
    pub name: String,
    /// The key, and empty without one.
    pub key: String,
    /// How many units it has when it is full.
    pub burst: i64,
    /// How many it has now.
    pub remaining: i64,
    /// How much of the burst is used: 0 for a full key, 1 for one that is limited.
    pub used: f64,
    /// When it is full if nobody spends more.
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
    /// Until when, unless the term is renewed.
    pub until: DateTime<Utc>,
    /// The fencing token of the term.
    pub token: i64,
}

/// The tick of a schedule that ran last.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = schedule_state, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ScheduleState {
    /// The name of the schedule.
    pub name: String,
    /// `new`, `running`, `done`, `failed`, `crashed` or `given back`.
    pub state: String,
    /// The tick, and `None` before the first one.
    pub tick: Option<DateTime<Utc>>,
    /// Which run of the tick it is or was.
    pub attempt: i32,
    /// The fencing token of the run.
    pub token: i64,
    /// The details of the runner.
    pub runner: String,
    /// When the run began.
    pub started_at: Option<DateTime<Utc>>,
    /// Until when it holds the tick, while it runs.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it ended.
    pub ended_at: Option<DateTime<Utc>>,
    /// What it failed with.
    pub error: Option<String>,
    /// Since when it is paused, and takes no tick.
    pub paused_at: Option<DateTime<Utc>>,
}

/// An interval as seconds. The views have elapsed time, and so neither months nor days of other
/// lengths.
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
            /// Selects all of them, for further filters.
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
    KeyOfLimit rate_limit_state,
    Leadership leader,
    ScheduleState schedule_state,
    ServiceRequest service_request,
    ThrottledResource throttled_resource,
}

impl Lock {
    /// Selects those who hold a lock, and those who wait for it on the server. A key with an
    /// invalid name has neither.
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

/// A row of `service_request`: a request in flight, or of the log.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = service_request, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ServiceRequest {
    /// Its id, which is its fencing token.
    pub id: i64,
    /// The service.
    pub service: String,
    /// The slot, from 0.
    pub slot: i16,
    /// When it was claimed.
    pub created_at: DateTime<Utc>,
    /// When it expires and no longer counts.
    pub expires_at: DateTime<Utc>,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// When it was marked as timed out, which may be long after it expired.
    pub timed_out_at: Option<DateTime<Utc>>,
    /// The details of the semaphore.
    pub details: String,
}

/// The condition that a [request](ServiceRequest) is in flight, by the server's clock.
#[auto_type]
pub fn is_in_flight() -> _ {
    service_request::completed_at
        .is_null()
        .and(service_request::timed_out_at.is_null())
        .and(service_request::expires_at.gt(clock_timestamp()))
}

/// The condition that a [request](ServiceRequest) has expired, whether it is marked or not.
#[auto_type]
pub fn has_timed_out() -> _ {
    service_request::timed_out_at
        .is_not_null()
        .or(service_request::completed_at
            .is_null()
            .and(service_request::expires_at.le(clock_timestamp())))
}

/// A row of `throttled_resource`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[diesel(table_name = throttled_resource, check_for_backend(Pg), primary_key(resource_id))]
#[non_exhaustive]
pub struct ThrottledResource {
    /// The label of the resource.
    pub resource_id: ResourceLabel,
    /// Its interval.
    #[cfg_attr(feature = "serde", serde(serialize_with = "in_seconds"))]
    pub throttle_interval: PgInterval,
    /// When it was granted last.
    #[diesel(deserialize_as = Never)]
    pub last_locked: Option<DateTime<Utc>>,
    /// Who was granted it last.
    pub last_locker_details: String,
}

/// A time of which `-infinity`, which chrono cannot represent, means never.
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
