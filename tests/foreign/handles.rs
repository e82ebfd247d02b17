//! Aliases of the handles for a pool whose manager is the application's own.

macro_rules! handles {
    ($pool:ty: $($module:ident::$name:ident)*) => {
        pub(crate) type PgPool = $pool;
        $(#[allow(dead_code)] // each test crate uses only some of them
        pub(crate) type $name = diesel_interlock::$module::$name<PgPool>;)*
    };
    ($pool:ty) => {
        handles!($pool:
            advisory::AdvisoryLock advisory::AdvisoryLockGuard fence::Fence leader::Leader leader::Term
            once::Begun once::Doing once::Once rate_limit::LocalRateLimit rate_limit::RateLimit schedule::Schedule
            schedule::Tick semaphore::Permit semaphore::Semaphore throttle::Throttle);
    };
}
