//! How long to wait before asking again for a slot.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(100);

/// The waiters of this process ask one after the other, so far apart on average, however many there
/// are: what bounds the load that they put on the server.
const APART: Duration = Duration::from_millis(5);

/// How many threads of this process wait for a slot, of any service.
static WAITERS: AtomicU32 = AtomicU32::new(0);

/// A wait for a slot, until its deadline.
#[derive(Debug)]
pub(super) struct Waiting {
    /// What the clock cannot express is never.
    deadline: Option<Instant>,
    next: Duration,
    random: RandomState,
}

impl Waiting {
    pub(super) fn until(deadline: Option<Instant>) -> Self {
        WAITERS.fetch_add(1, Ordering::Relaxed);
        Self {
            deadline,
            next: SHORTEST,
            random: RandomState::new(),
        }
    }

    pub(super) fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }

    /// Sleeps until it is time to ask again; false if the wait is over. That is no later than a slot is
    /// surely free, unless a crowd of waiters would then ask all at once.
    pub(super) fn pause(&mut self, surely_free: Duration) -> bool {
        let remaining = self.remaining();
        if remaining.is_zero() {
            return false;
        }
        let apart = SHORTEST.max(APART * WAITERS.load(Ordering::Relaxed).saturating_sub(1));
        let pause = self.spread(self.next.max(apart));
        self.next = LONGEST.min(self.next * 3 / 2);
        std::thread::sleep(pause.min(surely_free.max(apart)).min(remaining));
        true
    }

    /// Anything from half to one and a half times as long, so that those who were refused together do
    /// not come again together.
    fn spread(&self, pause: Duration) -> Duration {
        let mut hasher = self.random.build_hasher();
        hasher.write_u128(self.next.as_nanos());
        hasher.write_u128(self.remaining().as_nanos());
        let random = hasher.finish() as u32;
        pause / 2 + pause.mul_f64(f64::from(random) / f64::from(u32::MAX))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        WAITERS.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_spread_around_their_length() {
        let waiting = Waiting::until(None);
        for _ in 0..1000 {
            let pause = waiting.spread(Duration::from_millis(100));
            assert!(pause >= Duration::from_millis(50), "{pause:?}");
            assert!(pause <= Duration::from_millis(150), "{pause:?}");
        }
    }

    #[test]
    fn pauses_grow_by_half_to_a_limit() {
        let mut waiting = Waiting::until(None);
        while waiting.next < LONGEST {
            let before = waiting.next;
            assert!(waiting.pause(Duration::ZERO));
            assert!(waiting.next > before && waiting.next <= before * 2);
        }
        assert!(waiting.pause(Duration::ZERO));
        assert_eq!(waiting.next, LONGEST);
    }

    #[test]
    fn whoever_has_waited_does_not_count() {
        for _ in 0..1000 {
            drop(Waiting::until(None));
        }
        assert!(WAITERS.load(Ordering::Relaxed) < 1000);
    }

    #[test]
    fn a_wait_that_is_over_does_not_pause() {
        assert!(!Waiting::until(Some(Instant::now())).pause(Duration::MAX));
    }

    #[test]
    fn a_wait_ends_with_its_deadline() {
        let deadline = Instant::now() + Duration::from_millis(5);
        let mut waiting = Waiting::until(Some(deadline));
        while waiting.pause(Duration::MAX) {}
        assert!(Instant::now() >= deadline);
    }
}
