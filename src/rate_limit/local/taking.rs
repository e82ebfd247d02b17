//! Round trips that take units. Calls for the same key wait for one that takes enough for them, too.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::panics::lock;
use crate::signal::Signal;

/// How long a call waits for another one, before it takes units for itself. The other one may itself wait for a connection, or be
/// a future that nobody polls.
pub(super) const LONGEST_WAIT: Duration = Duration::from_millis(250);

/// The calls that take units at present, the last one of each key.
pub(super) type Takings = HashMap<Arc<str>, Announced>;

/// A call that takes units. Dropping it ends the wait of the others.
#[derive(Debug)]
pub(super) struct Taking {
    takings: Arc<Mutex<Takings>>,
    key: Arc<str>,
    completion: Arc<Signal>,
}

/// What other calls know of one that takes units.
#[derive(Debug)]
pub(super) struct Announced {
    /// How many of the units no call waits for.
    spare: u32,
    completion: Arc<Signal>,
}

impl Taking {
    /// Announces a call that takes a chunk, unless another one that does so has enough units to spare. The call then counts on
    /// them, and is to wait for what is returned as the error.
    pub(super) fn announce(
        takings: &Arc<Mutex<Takings>>,
        key: &str,
        chunk: u32,
        cost: u32,
    ) -> Result<Self, Arc<Signal>> {
        let mut present = lock(takings);
        if let Some(other) = present.get_mut(key) {
            if let Some(spare) = other.spare.checked_sub(cost) {
                other.spare = spare;
                return Err(Arc::clone(&other.completion));
            }
        }
        Ok(Self::begin(takings, &mut present, key, chunk, cost))
    }

    /// As [`announce`](Self::announce), and does not wait for another call.
    pub(super) fn announce_alone(
        takings: &Arc<Mutex<Takings>>,
        key: &str,
        chunk: u32,
        cost: u32,
    ) -> Self {
        Self::begin(takings, &mut lock(takings), key, chunk, cost)
    }

    fn begin(
        takings: &Arc<Mutex<Takings>>,
        present: &mut Takings,
        key: &str,
        chunk: u32,
        cost: u32,
    ) -> Self {
        let key: Arc<str> = key.into();
        let completion = Arc::default();
        let announced = Announced {
            spare: chunk.saturating_sub(cost),
            completion: Arc::clone(&completion),
        };
        present.insert(Arc::clone(&key), announced);
        Self {
            takings: Arc::clone(takings),
            key,
            completion,
        }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        let mut present = lock(&self.takings);
        // A later call may have been announced in its place.
        let is_announced = |it: &Announced| Arc::ptr_eq(&it.completion, &self.completion);
        if present.get(&self.key).is_some_and(is_announced) {
            present.remove(&self.key);
        }
        drop(present);
        self.completion.set();
        self.completion.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_calls_wait_as_the_chunk_is_enough_for() {
        let takings = Arc::default();
        let announce = |cost| Taking::announce(&takings, "7", 10, cost);
        let first = announce(4).unwrap();
        let completion = announce(5).unwrap_err();
        assert!(Arc::ptr_eq(&completion, &first.completion));
        assert!(Taking::announce(&takings, "8", 10, 1).is_ok());
        let second = announce(2).unwrap();
        // The chunk of the first is used up, so the next ones wait for the second.
        let next = announce(1).unwrap_err();
        assert!(Arc::ptr_eq(&next, &second.completion));
        drop(first);
        assert!(completion.is_set() && !next.is_set());
        assert!(announce(7).is_err());
        drop(second);
        assert!(next.is_set());
        assert!(announce(1).is_ok());
        assert!(lock(&takings).is_empty());
    }

    #[test]
    fn a_call_that_costs_more_than_a_chunk_has_nothing_to_spare() {
        let takings = Arc::default();
        let large = Taking::announce(&takings, "7", 10, 11).unwrap();
        let other = Taking::announce(&takings, "7", 10, 1).unwrap();
        drop(other);
        drop(large);
    }

    #[cfg(feature = "r2d2")]
    #[test]
    fn a_thread_that_waits_goes_on_when_the_call_panics() {
        let takings = Arc::default();
        let taking = Taking::announce(&takings, "7", 10, 1).unwrap();
        let completion = Taking::announce(&takings, "7", 10, 1).unwrap_err();
        let call = std::thread::spawn(move || {
            let _taking = taking;
            std::panic::resume_unwind(Box::new("of the caller"));
        });
        assert!(call.join().is_err());
        completion.wait(LONGEST_WAIT);
        assert!(completion.is_set());
    }
}
