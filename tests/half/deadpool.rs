//! Pools of deadpool. Which manager, the crate's `pool` says.

use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;

use crate::pool::{PgPool, manager};

/// A pool of at most `size` connections, from which a check-out waits for at most `patience`.
pub(crate) fn make(url: &str, size: u32, patience: Duration) -> PgPool {
    PgPool::builder(manager(url))
        .max_size(size as usize)
        .wait_timeout(Some(patience))
        .runtime(deadpool::Runtime::Tokio1)
        .build()
        .expect("the settings of the pool are complete")
}

pub(crate) fn max_size(pool: &PgPool) -> u32 {
    pool.status().max_size as u32
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
