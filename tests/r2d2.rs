//! What the crate promises, over r2d2: all of `suite`, as over deadpool, and `blocking`.

#[path = "half/blocking.rs"]
#[macro_use]
mod half;
mod support;

mod blocking;
mod suite;

/// The pool under test.
mod pool {
    use diesel::PgConnection;
    use diesel::r2d2::ConnectionManager;
    pub(crate) use diesel_interlock::{
        AdvisoryLock, AdvisoryLockGuard, Begun, Doing, Fence, Leader, LocalRateLimit, Once, Permit,
        PgPool, RateLimit, Schedule, Semaphore, Term, Throttle, Tick,
    };

    /// Whether the manager notices that a connection is marked as broken.
    pub(crate) const NOTICES_BROKEN: bool = true;

    pub(crate) fn manager(url: &str) -> ConnectionManager<PgConnection> {
        ConnectionManager::new(url)
    }
}
