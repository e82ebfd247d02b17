//! Round trips that take units. Calls for the same key wait for one that takes enough for them, too.

#[cfg(feature = "r2d2")]
use std::sync::Condvar;
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[cfg(feature = "async")]
use tokio::sync::Notify;

use super::keys::Keys;
use crate::panics::lock;
#[cfg(feature = "r2d2")]
use crate::panics::unpoisoned;

/// How long a call waits for another one, which may itself wait for a connection, before it takes units for itself.
const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// A call that takes units. Dropping it ends the wait of the others.
#[derive(Debug)]
pub(super) struct Taking {
    keys: Arc<Mutex<Keys>>,
    key: Arc<str>,
    completion: Arc<Completion>,
}

/// What other calls know of one that takes units.
#[derive(Debug)]
pub(super) struct Announced {
    /// How many of the units no call waits for.
    spare: u32,
    completion: Arc<Completion>,
}

impl Taking {
    /// Announces a call that takes a chunk, unless another one that does so has enough units to spare. The call then counts on
    /// them, and is to wait for what is returned as the error.
    pub(super) fn announce(
        keys: &Arc<Mutex<Keys>>,
        key: &str,
        chunk: u32,
        cost: u32,
    ) -> Result<Self, Arc<Completion>> {
        let mut known = lock(keys);
        if let Some(other) = known.being_taken.get_mut(key) {
            if let Some(spare) = other.spare.checked_sub(cost) {
                other.spare = spare;
                return Err(Arc::clone(&other.completion));
            }
        }
        Ok(Self::begin(keys, &mut known, key, chunk, cost))
    }

    /// As [`announce`](Self::announce), and does not wait for another call.
    pub(super) fn announce_alone(
        keys: &Arc<Mutex<Keys>>,
        key: &str,
        chunk: u32,
        cost: u32,
    ) -> Self {
        Self::begin(keys, &mut lock(keys), key, chunk, cost)
    }

    fn begin(keys: &Arc<Mutex<Keys>>, known: &mut Keys, key: &str, chunk: u32, cost: u32) -> Self {
        let key: Arc<str> = key.into();
        let completion = Arc::default();
        let announced = Announced {
            spare: chunk.saturating_sub(cost),
            completion: Arc::clone(&completion),
        };
        known.being_taken.insert(Arc::clone(&key), announced);
        Self {
            keys: Arc::clone(keys),
            key,
            completion,
        }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        let mut keys = lock(&self.keys);
        // A later call may have been announced in its place.
        let is_announced = |it: &Announced| Arc::ptr_eq(&it.completion, &self.completion);
        if keys.being_taken.get(&self.key).is_some_and(is_announced) {
            keys.being_taken.remove(&self.key);
        }
        drop(keys);
        self.completion.complete();
    }
}

/// The end of a call that takes units.
#[derive(Debug, Default)]
pub(super) struct Completion {
    is_over: Mutex<bool>,
    /// Wakes threads.
    #[cfg(feature = "r2d2")]
    changed: Condvar,
    /// Wakes tasks.
    #[cfg(feature = "async")]
    notified: Notify,
}

impl Completion {
    fn complete(&self) {
        *lock(&self.is_over) = true;
        #[cfg(feature = "r2d2")]
        self.changed.notify_all();
        #[cfg(feature = "async")]
        self.notified.notify_waiters();
    }

    /// Blocks the thread until the call has ended, or a moment has passed.
    #[cfg(feature = "r2d2")]
    pub(super) fn wait(&self) {
        let is_over = lock(&self.is_over);
        let waited = self
            .changed
            .wait_timeout_while(is_over, LONGEST_WAIT, |is_over| !*is_over);
        drop(unpoisoned(waited));
    }

    /// Waits until the call has ended, or a moment has passed. The other call may be a future that nobody polls.
    #[cfg(feature = "async")]
    pub(super) async fn awaited(&self) {
        let over = async {
            // A notification after this line is not missed.
            let notified = self.notified.notified();
            let is_over = *lock(&self.is_over);
            if !is_over {
                notified.await;
            }
        };
        let _ = tokio::time::timeout(LONGEST_WAIT, over).await;
    }
}
