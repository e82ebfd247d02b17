//! How many threads of this process wait for the same thing, and how far apart they are to ask for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The waiters of a process ask one after the other, so far apart on average, however many there are.
/// This bounds the load that they put on the server.
const APART: Duration = Duration::from_millis(5);

/// The threads of this process that wait for one kind of thing, counted by what they wait for.
#[derive(Debug)]
pub(crate) struct Crowds<K: Ord + 'static>(Mutex<BTreeMap<K, u32>>);

impl<K: Ord + Clone + 'static> Crowds<K> {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Counts the calling thread among those that wait for this.
    pub(crate) fn join(&'static self, key: K) -> Member<K> {
        *self.counts().entry(key.clone()).or_default() += 1;
        Member { crowds: self, key }
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<K, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A waiter that is counted in its crowd, until it is dropped.
#[derive(Debug)]
pub(crate) struct Member<K: Ord + Clone + 'static> {
    crowds: &'static Crowds<K>,
    key: K,
}

impl<K: Ord + Clone + 'static> Member<K> {
    /// The least pause of each in its crowd.
    pub(crate) fn apart(&self) -> Duration {
        let counts = self.crowds.counts();
        let own = counts.get(&self.key).copied().unwrap_or(1);
        apart(own, u32::try_from(counts.len()).unwrap_or(u32::MAX))
    }
}

impl<K: Ord + Clone + 'static> Drop for Member<K> {
    fn drop(&mut self) {
        let mut counts = self.crowds.counts();
        if let Some(count) = counts.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.key);
            }
        }
    }
}

/// All crowds have the same share of what a process may ask, so that a waiter pays for its own crowd,
/// and hardly for the size of another. The only waiter of a process need not wait for others.
fn apart(own: u32, crowds: u32) -> Duration {
    APART.saturating_mul(own.saturating_mul(crowds).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_count_in_their_own_crowd_as_long_as_they_wait() {
        static CROWDS: Crowds<&str> = Crowds::new();
        let alone = CROWDS.join("y");
        assert_eq!(alone.apart(), Duration::ZERO);
        let crowd: Vec<_> = (0..1000).map(|_| CROWDS.join("x")).collect();
        assert_eq!(alone.apart(), APART);
        assert_eq!(crowd[0].apart(), APART * 1999);
        drop(alone);
        assert_eq!(crowd[0].apart(), APART * 999);
        drop(crowd);
        assert!(CROWDS.counts().is_empty());
    }

    #[test]
    fn all_crowds_together_ask_as_often_as_one_of_them_would() {
        for crowds in [&[1000][..], &[1000, 1], &[3, 400, 7, 90], &[1; 50]] {
            let per_second: f64 = crowds
                .iter()
                .map(|&own| f64::from(own) / apart(own, crowds.len() as u32).as_secs_f64())
                .sum();
            assert!(per_second < 310.0, "{crowds:?}: {per_second}");
        }
    }
}
