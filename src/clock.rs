//! The clocks of this machine: how much time has passed, and how much remains.
//!
//! The monotonic clock, [`Instant`], stops on Linux and macOS while the machine is suspended, or its virtual machine is
//! paused. The server's clock continues. The wall clock continues, too, but it can be set. So the time that has passed for a
//! holder is the larger of the two: a wall clock that is set back changes nothing, and one that is set forward shortens
//! promises, which is safe.

#[cfg(any(feature = "r2d2", feature = "async"))]
use std::time::SystemTime;
use std::time::{Duration, Instant};

/// When to stop waiting.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    pub(crate) const NEVER: Self = Self(None);

    /// A moment that the clock cannot express is never.
    pub(crate) fn after(timeout: Duration) -> Self {
        Self(Instant::now().checked_add(timeout))
    }

    pub(crate) fn remaining(self) -> Duration {
        self.0.map_or(Duration::MAX, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        })
    }
}

/// A moment on both clocks.
#[cfg(any(feature = "r2d2", feature = "async"))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    monotonic: Instant,
    wall: SystemTime,
}

#[cfg(any(feature = "r2d2", feature = "async"))]
impl Moment {
    pub(crate) fn now() -> Self {
        Self {
            monotonic: monotonic(),
            wall: wall(),
        }
    }

    /// The time since then, by the clock that shows more.
    pub(crate) fn elapsed(self) -> Duration {
        Self::now().since(self)
    }

    /// The time from an earlier moment to this one, by the clock that shows more.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        let by_wall = self.wall.duration_since(earlier.wall).unwrap_or_default();
        let by_monotonic = self.monotonic.saturating_duration_since(earlier.monotonic);
        by_monotonic.max(by_wall)
    }

    /// The moment on the monotonic clock.
    pub(crate) const fn monotonic(self) -> Instant {
        self.monotonic
    }
}

#[cfg(all(any(feature = "r2d2", feature = "async"), not(test)))]
fn wall() -> SystemTime {
    SystemTime::now()
}

/// The monotonic clock, which tests move.
#[cfg(all(any(feature = "r2d2", feature = "async"), not(test)))]
pub(crate) fn monotonic() -> Instant {
    Instant::now()
}

#[cfg(all(any(feature = "r2d2", feature = "async"), test))]
use self::moved::wall;
#[cfg(all(any(feature = "r2d2", feature = "async"), test))]
pub(crate) use self::moved::{monotonic, pass, set_back, suspend};

/// Clocks that a test moves on its own thread.
#[cfg(all(any(feature = "r2d2", feature = "async"), test))]
mod moved {
    use super::*;

    thread_local! {
        static AHEAD: std::cell::Cell<Duration> = const { std::cell::Cell::new(FAR) };
        static PASSED: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
    }

    /// Far enough ahead that the clock can be set back.
    const FAR: Duration = Duration::from_secs(1_000_000);

    pub(super) fn wall() -> SystemTime {
        SystemTime::now() + AHEAD.get()
    }

    pub(crate) fn monotonic() -> Instant {
        Instant::now() + PASSED.get()
    }

    /// Moves both clocks.
    pub(crate) fn pass(time: Duration) {
        PASSED.set(PASSED.get() + time);
        suspend(time);
    }

    /// Moves only the wall clock, as a suspension of the machine does, or a clock that is set forward.
    pub(crate) fn suspend(time: Duration) {
        AHEAD.set(AHEAD.get() + time);
    }

    /// Sets the wall clock back.
    pub(crate) fn set_back(time: Duration) {
        AHEAD.set(AHEAD.get() - time);
    }
}

#[cfg(test)]
mod deadlines {
    use super::*;

    #[test]
    fn a_deadline_past_all_time_is_never() {
        assert_eq!(Deadline::after(Duration::MAX).remaining(), Duration::MAX);
        assert_eq!(Deadline::after(Duration::ZERO).remaining(), Duration::ZERO);
    }
}

#[cfg(all(any(feature = "r2d2", feature = "async"), test))]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn the_time_of_a_suspension_has_passed() {
        let before = Moment::now();
        suspend(HOUR);
        assert!(before.elapsed() >= HOUR);
        assert!(Moment::now().elapsed() < HOUR);
    }

    #[test]
    fn time_goes_on_where_the_wall_clock_is_set_back() {
        let before = Moment::now();
        set_back(HOUR);
        assert!(before.elapsed() < HOUR);
        std::thread::sleep(Duration::from_millis(2));
        assert!(before.elapsed() >= Duration::from_millis(2));
    }

    #[test]
    fn a_wall_clock_that_was_set_forward_by_mistake_takes_nothing_away_for_good() {
        let before = Moment::now();
        suspend(HOUR);
        set_back(HOUR);
        assert!(before.elapsed() < HOUR);
    }
}
