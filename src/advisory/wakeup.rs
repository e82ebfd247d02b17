//! What wakes a thread or a task that waits for a session lock.

use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "r2d2")]
use std::sync::{Condvar, MutexGuard};
#[cfg(feature = "r2d2")]
use std::time::Duration;

#[cfg(feature = "async")]
use tokio::sync::Notify;

/// Wakes a thread or a task.
#[derive(Debug, Default)]
pub(super) struct Wakeup {
    is_pending: AtomicBool,
    #[cfg(feature = "r2d2")]
    thread: Condvar,
    #[cfg(feature = "async")]
    task: Notify,
}

impl Wakeup {
    /// Only while the budget is locked, because a thread that is about to wait on it must not miss this.
    pub(super) fn wake(&self) {
        self.is_pending.store(true, Ordering::Relaxed);
        #[cfg(feature = "r2d2")]
        self.thread.notify_one();
        #[cfg(feature = "async")]
        self.task.notify_one();
    }

    pub(super) fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Relaxed)
    }

    /// Returns whether it was pending. Afterwards it is not.
    pub(super) fn take(&self) -> bool {
        self.is_pending.swap(false, Ordering::Relaxed)
    }

    /// Blocks the thread while `waits` returns true, for at most `limit`. Calls it again after each wake-up.
    #[cfg(feature = "r2d2")]
    pub(super) fn block_while<T>(
        &self,
        budget: MutexGuard<'_, T>,
        limit: Duration,
        waits: impl FnMut(&mut T) -> bool,
    ) {
        drop(self.thread.wait_timeout_while(budget, limit, waits));
    }

    /// Ends at the next wake-up of the task. One that came before is not missed.
    #[cfg(feature = "async")]
    pub(super) async fn notified(&self) {
        self.task.notified().await;
    }
}
