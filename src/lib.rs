//! Locks, throttles, rate limits, semaphores, leaders and schedules for Diesel applications that
//! run as several instances, coordinated by the PostgreSQL that they already have.
//!
//! ```no_run
//! # use diesel::prelude::*;
//! # diesel::table! { session (id) { id -> BigInt, expires_at -> Timestamptz } }
//! use diesel_interlock::{AdvisoryLock, Attempt, Error, PgPool};
//!
//! static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly clean-up");
//!
//! fn clean_up(pool: &PgPool) -> Result<(), Error> {
//!     let Attempt::Acquired(mut guard) = NIGHTLY.try_acquire(pool)? else {
//!         return Ok(()); // another instance is at work
//!     };
//!     let expired = session::table.filter(session::expires_at.lt(diesel::dsl::now));
//!     diesel::delete(expired).execute(guard.conn())?; // on the session that holds the lock
//!     guard.release() // an error if the lock was lost meanwhile
//! }
//! ```
//!
//! With diesel-async, import the handles from `deadpool` or `bb8`, and await each call. Locks
//! need nothing installed. Everything else needs the schema `resource_control`, which
//! [`migrations::install`] creates.
//!
//! # Choosing a primitive
//!
//! | Problem | Use |
//! |---|---|
//! | Check, then write, in one transaction: a booking, "insert if absent" | [a transaction lock] |
//! | A job that spans many transactions, on one instance at a time | [`try_acquire`] of a lock |
//! | The same, but wait for the lock | [`acquire_timeout`] of a lock |
//! | Many readers, one writer | [a shared lock] |
//! | Locks on several things at once, all or none | [several locks] |
//! | At most once per interval, on any instance | [`Throttle`] |
//! | N per period on average with a bounded burst, for each key | [`RateLimit`] |
//! | The same, without a round trip for each call | [`LocalRateLimit`] |
//! | At most N at a time: calls to a fragile service | [`Semaphore`] |
//! | A long job that holds no connection; works behind a pooler | a permit that [renews itself] |
//! | One instance leads, and another takes over from it | [`Leader`] |
//! | A job at certain times, run once, and again if it crashed | [`Schedule`] |
//! | A request that a client may retry: done once, with the same response | [`Once`] |
//! | Refusing a late write of a former holder | [`Fence`] |
//! | Migrations at start-up, on many instances | [`migrations::run_pending`] |
//! | Who holds, who waits, what is due | [`monitor`] |
//! | Deleting rows that are no longer needed | [`prune`] |
//!
//! [a transaction lock]: advisory::AdvisoryLock#transaction-locks
//! [`try_acquire`]: advisory::AdvisoryLock::try_acquire
//! [`acquire_timeout`]: advisory::AdvisoryLock::acquire_timeout
//! [a shared lock]: advisory::AdvisoryLock::shared
//! [several locks]: advisory::AdvisoryLock::all
//! [`Throttle`]: throttle::Throttle
//! [`RateLimit`]: rate_limit::RateLimit
//! [`LocalRateLimit`]: rate_limit::LocalRateLimit
//! [`Semaphore`]: semaphore::Semaphore
//! [renews itself]: semaphore::Semaphore::keep_alive
//! [`Leader`]: leader::Leader
//! [`Schedule`]: schedule::Schedule
//! [`Once`]: once::Once
//! [`Fence`]: fence::Fence
//!
//! # Both halves
//!
//! The crate has a blocking and an asynchronous half with the same handles, which have the pool as
//! their type parameter. Each operation is documented once, on the page of the handle, such as
//! [`advisory::AdvisoryLock<P>`](advisory::AdvisoryLock). Your program imports an alias that fills
//! in the pool:
//!
//! - For Diesel's r2d2 pool, import from the root of the crate, for example [`AdvisoryLock`].
//!   Operations block, and return a `Result<T>`.
//! - For diesel-async's deadpool or bb8, import from the module named after the pool. Operations
//!   return a future of a `Result<T>`: await it.
//!
//! In signatures, [`Reply<'a, P, T>`](Reply) stands for both. You may drop a future at any time:
//! what it has taken is released.
//!
//! Pass the pool by reference. A reference to a wrapper works, too: `&Arc<PgPool>`, actix's
//! `&web::Data<PgPool>`, axum's `&State<PgPool>`. In methods the pool is the first argument. A free
//! function takes what it acts on first, and then the pool.
//!
//! Handles can be constants. A setting that applies to every key takes the handle by value and is a
//! `const fn`: [`shared`](advisory::AdvisoryLock::shared),
//! [`keep_alive`](semaphore::Semaphore::keep_alive), [`durable`](rate_limit::RateLimit::durable). A
//! value that changes from call to call (`key`, `details`, `cost`) borrows the handle and returns a
//! new one.
//!
//! # Outcomes and errors
//!
//! An operation that can be refused returns an outcome: [`Attempt`], [`Admission`], [`Decision`],
//! [`Check`]. A refusal is not an error, and the compiler warns if you ignore an outcome. A failure
//! is an [`Error`], which converts into Diesel's error, so `?` works in functions that return a
//! `QueryResult`.
//!
//! # Features
//!
//! - `r2d2` (default): the blocking half, over libpq. `deadpool`, `bb8`: the asynchronous half,
//!   over diesel-async.
//! - `migrations` (default): the module [`migrations`].
//! - `tracing`: an event for each operation, with the target `diesel_interlock`.
//! - `metrics`: counters, histograms and gauges, through the facade crate `metrics`. See
//!   `describe_metrics`.
//! - `http`: the header fields of a [`Check`] as an `http::HeaderMap`.
//! - `serde`: `Serialize` for the rows of [`monitor`].
//! - `testing`: the module `testing`, for an application's own tests.

#![cfg_attr(docsrs, feature(doc_cfg))]
// Crates that are generic over pools, as the layers for tower, take the feature `async` alone.
#![cfg_attr(
    not(any(feature = "r2d2", feature = "deadpool", feature = "bb8")),
    allow(dead_code, unreachable_pub)
)]

#[cfg(not(any(feature = "r2d2", feature = "async")))]
compile_error!(
    "enable the feature of the pool that your program uses: `r2d2`, `deadpool` or `bb8`"
);

pub mod advisory;
mod alarm;
mod call;
mod drain;
mod error;
mod event;
mod exclusion;
pub mod fence;
mod input;
mod instance;
mod key;
pub mod leader;
mod lease;
mod long_wait;
mod metrics;
#[cfg(feature = "migrations")]
pub mod migrations;
mod mode;
pub mod monitor;
pub mod once;
mod pool;
pub mod prune;
pub mod rate_limit;
pub mod schedule;
#[allow(missing_docs, unreachable_pub)]
pub mod schema;
pub mod semaphore;
mod session;
/// The supertrait of traits that only this crate implements.
mod sealed {
    #[allow(unnameable_types, unreachable_pub)]
    pub trait Sealed {}
}
mod statement;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
pub mod throttle;
mod transaction;
mod unfinished;
mod waiting;

pub use self::advisory::Attempt;
pub use self::alarm::Stop;
#[cfg(feature = "r2d2")]
pub use self::drain::drain;
pub use self::error::{Error, Result};
pub use self::exclusion::check_exclusion;
pub use self::key::{LockId, LockKey};
#[cfg(feature = "metrics")]
pub use self::metrics::describe_metrics;
#[cfg(feature = "r2d2")]
pub use self::mode::Blocking;
pub use self::mode::Mode;
#[cfg(feature = "async")]
pub use self::mode::{Async, Operation};
pub use self::once::Done;
#[cfg(feature = "r2d2")]
pub use self::pool::PgPool;
pub use self::pool::{ConnectionOf, Pool, PoolConnection, Reply};
pub use self::rate_limit::{Check, LocalCheck, Quota};
pub use self::semaphore::{Admission, Full};
pub use self::throttle::{Decision, DeclaredResources, ThrottledResource};

/// Makes the aliases of one pool: each handle, with the `PgPool` in scope as its parameter. Each
/// alias has a `cfg` of its own, so that rustc names the feature when a program uses an alias
/// without it.
macro_rules! handles {
    ($feature:literal, $reply:literal) => {
        handles! {
            $feature, $reply:
            /// A lock that one holder has at a time, or that several share.
            advisory::AdvisoryLock,
            /// A held session lock (or several), with the connection whose session holds it.
            advisory::AdvisoryLockGuard,
            /// Refuses transactions of earlier holders, by their fencing tokens.
            fence::Fence,
            /// A leader election: one leader among all instances.
            leader::Leader,
            /// The term of a leader: its leadership from one election until its end.
            leader::Term,
            /// What [`Once::begin`](crate::once::Once::begin) has found.
            once::Begun,
            /// The transaction of work that is done once, which a handler keeps.
            once::Doing,
            /// Work that is done once for each key, such as a request with an idempotency key.
            once::Once,
            /// A rate limit that decides in memory, from chunks of units that it takes from the
            /// database.
            rate_limit::LocalRateLimit,
            /// A limit of N units per period for each key, with a bounded burst.
            rate_limit::RateLimit,
            /// A throttle: granted at most once per interval, over all instances.
            throttle::Throttle,
            /// A schedule: each of its ticks runs once, on one instance.
            schedule::Schedule,
            /// A tick of a schedule, while it runs.
            schedule::Tick,
            /// A permit of a semaphore: it holds a slot of the service, and no connection.
            semaphore::Permit,
            /// A semaphore: at most N permits of a service at a time.
            semaphore::Semaphore,
        }
    };
    (
        $feature:literal, $reply:literal:
        $($(#[$summary:meta])* $module:ident::$name:ident,)*
    ) => {
        $(
            #[cfg(feature = $feature)]
            $(#[$summary])*
            #[doc = ""]
            #[doc = concat!(
                "See [`", stringify!($module), "::", stringify!($name), "`](crate::",
                stringify!($module), "::", stringify!($name),
                ") for an example, the rules and the errors. ", $reply,
                "\n\nThis alias is of the pool with Diesel's own manager. For a manager of your own, \
                 name the pool: `", stringify!($module), "::", stringify!($name), "<MyPool>`. With \
                 any other pool, use the operations that take a connection."
            )]
            pub type $name = crate::$module::$name<PgPool>;
        )*
    };
}

handles!(
    "r2d2",
    "With this pool, operations block: a `Reply<'_, P, T>` is a `Result<T>`."
);

/// The handles for diesel-async with deadpool. Every operation is a future: await it.
#[cfg(feature = "deadpool")]
pub mod deadpool {
    pub use crate::drain::drain_async as drain;
    pub use crate::pool::DeadPool as PgPool;

    handles!(
        "deadpool",
        "With this pool, a `Reply<'_, P, T>` is a future of a `Result<T>`: await it."
    );
}

/// The handles for diesel-async with bb8. Every operation is a future: await it.
#[cfg(feature = "bb8")]
pub mod bb8 {
    pub use crate::drain::drain_async as drain;
    pub use crate::pool::Bb8Pool as PgPool;

    handles!(
        "bb8",
        "With this pool, a `Reply<'_, P, T>` is a future of a `Result<T>`: await it."
    );
}

/// Compiles and runs the programs of the README and of `docs/` as doctests.
#[cfg(all(
    doctest,
    feature = "r2d2",
    feature = "deadpool",
    feature = "metrics",
    feature = "migrations",
    feature = "testing"
))]
mod pages {
    macro_rules! pages {
        ($($name:ident $path:literal,)*) => {
            $(#[doc = include_str!(concat!("../", $path))]
            struct $name;)*
        };
    }

    pages! {
        Readme "README.md",
        Bookings "docs/bookings.md",
        Deployment "docs/deployment.md",
        Errors "docs/errors.md",
        Failover "docs/failover.md",
        Faq "docs/faq.md",
        FragileService "docs/fragile-service.md",
        Idempotency "docs/idempotency.md",
        Interop "docs/interop.md",
        Jobs "docs/jobs.md",
        Leader "docs/leader.md",
        Limits "docs/limits.md",
        Metrics "docs/metrics.md",
        Operating "docs/operating.md",
        Poolers "docs/poolers.md",
        Pools "docs/pools.md",
        Reference "docs/reference.md",
        Schedules "docs/schedules.md",
        SeveralLocks "docs/several-locks.md",
        Testing "docs/testing.md",
    }
}
