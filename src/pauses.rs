//! How long to wait before asking again for a slot, or for a lock that is waited for without a connection.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(100);

/// The waiters of a crowd ask one after the other, so far apart on average, however many there are:
/// what bounds the load that they put on the server.
const APART: Duration = Duration::from_millis(5);

/// The threads of this process that wait so for one kind of thing.
#[derive(Debug)]
pub(crate) struct Crowd(AtomicU32);

impl Crowd {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }
}

/// A wait that asks again and again, until its deadline.
#[derive(Debug)]
pub(crate) struct Pauses {
    crowd: &'static Crowd,
    /// What the clock cannot express is never.
    deadline: Option<Instant>,
    length: Duration,
    random: RandomState,
}

impl Pauses {
    /// Joins the crowd.
    pub(crate) fn until(deadline: Option<Instant>, crowd: &'static Crowd) -> Self {
        crowd.0.fetch_add(1, Ordering::Relaxed);
        Self {
            crowd,
            deadline,
            length: SHORTEST,
            random: RandomState::new(),
        }
    }

    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }

    /// How long to wait before it is time to ask again; `None` if the wait is over. No longer than until
    /// what it waits for is surely free, unless a crowd of waiters would then ask all at once.
    pub(crate) fn next(&mut self, surely_free: Duration) -> Option<Duration> {
        let remaining = self.remaining();
        if remaining.is_zero() {
            return None;
        }
        let apart = SHORTEST.max(APART * self.crowd.0.load(Ordering::Relaxed).saturating_sub(1));
        let pause = self.spread(self.length.max(apart));
        self.length = LONGEST.min(self.length * 3 / 2);
        Some(pause.min(surely_free.max(apart)).min(remaining))
    }

    /// Anything from half to one and a half times as long, so that those who were refused together do
    /// not come again together.
    fn spread(&self, pause: Duration) -> Duration {
        let mut hasher = self.random.build_hasher();
        hasher.write_u128(self.length.as_nanos());
        hasher.write_u128(self.remaining().as_nanos());
        let random = hasher.finish() as u32;
        pause / 2 + pause.mul_f64(f64::from(random) / f64::from(u32::MAX))
    }
}

impl Drop for Pauses {
    fn drop(&mut self) {
        self.crowd.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static CROWD: Crowd = Crowd::new();

    #[test]
    fn pauses_are_spread_around_their_length() {
        let pauses = Pauses::until(None, &CROWD);
        for _ in 0..1000 {
            let pause = pauses.spread(Duration::from_millis(100));
            assert!(pause >= Duration::from_millis(50), "{pause:?}");
            assert!(pause <= Duration::from_millis(150), "{pause:?}");
        }
    }

    #[test]
    fn pauses_grow_by_half_to_a_limit() {
        let mut pauses = Pauses::until(None, &CROWD);
        while pauses.length < LONGEST {
            let before = pauses.length;
            assert!(pauses.next(Duration::ZERO).is_some());
            assert!(pauses.length > before && pauses.length <= before * 2);
        }
        assert!(pauses.next(Duration::ZERO).is_some());
        assert_eq!(pauses.length, LONGEST);
    }

    #[test]
    fn whoever_has_waited_does_not_count() {
        static PASSING: Crowd = Crowd::new();
        for _ in 0..3 {
            drop(Pauses::until(None, &PASSING));
        }
        let _waiting = Pauses::until(None, &PASSING);
        assert_eq!(PASSING.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_wait_that_is_over_does_not_pause() {
        assert_eq!(
            Pauses::until(Some(Instant::now()), &CROWD).next(Duration::MAX),
            None
        );
    }

    #[test]
    fn a_wait_ends_with_its_deadline() {
        let deadline = Instant::now() + Duration::from_millis(5);
        let mut pauses = Pauses::until(Some(deadline), &CROWD);
        while let Some(pause) = pauses.next(Duration::MAX) {
            std::thread::sleep(pause);
        }
        assert!(Instant::now() >= deadline);
    }
}
