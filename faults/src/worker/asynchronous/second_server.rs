//! Another server, which hangs at times. Operations there must not delay operations on the first server.

use std::time::Duration;

use diesel_interlock::asynchronous::AdvisoryLock;
use diesel_interlock::{Error, LockKey};
use tokio::time::sleep;

use super::pools::AnyPool;
use crate::worker::instructions::is_resting;

/// Watches a lock on that server repeatedly. No result is expected.
pub(super) async fn work(pool: AnyPool) {
    let lock = AdvisoryLock::new(LockKey::pair(79, std::process::id() as i32));
    while !is_resting() {
        let _ = watch_there(&lock, &pool).await;
        sleep(Duration::from_millis(20)).await;
    }
}

async fn watch_there(lock: &AdvisoryLock, pool: &AnyPool) -> Result<(), Error> {
    if let Some(mut guard) = lock.try_acquire(pool).await?.acquired() {
        let _watch = guard.watch(pool, Duration::from_millis(10)).await?;
        sleep(Duration::from_millis(300)).await;
        guard.release().await?;
    }
    Ok(())
}
