//! Looking at it: who holds a lock and who waits for it, who blocks whom, which requests are in
//! flight, and when a throttled resource is due.
//!
//! Everything here is a Diesel query or a piece of one, to be extended with `.filter()`, `.order()`,
//! joins with one's own tables ([`allow_joins_with!`](crate::allow_joins_with)), `.into_boxed()` and
//! the like. Times are compared with the server's `clock_timestamp()`, never with the application's.
//!
//! | The question | Ask |
//! |---|---|
//! | Who holds which locks? | [`holders()`], or of one lock [`holders_of`] |
//! | Who waits, and how long? | [`waiters()`], [`waiters_of`] |
//! | Who is in whose way? | [`blocked()`] |
//! | Whose lock is that number? | [`Names`] |
//! | Which requests to a service are in flight, which overran? | [`in_flight()`], [`timed_out()`], [`overdue()`] |
//! | Which slots are free, and when is the next? | [`slots`], [`next_expiry()`] |
//! | Who took a throttled resource last? | [`last_lockers()`], [`last_key_lockers()`] |
//! | Which are due, or when? | [`available_now()`], [`next_free_at()`], [`key_available_now()`], [`key_next_free_at()`] |
//!
//! # Locks
//!
//! come from PostgreSQL's views `pg_locks` and `pg_stat_activity`, and nothing needs to be installed
//! to see them. They are those of the current database, of this crate's guards and of anybody else.
//! The columns for `.filter()` and `.order()` are in this module:
//!
//! ```
//! use diesel::dsl::{IntervalDsl, count_star};
//! use diesel::prelude::*;
//! use diesel_interlock::monitor;
//!
//! # let database = workbench::Database::new();
//! # let conn = &mut database.connect();
//! // Waits of more than a minute per application.
//! let waits: Vec<(Option<String>, i64)> = monitor::waiters()
//!     .filter(monitor::waited.gt(1.minute()))
//!     .group_by(monitor::application_name)
//!     .select((monitor::application_name, count_star()))
//!     .load(conn)?;
//! # assert!(waits.is_empty());
//! # Ok::<(), diesel::result::Error>(())
//! ```
//!
//! # What is not known
//!
//! is `None`. PostgreSQL does not keep when a lock was granted, and before version 14 not since when
//! somebody waits for it. Of the sessions of other roles it hides statement, state, address and
//! times from a role without `pg_read_all_stats`; see [`Session`].
//!
//! # Requests and throttles
//!
//! are rows of tables, which [`migrations::install`](crate::migrations::install) makes and
//! [`schema`](crate::schema) declares. [`ServiceRequest`], [`ThrottledResourceRow`] and
//! [`ThrottledKeyRow`] load them.

mod interval;
mod joins;
mod lock_id;
mod locks;
mod names;
mod requests;
mod session;
mod throttled;
mod view;
mod who_blocks;

pub use self::interval::Elapsed;
pub use self::lock_id::of_key;
pub use self::locks::AdvisoryLocks;
pub use self::locks::advisory_lock::columns::{
    application_name, backend_start, client_addr, client_hostname, granted, key, key1, key2, pid,
    query, shared, state, usename, waited, waiting_since, xact_start,
};
pub use self::names::Names;
pub use self::requests::{
    ServiceRequest, Slots, in_flight, next_expiry, of_service, overdue, slots, timed_out,
};
#[cfg(feature = "testing")]
pub(crate) use self::session::find_holders;
pub use self::session::{Holder, Session, Waiter, holders, holders_of, waiters, waiters_of};
pub use self::throttled::{
    ThrottledKeyRow, ThrottledResourceRow, available_now, key_available_now, key_next_free_at,
    last_key_lockers, last_lockers, next_free_at,
};
pub use self::who_blocks::blocking::columns as blocking;
pub use self::who_blocks::{Blocked, Blocking, blocked, blocked_on};
pub use crate::time::Timestamp;

/// What [`allow_joins_with!`](crate::allow_joins_with) names.
#[doc(hidden)]
pub mod tables {
    pub use super::locks::advisory_lock;
    pub use super::who_blocks::blocking;
}
