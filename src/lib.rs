//! Locks, throttles, rate limits, semaphores, leaders and schedules for Diesel applications that
//! run as several instances, coordinated by the PostgreSQL that they already have.
//!
//! Locks need nothing installed. Everything else needs the schema `resource_control`, which
//! [`migrations::install`] creates.
//!
//! # Choosing a primitive
//!
//! | Problem | Use |
//! |---|---|
//! | Check, then write, in one transaction: a booking, "insert if absent" | [a transaction lock] |
//! | A job that spans many transactions, on one instance at a time | [`try_acquire`] of a lock |
//! | The same, waiting for the lock | [`acquire_timeout`] of a lock |
//! | Many readers, one writer | [a shared lock] |
//! | Several things at once, all or none | [several locks] |
//! | At most once per interval, on any instance | [`Throttle`] |
//! | N per period on average with a bounded burst, for each key | [`RateLimit`] |
//! | The same, without a round trip for each call | [`LocalRateLimit`] |
//! | At most N at a time: calls to a fragile service | [`Semaphore`] |
//! | A long job that holds no connection, also behind a pooler | a permit that [renews itself] |
//! | One instance leads, and hands over | [`Leader`] |
//! | A job at certain times, once, and again if it crashed | [`Schedule`] |
//! | A request that a client may repeat, done once and replied to alike | [`Once`] |
//! | A late write of a former holder, which must be refused | [`Fence`] |
//! | Migrations at start-up, on many instances | [`migrations::run_pending`] |
//! | Who holds, who waits, what is due | [`monitor`] |
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
//! Each operation is documented once, on a handle whose parameter is the program's pool. Programs
//! import an alias of the handle:
//!
//! - for Diesel's r2d2 pool from this module, such as [`AdvisoryLock`]: operations block, and
//!   return a `Result<T>`;
//! - for diesel-async's deadpool or bb8 from the module named after the pool: operations are
//!   futures of a `Result<T>`, and are awaited.
//!
//! [`Reply<'a, P, T>`](Reply) stands for both. A future may be dropped at any time: what it has
//! taken is released.
//!
//! A pool is given by reference, and so is a wrapper: `&Arc<PgPool>`, actix's `&web::Data<PgPool>`,
//! axum's `&State<PgPool>`. It comes first, and then what the operation needs beside it; a function
//! that is no method takes what it is about before the pool.
//!
//! Handles are constants. Settings that hold for all keys consume the handle, so they are `const`
//! ([`shared`](advisory::AdvisoryLock::shared), [`keep_alive`](semaphore::Semaphore::keep_alive),
//! [`durable`](rate_limit::RateLimit::durable)). Values of a call borrow it and return another one
//! (`key`, `details`, `cost`).
//!
//! # Outcomes and errors
//!
//! An operation that can be refused returns an outcome: [`Attempt`], [`Admission`], [`Decision`],
//! [`Check`]. A refusal is no error, and the compiler warns if an outcome is ignored. Errors are
//! [`Error`], which converts into Diesel's, so `?` works in functions that return a `QueryResult`.
//!
//! # Features
//!
//! - `r2d2` (default): the blocking half, over libpq. `deadpool`, `bb8`: the asynchronous half,
//!   over diesel-async.
//! - `migrations` (default): the module [`migrations`].
//! - `tracing`: an event for each operation, with the target `diesel_interlock`.
//! - `metrics`: its numbers, for the facade of that name. See `describe_metrics`.
//! - `serde`: the rows of [`monitor`] can be serialized.
//! - `testing`: the module `testing`, for an application's own tests.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(not(any(feature = "r2d2", feature = "async")))]
compile_error!(
    "enable the feature of the pool that your program uses: `r2d2`, `deadpool` or `bb8`"
);

pub mod advisory;
mod alarm;
mod call;
mod error;
mod event;
mod exclusion;
pub mod fence;
pub mod functions;
mod input;
mod instance;
mod key;
pub mod leader;
mod lease;
mod metrics;
#[cfg(feature = "migrations")]
pub mod migrations;
mod mode;
pub mod monitor;
pub mod once;
mod pool;
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
#[cfg(feature = "testing")]
pub mod testing;
pub mod throttle;
mod transaction;
mod waiting;

pub use self::advisory::Attempt;
pub use self::alarm::Stop;
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
pub use self::pool::{Connection, Pool, PoolConnection, Reply, drain};
pub use self::rate_limit::{Check, CheckAll, LocalCheck, Quota};
pub use self::semaphore::{Admission, Full};
pub use self::throttle::{Decision, DeclaredResources, ThrottledResource};

/// The handles of the pool of a feature: types of the same names, whose parameter is the pool
/// `PgPool` in scope. The feature stands at each, so that rustc names it where one is missing.
macro_rules! handles {
    ($feature:literal, $reply:literal) => {
        handles! {
            $feature, $reply:
            /// A lock that one holder has at a time, or several share.
            advisory::AdvisoryLock,
            /// A held session lock, or several, with the connection whose session holds it.
            advisory::AdvisoryLockGuard,
            /// Refuses the transactions of earlier holders.
            fence::Fence,
            /// An election of one leader among all instances.
            leader::Leader,
            /// A term of a leader.
            leader::Term,
            /// Work that is done once for each key: a request with an idempotency key.
            once::Once,
            /// A rate limit that decides in memory, out of chunks that it takes from the database.
            rate_limit::LocalRateLimit,
            /// A limit of N units per period for each key, and a burst of them at once.
            rate_limit::RateLimit,
            /// What is granted at most once per interval, on any instance.
            throttle::Throttle,
            /// A schedule, each of whose ticks runs once, on one instance.
            schedule::Schedule,
            /// A tick of a schedule that runs.
            schedule::Tick,
            /// A permit of a semaphore: a slot of its service, and no connection.
            semaphore::Permit,
            /// At most N permits at a time for a service.
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
                "The page of [`", stringify!($module), "::", stringify!($name), "`](crate::",
                stringify!($module), "::", stringify!($name),
                ") has an example, the rules and the errors. ", $reply
            )]
            pub type $name = crate::$module::$name<PgPool>;
        )*
    };
}

handles!(
    "r2d2",
    "Over this pool an operation blocks, and a `Reply<'_, P, T>` is a `Result<T>`."
);

/// The handles of programs that use diesel-async with deadpool. Their operations are futures: await
/// them.
#[cfg(feature = "deadpool")]
pub mod deadpool {
    pub use crate::pool::DeadPool as PgPool;

    handles!(
        "deadpool",
        "Over this pool a `Reply<'_, P, T>` is a future of a `Result<T>`: await it."
    );
}

/// The handles of programs that use diesel-async with bb8. Their operations are futures: await
/// them.
#[cfg(feature = "bb8")]
pub mod bb8 {
    pub use crate::pool::Bb8Pool as PgPool;

    handles!(
        "bb8",
        "Over this pool a `Reply<'_, P, T>` is a future of a `Result<T>`: await it."
    );
}

/// The programs of the README and of `docs/`.
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
