//! How many threads and tasks of this process poll for the same lock or slot, and the least pause between their polls.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use crate::panics::lock;

/// The average time between two polls of a process, however many poll. This bounds their load on the server.
const APART: Duration = Duration::from_millis(5);

/// The threads and tasks of this process that poll for one kind of thing, counted by key.
#[derive(Debug)]
pub(crate) struct Pollers<K: Ord + 'static>(Mutex<BTreeMap<K, u32>>);

impl<K: Ord + Clone + 'static> Pollers<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Counts the caller among those that poll for this key.
    pub(crate) fn join(&'static self, key: K) -> Poller<K> {
        *self.counts().entry(key.clone()).or_default() += 1;
        Poller { pollers: self, key }
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<K, u32>> {
        lock(&self.0)
    }
}

/// A thread or a task that is counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Poller<K: Ord + Clone + 'static> {
    pollers: &'static Pollers<K>,
    key: K,
}

impl<K: Ord + Clone + 'static> Poller<K> {
    /// The least average pause of each of those that poll for this key.
    pub(crate) fn apart(&self) -> Duration {
        let counts = self.pollers.counts();
        let own = counts.get(&self.key).copied().unwrap_or(1);
        apart(own, u32::try_from(counts.len()).unwrap_or(u32::MAX))
    }
}

impl<K: Ord + Clone + 'static> Drop for Poller<K> {
    fn drop(&mut self) {
        let mut counts = self.pollers.counts();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

/// All keys have the same share of the polls of a process, so a pause depends on the number of those that
/// poll for its key, and hardly on those that poll for others. The only one that polls has no least pause.
fn apart(own: u32, keys: u32) -> Duration {
    APART.saturating_mul(own.saturating_mul(keys).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_count_for_their_own_key_as_long_as_they_poll() {
        static POLLERS: Pollers<&str> = Pollers::new();
        let alone = POLLERS.join("y");
        assert_eq!(alone.apart(), Duration::ZERO);
        let many: Vec<_> = (0..1000).map(|_| POLLERS.join("x")).collect();
        assert_eq!(alone.apart(), APART);
        assert_eq!(many[0].apart(), APART * 1999);
        drop(alone);
        assert_eq!(many[0].apart(), APART * 999);
        drop(many);
        assert!(POLLERS.counts().is_empty());
    }

    #[test]
    fn all_keys_together_are_polled_as_often_as_one_of_them_would_be() {
        for keys in [&[1000][..], &[1000, 1], &[3, 400, 7, 90], &[1; 50]] {
            let per_second: f64 = keys
                .iter()
                .map(|&own| f64::from(own) / apart(own, keys.len() as u32).as_secs_f64())
                .sum();
            assert!(per_second < 310.0, "{keys:?}: {per_second}");
        }
    }
}
