//! Another server, which hangs at times. Operations there must not delay operations on the first server.

use std::thread;
use std::time::Duration;

use diesel_interlock::{AdvisoryLock, Error, LockKey, PgPool};

use crate::worker::instructions::is_resting;

/// Watches a lock on that server repeatedly. No result is expected.
pub(super) fn work(pool: &PgPool) {
    let lock = AdvisoryLock::new(LockKey::pair(79, std::process::id() as i32));
    while !is_resting() {
        let _ = watch_there(&lock, pool);
        thread::sleep(Duration::from_millis(20));
    }
}

fn watch_there(lock: &AdvisoryLock, pool: &PgPool) -> Result<(), Error> {
    if let Some(mut guard) = lock.try_acquire(pool)?.acquired() {
        let _watch = guard.watch(pool, Duration::from_millis(10))?;
        thread::sleep(Duration::from_millis(300));
        guard.release()?;
    }
    Ok(())
}
