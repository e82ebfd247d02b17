//! What the crate promises, over deadpool: all of `suite`, as over r2d2, and all of `asynchronous`.
//! `bb8.rs` runs a part of both.

#[path = "half/asynchronous.rs"]
#[macro_use]
mod half;
#[path = "half/deadpool.rs"]
mod over;
mod support;

mod asynchronous;
mod suite;

/// The pool under test.
mod pool {
    use diesel_async::AsyncPgConnection;
    use diesel_async::pooled_connection::AsyncDieselConnectionManager;
    pub(crate) use diesel_interlock::deadpool::*;

    pub(crate) use crate::over::*;

    /// Whether the manager notices that a connection is marked as broken.
    pub(crate) const NOTICES_BROKEN: bool = true;

    pub(crate) fn manager(url: &str) -> AsyncDieselConnectionManager<AsyncPgConnection> {
        AsyncDieselConnectionManager::new(url)
    }

    /// A pool that does not check its connections.
    pub(crate) fn unchecked(database: &workbench::Endpoint, size: u32) -> PgPool {
        database.deadpool(size)
    }
}
