//! What the crate promises, over bb8. `suite` is compiled over r2d2 and deadpool, too, and `asynchronous` over deadpool.

#[path = "half/asynchronous.rs"]
#[macro_use]
mod half;
mod support;

mod asynchronous;
mod suite;

/// The pool under test.
mod pool {
    use std::time::Duration;

    use diesel_async::AsyncPgConnection;
    use diesel_async::pooled_connection::AsyncDieselConnectionManager;
    pub(crate) use diesel_interlock::bb8::*;

    /// A pool of at most `size` connections, from which a check-out waits for at most `patience`.
    pub(crate) fn make(url: &str, size: u32, patience: Duration) -> PgPool {
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        PgPool::builder()
            .max_size(size)
            .connection_timeout(patience)
            .build_unchecked(manager)
    }

    pub(crate) fn max_size(pool: &PgPool) -> u32 {
        // bb8 does not tell.
        pool.state().connections.max(1)
    }

    /// A pool that does not check its connections.
    pub(crate) fn unchecked(database: &workbench::Endpoint, size: u32) -> PgPool {
        database.bb8(size)
    }

    /// Whether a connection leaves the pool whose check was dropped and has no reply.
    pub(crate) const ENDS_DROPPED_CHECKS: bool = false;

    /// Takes a connection.
    pub(crate) async fn get(
        pool: &PgPool,
    ) -> impl std::ops::DerefMut<Target = AsyncPgConnection> + use<> {
        pool.get_owned().await.expect("the pool has a connection")
    }
}
