//! How long to wait before asking again for a slot, or for a lock that is waited for without a connection.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(2);
#[cfg(feature = "r2d2")]
const LONGEST: Duration = Duration::from_millis(100);

/// The pauses of a wait that asks again and again. They grow by half each.
#[derive(Debug)]
pub(crate) struct Pauses {
    length: Duration,
    longest: Duration,
    taken: u64,
    random: RandomState,
}

impl Pauses {
    #[cfg(feature = "r2d2")]
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

    /// How long to wait before it is time to ask again; `None` if the wait is over. At least `apart` on
    /// average, and no longer than until what it waits for is surely free, unless a crowd of waiters would
    /// then ask all at once.
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

    /// Anything from half to one and a half times as long, so that those who were refused together do
    /// not come again together.
    fn spread(&mut self, pause: Duration) -> Duration {
        let mut hasher = self.random.build_hasher();
        hasher.write_u64(self.taken);
        self.taken += 1;
        let random = hasher.finish() as u32;
        pause / 2 + pause.mul_f64(f64::from(random) / f64::from(u32::MAX))
    }
}

#[cfg(all(test, feature = "r2d2"))]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn pauses_are_spread_around_their_length() {
        let mut pauses = Pauses::new();
        let mut sum = Duration::ZERO;
        for _ in 0..1000 {
            let pause = pauses.spread(Duration::from_millis(100));
            assert!(pause >= Duration::from_millis(50), "{pause:?}");
            assert!(pause <= Duration::from_millis(150), "{pause:?}");
            sum += pause;
        }
        let mean = sum / 1000;
        assert!(mean > Duration::from_millis(90) && mean < Duration::from_millis(110));
    }

    #[test]
    fn pauses_grow_by_half_to_a_limit() {
        let mut pauses = Pauses::new();
        while pauses.length < LONGEST {
            let before = pauses.length;
            assert!(pauses.next(Duration::ZERO, LONG, LONG).is_some());
            assert!(pauses.length > before && pauses.length <= before * 2);
        }
        assert!(pauses.next(Duration::ZERO, LONG, LONG).is_some());
        assert_eq!(pauses.length, LONGEST);
    }

    #[test]
    fn a_pause_ends_when_the_slot_is_surely_free_and_with_the_wait() {
        let mut pauses = Pauses::between(LONG, LONG);
        let (none, short) = (Duration::ZERO, Duration::from_millis(5));
        assert_eq!(pauses.next(none, short, LONG), Some(short));
        assert_eq!(pauses.next(none, none, LONG), Some(SHORTEST));
        assert_eq!(pauses.next(none, LONG, short), Some(short));
        assert_eq!(pauses.next(none, LONG, none), None);
    }
}
