//! Locks, throttles and semaphores for Diesel applications that run as several instances, coordinated
//! by the PostgreSQL that they already have.
//!
//! PostgreSQL can lock a number for an application, an [advisory lock][pg]: at most one session of
//! the database holds it, and the server frees it when that session ends, however it ends. Nothing
//! needs to be installed for it. This crate gives such locks names, typed queries, and guards that
//! pin a pooled connection, so that a lock is always released on the session that took it. What must
//! outlive a session is kept in tables, and decided by the server's clock: how often something may be
//! done, and how many may do it at a time.
//!
//! # Which one
//!
//! | The problem | Use |
//! |---|---|
//! | Check, then write, in one transaction: bookings, "insert if absent" | [`AdvisoryLock::transaction`] |
//! | The same inside a transaction that is open already | [`AdvisoryLock::acquire_xact`] |
//! | A job over many transactions, on one instance only | [`AdvisoryLock::try_acquire`] |
//! | The same, waiting for one's turn | [`AdvisoryLock::acquire_timeout`] |
//! | Many readers, one writer | [`AdvisoryLock::shared`] |
//! | At most once per interval, whoever asks | [`Throttle`] |
//! | At most so many at a time: calls to a fragile service | [`Semaphore`] |
//! | Migrations at start-up, on many instances | [`migrations::run_pending`] |
//! | Behind a pooler in transaction mode | the first two, throttles and semaphores |
//! | A lock over many transactions there: one with a lease | a [`Semaphore`] of one slot |
//! | See who holds, who waits, what is in flight and what is due | [`monitor`] |
//! | Something of one's own | [`functions`] |
//!
//! ```
//! use std::time::Duration;
//!
//! use diesel::prelude::*;
//! use diesel_interlock::{
//!     AdvisoryLock, Attempt, Decision, Error, LockKey, PgPool, Semaphore, Throttle, monitor,
//!     throttled_resources,
//! };
//!
//! static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
//! static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
//!
//! throttled_resources! {
//!     pub enum Resource {
//!         CacheRebuild = "cache rebuild" every Duration::from_secs(15),
//!         TenantImport = "tenant import" every Duration::from_secs(60),
//!     }
//! }
//!
//! fn nightly(pool: &PgPool) -> Result<(), Error> {
//!     let Attempt::Acquired(mut guard) = NIGHTLY.try_acquire(pool)? else {
//!         return Ok(()); // another instance is at it
//!     };
//!     write_report(guard.conn())?; // on the connection whose session holds the lock
//!     guard.release() // an error if the lock was lost on the way
//! }
//!
//! fn book(conn: &mut PgConnection, datacenter: i32, server: i32) -> QueryResult<bool> {
//!     AdvisoryLock::new(LockKey::parts([datacenter, server]))
//!         .transaction(conn, |conn| insert_if_free(conn, server))
//! }
//!
//! fn import(conn: &mut PgConnection, tenant: i64) -> Result<String, Error> {
//!     let throttle = Throttle::of(Resource::TenantImport).key(tenant);
//!     Ok(match throttle.clone().details("web-3 pid 811").attempt_on(conn)? {
//!         Decision::Granted(grant) => format!("202 since {}", grant.granted_at),
//!         Decision::Denied(denied) => format!("429 Retry-After: {}", denied.retry_after_secs()),
//!     })
//! }
//!
//! fn geocode(pool: &PgPool, q: &str) -> Result<Option<String>, Error> {
//!     let Attempt::Acquired(permit) = GEOCODER.try_acquire(pool)? else {
//!         return Ok(None); // four are in flight
//!     };
//!     let answer = call_geocoder(q, permit.fencing_token()); // no connection is held meanwhile
//!     permit.release()?; // an error if it had timed out
//!     Ok(Some(answer))
//! }
//!
//! fn stuck(conn: &mut PgConnection) -> QueryResult<Vec<monitor::Waiter>> {
//!     monitor::waiters().filter(monitor::application_name.like("web-%")).load(conn)
//! }
//! # fn call_geocoder(q: &str, _: i64) -> String { q.to_owned() }
//! # fn write_report(_: &mut PgConnection) -> QueryResult<()> { Ok(()) }
//! # fn insert_if_free(_: &mut PgConnection, _: i32) -> QueryResult<bool> { Ok(true) }
//! # let database = workbench::Database::new();
//! # let (pool, conn) = (database.pool(1), &mut database.connect());
//! # diesel_interlock::migrations::install(conn)?;
//! # let _ = diesel_interlock::sync::<Resource>(conn)?;
//! # nightly(&pool)?;
//! # assert!(book(conn, 223, 345)?);
//! # assert!(import(conn, 7)?.starts_with("202 since "));
//! # assert_eq!(import(conn, 7)?, "429 Retry-After: 60");
//! # assert_eq!(geocode(&pool, "Main St")?.as_deref(), Some("Main St"));
//! # assert!(stuck(conn)?.is_empty());
//! # Ok::<(), Error>(())
//! ```
//!
//! Locks, and looking at them, need nothing in the database. Throttles and semaphores need the schema
//! of this crate: [`migrations::install`], or files among the application's own migrations.
//!
//! # Two forms of every operation
//!
//! The plain form takes a [`PgPool`], Diesel's r2d2 pool; the form that ends in `_on` takes a
//! `&mut PgConnection`, which every other pool or wrapper lends. Transaction locks are taken on the
//! connection that has the transaction.
//!
//! # Answers and errors
//!
//! Whoever may find a lock or every slot taken answers [`Attempt`]: acquired, or busy. That is not an
//! error, and it cannot be overlooked. Where it is known when to ask again, [`Decision`] and
//! [`Admission`] tell. Errors are [`Error`], which converts into Diesel's, so `?` works in
//! functions that return a [`QueryResult`](diesel::QueryResult).
//!
//! # Features
//!
//! - `r2d2` (default): the forms that take a pool.
//! - `migrations` (default): [`migrations`].
//! - `tracing`: [spans and events](#events).
//! - `sha2`: the lock keys of two Python packages that hash with SHA-256.
//! - `testing`: the module `testing`, for an application's own tests.
//!
//! # Events
//!
//! With the feature `tracing`, every operation is an event with the target `diesel_interlock`, within a
//! span of its own, `acquire` or `attempt`, where it may wait. The fields are part of this crate's
//! contract:
//!
//! | Field | Is |
//! |---|---|
//! | `operation` | `acquire`, `release`, `renew`, `attempt` (at a throttle), `discard` (of a connection), `watch`, `sync` |
//! | `key` | the lock, by name and number; or the key of a throttle |
//! | `service`, `resource` | the semaphore; the throttled resource |
//! | `outcome` | `acquired`, `busy`, `released`, `lost`, `timed_out`, `deferred`, `renewed`, `granted`, `denied`, `discarded`, `different`, `error` |
//! | `waited_ms`, `held_ms`, `retry_after_ms` | how long, in milliseconds |
//! | `declared_ms`, `in_database_ms` | the intervals of a resource that `sync` found `different`, in milliseconds |
//! | `error` | the message and its causes |
//!
//! What somebody should look at is a warning: `lost`, `timed_out`, `discarded`, `different`,
//! `error`; the rest is at the level `DEBUG`.
//!
//! [pg]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS

mod advisory;
mod attempt;
#[cfg(feature = "r2d2")]
mod background;
#[cfg(feature = "r2d2")]
mod clock;
#[cfg(feature = "r2d2")]
mod crowds;
pub mod error;
mod events;
mod fence;
pub mod functions;
#[cfg(all(any(doc, doctest), feature = "r2d2", feature = "migrations"))]
pub mod guide;
mod installed;
mod key;
#[cfg(feature = "migrations")]
pub mod migrations;
pub mod monitor;
#[cfg(feature = "r2d2")]
mod panics;
#[cfg(any(feature = "r2d2", feature = "migrations"))]
mod pauses;
#[cfg(feature = "r2d2")]
mod pool;
/// The tables of `resource_control`, as `diesel print-schema` writes them: for queries of one's own.
#[allow(missing_docs, unreachable_pub)]
pub mod schema;
mod semaphore;
mod session;

#[cfg(feature = "r2d2")]
mod sessions;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod throttle;
mod time;
mod transaction;

pub use crate::advisory::{AdvisoryLock, AdvisoryLockGuard, BorrowedGuard, Lease};
#[cfg(feature = "r2d2")]
pub use crate::advisory::{PooledGuard, Watch};
pub use crate::attempt::Attempt;
pub use crate::error::{Error, Result};
pub use crate::fence::Fence;
pub use crate::key::{LockId, LockKey, fnv1a};
#[cfg(feature = "r2d2")]
pub use crate::pool::{PgPool, PooledPgConnection};
#[cfg(feature = "r2d2")]
pub use crate::semaphore::Permit;
pub use crate::semaphore::{Admission, Claim, Full, Semaphore};
#[cfg(feature = "r2d2")]
pub use crate::sessions::{Sessions, probe_sessions};
pub use crate::throttle::{
    Decision, DeclaredResources, Denial, DenialReason, Difference, Grant, ResourceLabel, Synced,
    Throttle, ThrottledResource, sync, sync_intervals,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
