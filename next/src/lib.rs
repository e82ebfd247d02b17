//! Locks, throttles, rate limits and semaphores for Diesel applications, coordinated by the PostgreSQL that they already run.

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
mod key;
pub mod leader;
#[cfg(feature = "migrations")]
pub mod migrations;
mod mode;
pub mod monitor;
mod pool;
pub mod rate_limit;
pub mod schedule;
#[allow(missing_docs, unreachable_pub)]
pub mod schema;
pub mod semaphore;
mod session;
mod statement;
mod stop;
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
#[cfg(feature = "r2d2")]
pub use self::mode::Blocking;
pub use self::mode::Mode;
#[cfg(feature = "async")]
pub use self::mode::{Async, Running};
#[cfg(feature = "r2d2")]
pub use self::pool::PgPool;
pub use self::pool::{Connection, Pool, PoolConnection, Reply};
pub use self::rate_limit::{Check, CheckAll, LocalCheck, Quota};
pub use self::semaphore::{Admission, Full};
pub use self::stop::Stop;
pub use self::throttle::{Decision, DeclaredResources, ThrottledResource};

/// The handles of a pool: types of the same names, whose parameter is the pool `PgPool` in scope.
macro_rules! handles {
    () => {
        handle!(advisory::AdvisoryLock);
        handle!(advisory::AdvisoryLockGuard);
        handle!(fence::Fence);
        handle!(leader::Leader);
        handle!(rate_limit::LocalRateLimit);
        handle!(rate_limit::RateLimit);
        handle!(throttle::Throttle);
        handle!(schedule::Schedule);
        handle!(semaphore::Permit);
        handle!(semaphore::Semaphore);
    };
}

/// One of them.
macro_rules! handle {
    ($module:ident::$name:ident) => {
        #[doc = concat!("See [the definition](crate::", stringify!($module), "::", stringify!($name), ").")]
        pub type $name = crate::$module::$name<PgPool>;
    };
}

#[cfg(feature = "r2d2")]
handles!();

/// The handles of programs that use diesel-async with deadpool. What is documented to return `T` returns a future of it.
#[cfg(feature = "deadpool")]
pub mod deadpool {
    pub use crate::pool::DeadPool as PgPool;

    handles!();
}

/// The handles of programs that use diesel-async with bb8. What is documented to return `T` returns a future of it.
#[cfg(feature = "bb8")]
pub mod bb8 {
    pub use crate::pool::Bb8Pool as PgPool;

    handles!();
}
