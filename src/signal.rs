//! A flag that a thread or a task waits for.

#[cfg(feature = "r2d2")]
use std::sync::Condvar;
use std::sync::Mutex;
use std::time::Duration;

#[cfg(feature = "async")]
use tokio::sync::Notify;

use crate::panics::lock;
#[cfg(feature = "r2d2")]
use crate::panics::unpoisoned;

#[derive(Debug, Default)]
pub(crate) struct Signal {
    is_set: Mutex<bool>,
    /// Wakes threads.
    #[cfg(feature = "r2d2")]
    changed: Condvar,
    /// Wakes tasks.
    #[cfg(feature = "async")]
    notified: Notify,
}

impl Signal {
    /// Sets the flag, but does not [wake](Self::wake) those that wait already.
    pub(crate) fn set(&self) {
        *lock(&self.is_set) = true;
    }

    /// Wakes all that wait. Not under a lock, because the waker of a task is code of its runtime.
    pub(crate) fn wake(&self) {
        #[cfg(feature = "r2d2")]
        self.changed.notify_all();
        #[cfg(feature = "async")]
        self.notified.notify_waiters();
    }

    pub(crate) fn is_set(&self) -> bool {
        *lock(&self.is_set)
    }

    /// Returns whether the flag was set. Afterwards it is not.
    pub(crate) fn take(&self) -> bool {
        std::mem::take(&mut *lock(&self.is_set))
    }

    /// Blocks the thread until the flag is set, for at most `limit`.
    #[cfg(feature = "r2d2")]
    pub(crate) fn wait(&self, limit: Duration) {
        let is_set = lock(&self.is_set);
        let waited = self
            .changed
            .wait_timeout_while(is_set, limit, |is_set| !*is_set);
        drop(unpoisoned(waited));
    }

    /// Waits until the flag is set, for at most `limit`.
    #[cfg(feature = "async")]
    pub(crate) async fn awaited(&self, limit: Duration) {
        let set = async {
            // A notification after this line is not missed.
            let notified = self.notified.notified();
            if !self.is_set() {
                notified.await;
            }
        };
        let _ = tokio::time::timeout(limit, set).await;
    }
}
