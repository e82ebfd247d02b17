//! What the crate promises, over deadpool: all of `suite`, as over r2d2, and all of `asynchronous`.
//! `bb8.rs` runs a part of both.

#[path = "half/asynchronous.rs"]
#[macro_use]
mod half;
mod support;

mod asynchronous;
mod suite;

/// The pool under test.
mod pool {
    use std::time::{Duration, Instant};

    use diesel_async::AsyncPgConnection;
    use diesel_async::pooled_connection::AsyncDieselConnectionManager;
    pub(crate) use diesel_interlock::deadpool::*;

    /// A pool of at most `size` connections, from which a check-out waits for at most `patience`.
    pub(crate) fn make(url: &str, size: u32, patience: Duration) -> PgPool {
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        PgPool::builder(manager)
            .max_size(size as usize)
            .wait_timeout(Some(patience))
            .runtime(deadpool::Runtime::Tokio1)
            .build()
            .expect("the settings of the pool are complete")
    }

    pub(crate) fn max_size(pool: &PgPool) -> u32 {
        pool.status().max_size as u32
    }

    /// A pool that does not check its connections.
    pub(crate) fn unchecked(database: &workbench::Endpoint, size: u32) -> PgPool {
        database.deadpool(size)
    }

    /// Whether a connection leaves the pool whose check was dropped and has no reply.
    pub(crate) const ENDS_DROPPED_CHECKS: bool = true;

    /// Takes a connection.
    pub(crate) async fn get(
        pool: &PgPool,
    ) -> impl std::ops::DerefMut<Target = AsyncPgConnection> + use<> {
        // Which may be impatient, and slow.
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            match pool.get().await {
                Err(_) if Instant::now() < end => {}
                got => return got.expect("the pool has a connection"),
            }
        }
    }
}
