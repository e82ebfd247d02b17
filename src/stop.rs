//! What ends a loop that blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::alarm::Sleepers;
use crate::mode::Mode;

/// Ends the loops that it was given to: [`Leader::lead`](crate::leader::Leader::lead) and
/// [`Schedule::run`](crate::schedule::Schedule::run) of the blocking half. Clones are one.
///
/// ```
/// let stop = diesel_interlock::Stop::new();
/// let on_signal = stop.clone(); // for the handler of SIGTERM
/// on_signal.stop();
/// assert!(stop.is_stopped());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<(AtomicBool, Sleepers)>);

impl Stop {
    /// Makes one that is not stopped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops the loops, for ever. Their pauses end at once, and their work when it looks.
    pub fn stop(&self) {
        let (is_stopped, sleepers) = &*self.0;
        is_stopped.store(true, Ordering::SeqCst);
        sleepers.wake();
    }

    /// Returns whether it was stopped.
    pub fn is_stopped(&self) -> bool {
        self.0.0.load(Ordering::SeqCst)
    }

    pub(crate) fn sleepers(&self) -> &Sleepers {
        &self.0.1
    }

    /// Pauses until it is stopped, for at most so long.
    pub(crate) async fn pause<M: Mode>(&self, pause: Duration) {
        let sleeper = self.sleepers().join(Instant::now() + pause);
        if !self.is_stopped() {
            M::sleep(&sleeper.alarm, None).await;
        }
    }
}
