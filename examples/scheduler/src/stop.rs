//! A pause that ends when the program is to end.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Whether the program is to end. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<(Mutex<bool>, Condvar)>);

impl Stop {
    /// Ends every pause, now and from now on.
    pub fn now(&self) {
        let (stopped, changed) = &*self.0;
        *stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
    }

    /// Waits that long at most, and returns whether the program is to end.
    pub fn within(&self, pause: Duration) -> bool {
        let (stopped, changed) = &*self.0;
        let stopped = stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let (stopped, _) = changed
            .wait_timeout_while(stopped, pause, |stopped| !*stopped)
            .unwrap_or_else(PoisonError::into_inner);
        *stopped
    }
}
