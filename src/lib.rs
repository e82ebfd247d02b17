//! PostgreSQL advisory locks for Diesel, plus throttles, rate limits and semaphores, for applications that run several instances
//! on one database.
//!
//! PostgreSQL can lock a number for an application, which is an [advisory lock][pg]. One session of the database holds it, or
//! several share it. The server frees it when the session ends, even if the process crashed. This crate gives locks names, and
//! guards that pin a pooled connection, so that a lock is always released on the session that took it. Throttles and rate limits
//! bound how often something may be done. Semaphores bound how many may do it at a time. Their state must outlive a session, so it
//! is kept in tables, and the server's clock decides.
//!
//! Locks need nothing installed. Throttles, rate limits, semaphores and fences need the schema of this crate. Either
//! [`migrations::install`] creates it, or files among the application's own migrations do.
//!
//! # Choosing a primitive
//!
//! | Problem | Use |
//! |---|---|
//! | Check, then write, in one transaction: bookings, "insert if absent" | [`AdvisoryLock::transaction`] |
//! | The same inside a transaction that is open already | [`AdvisoryLock::acquire_xact`] |
//! | A job that spans many transactions, on one instance only | [`AdvisoryLock::try_acquire`] |
//! | The same, waiting for the lock | [`AdvisoryLock::acquire_timeout`] |
//! | Many readers, one writer | [`AdvisoryLock::shared`] |
//! | At most once per interval, across all instances | [`Throttle`] |
//! | At most N at a time: calls to a fragile service | [`Semaphore`] |
//! | N per period on average, with a bounded burst, for each key | [`RateLimit`] |
//! | The same, waiting for a turn | [`RateLimit::acquire_timeout`] |
//! | The same, without a round trip for each call | [`LocalRateLimit`] |
//! | Refuse a late write of a former holder | [`Fence`] |
//! | Migrations at start-up, on many instances | [`migrations::run_pending`] |
//! | Anything behind a pooler in transaction mode | transaction locks, [`Throttle`], [`RateLimit`], [`Semaphore`], [`Fence`] |
//! | A lock that spans many transactions behind such a pooler | a [`Semaphore`] with one slot |
//! | See who holds, who waits, what is in flight and what is due | [`monitor`] |
//! | Your own query | [`functions`] |
//!
//! # Examples
//!
//! ```
//! use std::time::Duration;
//!
//! use diesel::prelude::*;
//! use diesel_interlock::{
//!     Admission, AdvisoryLock, Attempt, Decision, Error, LockKey, PgPool, Semaphore, Throttle,
//!     monitor, throttled_resources,
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
//!         return Ok(()); // another instance runs it
//!     };
//!     write_report(guard.conn())?; // on the connection whose session holds the lock
//!     guard.release() // an error if the lock was lost meanwhile
//! }
//!
//! fn book(conn: &mut PgConnection, datacenter: i32, server: i32) -> QueryResult<bool> {
//!     let key = LockKey::parts(["server", &datacenter.to_string(), &server.to_string()]);
//!     AdvisoryLock::new(key).transaction(conn, |conn| insert_if_free(conn, server))
//! }
//!
//! fn import(conn: &mut PgConnection, tenant: i64) -> Result<String, Error> {
//!     let throttle = Throttle::of(Resource::TenantImport).key(tenant).details("web-3 pid 811");
//!     Ok(match throttle.attempt_on(conn)? {
//!         Decision::Granted(grant) => format!("202 since {}", grant.granted_at),
//!         Decision::Denied(denied) => format!("429 Retry-After: {}", denied.retry_after_secs()),
//!     })
//! }
//!
//! fn geocode(pool: &PgPool, q: &str) -> Result<Option<String>, Error> {
//!     let Admission::Admitted(permit) = GEOCODER.try_acquire(pool)? else {
//!         return Ok(None); // four are in flight
//!     };
//!     let found = call_geocoder(q, permit.fencing_token()); // no connection is held meanwhile
//!     permit.release()?; // an error if it had timed out
//!     Ok(Some(found))
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
//! # Pools and connections
//!
//! Session locks, throttles, rate limits and the claims of semaphores have two forms. One takes a [`PgPool`], Diesel's r2d2 pool.
//! The other one, which ends in `_on`, takes a `&mut PgConnection`, which every other pool or wrapper lends. Transaction locks are
//! taken on the connection of their transaction. The module `asynchronous` has the same for diesel-async, with its pools deadpool
//! and bb8.
//!
//! # Outcomes and errors
//!
//! Operations that can be refused return an outcome: [`Attempt`] for locks, [`Admission`] for semaphores, [`Decision`] for
//! throttles, [`Check`] for rate limits. A refusal is not an error, and the compiler warns if you ignore an outcome. All but
//! `Attempt` also say when to retry.
//!
//! Errors are [`Error`], which converts into Diesel's, so `?` works in functions that return a
//! [`QueryResult`](diesel::QueryResult). The guide has [a section for each](crate::guide::troubleshooting).
//!
//! # Features
//!
//! - `postgres` (default): the blocking half, over libpq.
//! - `r2d2` (default): the forms of the blocking half that take a pool.
//! - `migrations` (default): the module [`migrations`].
//! - `async`: the module `asynchronous`, over diesel-async. `deadpool` and `bb8` add the forms that take such a pool.
//! - `tracing`: [events](#events).
//! - `sha2`: the lock keys of three Python packages that hash with SHA-256.
//! - `testing`: the module `testing`, for an application's own tests.
//!
//! # Events
//!
//! With the feature `tracing`, operations log events with the target `diesel_interlock`. Events that need attention are
//! logged at `WARN`, everything else at `DEBUG`. The fields are part of this crate's contract: see
//! [the reference](crate::guide::reference#events).
//!
//! # Guide
//!
//! The module [`guide`] has a tutorial, recipes, explanations and the reference, with
//! [guarantees](crate::guide::reference#guarantees), [hazards](crate::guide::reference#hazards) and a
//! [checklist for production](crate::guide::production).
//!
//! [pg]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS

// docs.rs shows with each item the feature that it needs.
#![cfg_attr(docsrs, feature(doc_cfg))]
// Without either half only keys, the schema and the queries of `monitor` can be used.
#![cfg_attr(
    not(any(feature = "postgres", feature = "async")),
    allow(dead_code, unused_imports, unused_macros)
)]

mod advisory;
#[cfg(feature = "async")]
pub mod asynchronous;
mod attempt;
#[cfg(feature = "r2d2")]
mod background;
#[cfg(any(feature = "r2d2", feature = "async", feature = "migrations"))]
mod backoff;
mod clock;
pub mod error;
mod events;
mod fence;
pub mod functions;
#[cfg(all(any(doc, doctest), feature = "r2d2", feature = "migrations"))]
pub mod guide;
mod headers;
mod input;
mod installed;
mod key;
mod lock_id;
#[cfg(feature = "migrations")]
pub mod migrations;
pub mod monitor;
mod panics;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod pollers;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod pool;
#[cfg(feature = "testing")]
mod prefix;
mod rate_limit;
#[cfg(feature = "async")]
mod runtime;
/// The tables of `resource_control`, as `diesel print-schema` writes them, for your own queries.
#[allow(missing_docs, unreachable_pub)]
pub mod schema;
mod semaphore;
mod session;

#[cfg(any(feature = "r2d2", feature = "async"))]
mod sessions;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod signal;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod throttle;
mod time;
mod transaction;

pub use crate::advisory::AdvisoryLock;
#[cfg(feature = "postgres")]
pub use crate::advisory::{AdvisoryLockGuard, BorrowedGuard, GuardConnection};
#[cfg(feature = "r2d2")]
pub use crate::advisory::{PooledGuard, Watch};
pub use crate::attempt::Attempt;
pub use crate::error::{Error, Result};
pub use crate::fence::Fence;
pub use crate::headers::Headers;
pub use crate::key::{LockId, LockKey, fnv1a};
#[cfg(feature = "r2d2")]
pub use crate::pool::{PgPool, PooledPgConnection};
#[cfg(feature = "r2d2")]
pub use crate::rate_limit::LocalRateLimit;
pub use crate::rate_limit::{
    Check, CheckAll, Limited, LimitedReason, Quota, RateLimit, RateLimitState, Reservation,
    Reserve, Spent,
};
#[cfg(feature = "r2d2")]
pub use crate::semaphore::Permit;
pub use crate::semaphore::{Admission, Claim, Full, Semaphore};
#[cfg(any(feature = "r2d2", feature = "async"))]
pub use crate::sessions::Sessions;
#[cfg(feature = "r2d2")]
pub use crate::sessions::probe_sessions;
pub use crate::throttle::{
    Decision, DeclaredResources, Denial, DenialReason, Difference, Grant, ResourceLabel, Synced,
    Throttle, ThrottledResource,
};
#[cfg(feature = "postgres")]
pub use crate::throttle::{sync, sync_intervals};

// It has code of both halves.
#[cfg(all(
    doctest,
    feature = "r2d2",
    feature = "migrations",
    feature = "deadpool"
))]
#[doc = include_str!("../README.md")]
struct Readme;
