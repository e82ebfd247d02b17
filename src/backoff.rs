//! The pauses of a thread or a task that polls for a slot, or for a lock without a connection, or retries a release.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(2);
#[cfg(any(feature = "r2d2", feature = "async"))]
const LONGEST: Duration = Duration::from_millis(100);

/// The pauses between the polls of a wait. Each is half as long again as the one before.
#[derive(Debug)]
pub(crate) struct Backoff {
    length: Duration,
    longest: Duration,
    taken: u64,
    random: RandomState,
}

impl Backoff {
    #[cfg(any(feature = "r2d2", feature = "async"))]
    pub(crate) fn new() -> Self {
        Self::between(SHORTEST, LONGEST)
    }

    pub(crate) fn between(shortest: Duration, longest: Duration) -> Self {
        Self {
            length: shortest,
            longest,
            taken: 0,
            random: RandomState::new(),
        }
    }

    /// Returns how long to pause before the next poll, or `None` if the wait is over. The pause is at least `apart` on
    /// average. It ends at `surely_free`, when the slot is certainly free, unless many threads would then poll at once.
    pub(crate) fn next(
        &mut self,
        apart: Duration,
        surely_free: Duration,
        remaining: Duration,
    ) -> Option<Duration> {
        if remaining.is_zero() {
            return None;
        }
        let pause = self.spread(self.length.max(apart));
        self.length = self.longest.min(self.length * 3 / 2);
        Some(
            pause
                .min(surely_free.max(apart).max(SHORTEST))
                .min(remaining),
        )
    }

    /// Returns a random time from half to one and a half of the pause, so that waiters that were refused together do not
    /// poll together again.
    fn spread(&mut self, pause: Duration) -> Duration {
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.taken);
        self.taken += 1;
        let random = hasher.finish() as u32;
        pause / 2 + pause.mul_f64(f64::from(random) / f64::from(u32::MAX))
    }
}

#[cfg(all(test, any(feature = "r2d2", feature = "async")))]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn pauses_are_spread_around_their_length() {
        let mut backoff = Backoff::new();
        let mut sum = Duration::ZERO;
        for _ in 0..1000 {
            let pause = backoff.spread(Duration::from_millis(100));
            assert!(pause >= Duration::from_millis(50), "{pause:?}");
            assert!(pause <= Duration::from_millis(150), "{pause:?}");
            sum += pause;
        }
        let mean = sum / 1000;
        assert!(mean > Duration::from_millis(90) && mean < Duration::from_millis(110));
    }

    #[test]
    fn pauses_grow_by_half_to_a_limit() {
        let mut backoff = Backoff::new();
        while backoff.length < LONGEST {
            let before = backoff.length;
            assert!(backoff.next(Duration::ZERO, LONG, LONG).is_some());
            assert!(backoff.length > before && backoff.length <= before * 2);
        }
        assert!(backoff.next(Duration::ZERO, LONG, LONG).is_some());
        assert_eq!(backoff.length, LONGEST);
    }

    #[test]
    fn a_pause_ends_when_the_slot_is_surely_free_and_with_the_wait() {
        let mut backoff = Backoff::between(LONG, LONG);
        let (none, short) = (Duration::ZERO, Duration::from_millis(5));
        assert_eq!(backoff.next(none, short, LONG), Some(short));
        assert_eq!(backoff.next(none, none, LONG), Some(SHORTEST));
        assert_eq!(backoff.next(none, LONG, short), Some(short));
        assert_eq!(backoff.next(none, LONG, none), None);
    }
}
