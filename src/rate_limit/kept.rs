//! How many units of a call were not given back yet.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// A count that all clones share, because a unit can be given back only once.
///
/// Few calls give units back or are cloned, so the shared count is allocated when the first of them does.
#[derive(Debug)]
pub(super) struct Kept {
    units: u32,
    shared: OnceLock<Arc<AtomicU32>>,
}

impl Kept {
    pub(super) const fn all(units: u32) -> Self {
        Self {
            units,
            shared: OnceLock::new(),
        }
    }

    /// Whether all units were given back.
    pub(super) fn is_empty(&self) -> bool {
        let kept = self.shared.get();
        kept.map_or(self.units, |count| count.load(Ordering::Relaxed)) == 0
    }

    /// Counts units as given back. Returns how many are left to give back, as the error, if these are more, or zero.
    pub(super) fn take_back(&self, units: u32) -> Result<(), u32> {
        let fewer = |kept: u32| kept.checked_sub(units).filter(|_| units > 0);
        self.shared()
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer)
            .map(drop)
    }

    /// Counts all units that are left as given back. Returns how many.
    pub(super) fn take_all(&self) -> u32 {
        self.shared().swap(0, Ordering::Relaxed)
    }

    /// Whether the shared count was allocated.
    #[cfg(test)]
    pub(super) fn is_shared(&self) -> bool {
        self.shared.get().is_some()
    }

    fn shared(&self) -> &Arc<AtomicU32> {
        self.shared
            .get_or_init(|| Arc::new(AtomicU32::new(self.units)))
    }
}

impl Clone for Kept {
    fn clone(&self) -> Self {
        Self {
            units: self.units,
            shared: OnceLock::from(Arc::clone(self.shared())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_the_count_from_whichever_moment_on() {
        let kept = Kept::all(5);
        let early = kept.clone();
        assert_eq!(kept.take_back(2), Ok(()));
        let late = early.clone();
        for kept in [&kept, &early, &late] {
            assert_eq!(kept.take_back(4), Err(3));
            assert_eq!(kept.take_back(0), Err(3));
        }
        assert_eq!(late.take_back(1), Ok(()));
        assert_eq!((kept.take_all(), early.take_all()), (2, 0));
        assert_eq!(late.take_back(1), Err(0));
    }

    #[test]
    fn nothing_is_allocated_for_a_call_that_gives_nothing_back() {
        assert!(!Kept::all(5).is_shared());
    }
}
