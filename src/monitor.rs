//! Queries for operators: holders of locks and waiters, the sessions that block others, requests in flight, throttled
//! resources that are due, and keys that are near their rate limit.
//!
//! Most items are Diesel queries or expressions, which an application extends with `.filter()`, `.order()`, joins with its own
//! tables ([`allow_joins_with!`](crate::allow_joins_with)), `.into_boxed()` and the like. [`holders_of`], [`waiters_of`], [`slots`]
//! and [`keys_near_limit`] run their query. Times are compared with the server's clock, never with the application's.
//!
//! | Question | Query |
//! |---|---|
//! | Which sessions hold which locks? | [`holders()`], or [`holders_of`] for one lock |
//! | Which sessions wait, and how long? | [`waiters()`], [`waiters_of`] |
//! | Which session blocks which? | [`blocked()`] |
//! | Which lock has this number? | [`Names`] |
//! | Which requests to a service are in flight, which timed out? | [`in_flight()`], [`timed_out()`], [`overdue()`] |
//! | Which slots are free, and when is the next? | [`slots`], [`next_expiry()`] |
//! | What are the last grants of throttled resources? | [`last_lockers()`], [`last_key_lockers()`] |
//! | Which resources are due, or when? | [`available_now()`], [`next_free_at()`], [`key_available_now()`], [`key_next_free_at()`] |
//! | Which keys of a rate limit are nearest to it, and what is left of them? | [`keys_near_limit`] |
//! | Which keys of any rate limit owe most, and how much? | [`spent_keys()`], [`units_owed()`] |
//! | Which quotas did operators set? | [`overrides()`] |
//!
//! # Locks
//!
//! The locks are those of the current database, taken by this crate's guards or otherwise. PostgreSQL's views `pg_locks`
//! and `pg_stat_activity` list them, so nothing needs to be installed. This module has the columns for `.filter()` and
//! `.order()`:
//!
//! ```
//! use diesel::dsl::{IntervalDsl, count_star};
//! use diesel::prelude::*;
//! use diesel_interlock::monitor;
//!
//! # let database = workbench::Database::new();
//! # let conn = &mut database.connect();
//! // The number of waits of more than a minute, per application. Waits for session locks of this crate are shorter: see `waiters`.
//! let waits: Vec<(Option<String>, i64)> = monitor::waiters()
//!     .filter(monitor::waited.gt(1.minute()))
//!     .group_by(monitor::application_name)
//!     .select((monitor::application_name, count_star()))
//!     .load(conn)?;
//! # assert!(waits.is_empty());
//! # Ok::<(), diesel::result::Error>(())
//! ```
//!
//! # Unknown values
//!
//! A value that PostgreSQL does not know or does not show is `None`. PostgreSQL does not record when a lock was granted, and
//! before version 14 it does not record when a wait started. From a role without `pg_read_all_stats` it hides the statement,
//! state, address and times of other roles' sessions. See [`Session`].
//!
//! # Search path
//!
//! Diesel sends operators without their schema, so operators of another schema that is ahead of `pg_catalog` in the `search_path`
//! may change what these queries and expressions return.
//!
//! # Invalid text
//!
//! The server shows two texts that it has not checked: the name of a role that was created in a database of another encoding, and,
//! in a database whose encoding is `SQL_ASCII`, any statement. If one session has a role or a statement that is not valid UTF-8, a
//! query that reads [`usename`] or [`query`] of that session fails, as [`holders()`] and [`waiters()`] do. Rename the role, or
//! `.select()` the other columns.
//!
//! # Requests and throttles
//!
//! Requests and throttles are rows of tables, which [`migrations::install`](crate::migrations::install) creates and
//! [`schema`](crate::schema) declares. [`ServiceRequest`], [`ThrottledResourceRow`] and [`ThrottledKeyRow`] load them. Rate
//! limits are rows of tables, too, which [`RateLimitRow`] and [`RateLimitOverride`] load. [`keys_near_limit`] also needs the
//! [`RateLimit`](crate::RateLimit) of the program, because PostgreSQL does not store its quota.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
mod joins;
mod locks;
mod rate_limits;
mod requests;
mod throttled;
mod view;
mod who_blocks;
mod who_holds;

pub use self::locks::advisory_lock::columns::{
    application_name, backend_start, client_addr, client_hostname, granted, key, key1, key2, pid,
    query, shared, state, usename, waited, waiting_since, xact_start,
};
pub use self::locks::{AdvisoryLocks, Names, of_key};
#[cfg(feature = "postgres")]
pub use self::rate_limits::keys_near_limit;
pub use self::rate_limits::{
    KeyNearLimit, QuotaSource, RateLimitOverride, RateLimitRow, overrides, spent_keys, units_owed,
};
#[cfg(feature = "postgres")]
pub use self::requests::slots;
pub use self::requests::{
    ServiceRequest, Slots, in_flight, next_expiry, of_service, overdue, timed_out,
};
pub use self::throttled::{
    ThrottledKeyRow, ThrottledResourceRow, available_now, key_available_now, key_next_free_at,
    last_key_lockers, last_lockers, next_free_at,
};
pub use self::who_blocks::blocking::columns as blocking;
pub use self::who_blocks::{Blocked, Blocking, blocked, blocked_on};
#[cfg(feature = "testing")]
pub(crate) use self::who_holds::find_holders;
pub use self::who_holds::{Holder, Session, Waiter, holders, waiters};
#[cfg(feature = "postgres")]
pub use self::who_holds::{holders_of, waiters_of};
pub use crate::time::{Elapsed, Timestamp};

/// The tables that [`allow_joins_with!`](crate::allow_joins_with) names.
#[doc(hidden)]
pub mod tables {
    pub use super::locks::advisory_lock;
    pub use super::who_blocks::blocking;
}
