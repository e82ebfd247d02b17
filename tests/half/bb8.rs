//! Pools of bb8. Which manager, the crate's `pool` says.

use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;

use crate::pool::{PgPool, manager};

/// A pool of at most `size` connections, from which a check-out waits for at most `patience`.
pub(crate) fn make(url: &str, size: u32, patience: Duration) -> PgPool {
    PgPool::builder()
        .max_size(size)
        .connection_timeout(patience)
        .build_unchecked(manager(url))
}

pub(crate) fn max_size(pool: &PgPool) -> u32 {
    // bb8 does not tell.
    pool.state().connections.max(1)
}

/// Whether a connection leaves the pool whose check was dropped and has no reply.
#[allow(dead_code)] // `silence` does not run over every manager
pub(crate) const ENDS_DROPPED_CHECKS: bool = false;

/// Takes a connection.
pub(crate) async fn get(
    pool: &PgPool,
) -> impl std::ops::DerefMut<Target = AsyncPgConnection> + use<> {
    // Which may be impatient, and slow.
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match pool.get_owned().await {
            Err(_) if Instant::now() < end => {}
            got => return got.expect("the pool has a connection"),
        }
    }
}
