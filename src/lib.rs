//! Locks, throttles, rate limits, semaphores, leaders and schedules for Diesel applications that run as several instances,
//! coordinated by the PostgreSQL that they already have.
//!
//! Locks need nothing installed. Everything else needs the schema `resource_control`, which [`migrations::install`] creates.
//!
//! # Choosing a primitive
//!
//! | Problem | Use |
//! |---|---|
//! | Check, then write, in one transaction: a booking, "insert if absent" | [`AdvisoryLock::transaction`](advisory::AdvisoryLock) |
//! | A job that spans many transactions, on one instance at a time | [`AdvisoryLock::try_acquire`](advisory::AdvisoryLock::try_acquire) |
//! | The same, waiting for the lock | [`AdvisoryLock::acquire_timeout`](advisory::AdvisoryLock::acquire_timeout) |
//! | Many readers, one writer | [`AdvisoryLock::shared`](advisory::AdvisoryLock::shared) |
//! | Several things at once, all or none | [`AdvisoryLock::all`](advisory::AdvisoryLock::all) |
//! | At most once per interval, on any instance | [`Throttle`](throttle::Throttle) |
//! | N per period on average with a bounded burst, for each key | [`RateLimit`](rate_limit::RateLimit) |
//! | The same, without a round trip for each call | [`LocalRateLimit`](rate_limit::LocalRateLimit) |
//! | At most N at a time: calls to a fragile service | [`Semaphore`](semaphore::Semaphore) |
//! | A long job that holds no connection, also behind a pooler | a [`Semaphore`](semaphore::Semaphore) of one slot, with [`keep_alive`](semaphore::Semaphore::keep_alive) |
//! | One instance leads, and hands over | [`Leader`](leader::Leader) |
//! | A job at certain times, once, and again if it crashed | [`Schedule`](schedule::Schedule) |
//! | A request that a client may repeat, done once and replied to alike | [`Once`](once::Once) |
//! | A late write of a former holder, which must be refused | [`Fence`](fence::Fence) |
//! | Migrations at start-up, on many instances | [`migrations::run_pending`] |
//! | Who holds, who waits, what is due | [`monitor`] |
//!
//! # Both halves
//!
//! Each operation is documented once, on a handle whose parameter is the program's pool. Programs import an alias of the handle:
//!
//! - for Diesel's r2d2 pool from this module, such as [`AdvisoryLock`]: operations block, and return what they are documented to return;
//! - for diesel-async's deadpool or bb8 from the module of that name: operations are futures, and are awaited.
//!
//! Where an operation is documented to return `Reply<'a, P, T>`, that is a `T` in the first case and a future of a `T` in the second. A
//! future may be dropped at any time: what it has taken is released.
//!
//! A wrapper of a pool is lent as it is: `&Arc<PgPool>`, actix's `&web::Data<PgPool>`, axum's `&State<PgPool>`.
//!
//! # Outcomes and errors
//!
//! An operation that can be refused returns an outcome: [`Attempt`], [`Admission`], [`Decision`], [`Check`]. A refusal is no error, and
//! the compiler warns if an outcome is ignored. Errors are [`Error`], which converts into Diesel's, so `?` works in functions that
//! return a `QueryResult`.
//!
//! # Features
//!
//! - `r2d2` (default): the blocking half, over libpq. `deadpool`, `bb8`: the asynchronous half, over diesel-async.
//! - `migrations` (default): the module [`migrations`].
//! - `tracing`: an event for each operation, with the target `diesel_interlock`.
//! - `metrics`: its numbers, for the facade of that name. See `describe_metrics`.
//! - `testing`: the module `testing`, for an application's own tests.

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
#[cfg_attr(not(feature = "metrics"), path = "metrics/off.rs")]
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
mod statement;
mod stop;
mod subject;
#[cfg(feature = "testing")]
pub mod testing;
pub mod throttle;
mod time;
mod transaction;
mod waiting;

pub use self::advisory::Attempt;
pub use self::error::{Error, Result};
pub use self::exclusion::check_exclusion;
pub use self::key::{LockId, LockKey};
#[cfg(feature = "metrics")]
pub use self::metrics::describe_metrics;
#[cfg(feature = "r2d2")]
pub use self::mode::Blocking;
#[cfg(feature = "async")]
pub use self::mode::{Async, Running};
pub use self::mode::{Mode, drain};
pub use self::once::Done;
#[cfg(feature = "r2d2")]
pub use self::pool::PgPool;
pub use self::pool::{Connection, Pool, PoolConnection, Reply};
pub use self::rate_limit::{Check, CheckAll, LocalCheck, Quota};
pub use self::semaphore::{Admission, Full};
pub use self::stop::Stop;
pub use self::throttle::{Decision, DeclaredResources, ThrottledResource};

/// The handles of the pool of a feature: types of the same names, whose parameter is the pool `PgPool` in scope. The feature stands
/// at each, so that rustc names it where one is missing.
macro_rules! handles {
    ($feature:literal) => {
        handles! {
            $feature:
            advisory::AdvisoryLock,
            advisory::AdvisoryLockGuard,
            fence::Fence,
            leader::Leader,
            leader::Term,
            once::Once,
            rate_limit::LocalRateLimit,
            rate_limit::RateLimit,
            throttle::Throttle,
            schedule::Schedule,
            schedule::Tick,
            semaphore::Permit,
            semaphore::Semaphore,
        }
    };
    ($feature:literal: $($module:ident::$name:ident,)*) => {
        $(
            #[cfg(feature = $feature)]
            #[doc = concat!("[`", stringify!($name), "`](crate::", stringify!($module), "::", stringify!($name), ") over the `PgPool` of this module.")]
            pub type $name = crate::$module::$name<PgPool>;
        )*
    };
}

handles!("r2d2");

/// The handles of programs that use diesel-async with deadpool. What is documented to return `T` returns a future of it.
#[cfg(feature = "deadpool")]
pub mod deadpool {
    pub use crate::pool::DeadPool as PgPool;

    handles!("deadpool");
}

/// The handles of programs that use diesel-async with bb8. What is documented to return `T` returns a future of it.
#[cfg(feature = "bb8")]
pub mod bb8 {
    pub use crate::pool::Bb8Pool as PgPool;

    handles!("bb8");
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
        Failover "docs/failover.md",
        FragileService "docs/fragile-service.md",
        Idempotency "docs/idempotency.md",
        Interop "docs/interop.md",
        Jobs "docs/jobs.md",
        Leader "docs/leader.md",
        Limits "docs/limits.md",
        Metrics "docs/metrics.md",
        Operating "docs/operating.md",
        Poolers "docs/poolers.md",
        Reference "docs/reference.md",
        Schedules "docs/schedules.md",
        SeveralLocks "docs/several-locks.md",
        Testing "docs/testing.md",
    }
}
