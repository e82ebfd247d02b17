//! How much time has passed on this machine, for what is promised to a holder.
//!
//! The monotonic clock, [`Instant`], stops on Linux and macOS while the machine is suspended, or its virtual machine
//! paused, and the server's clock goes on. The wall clock goes on, too, but somebody may set it. What has passed is
//! therefore the larger of the two: a wall clock that is set back changes nothing, and one that is set forward makes
//! promises smaller, which is safe.

use std::time::{Duration, Instant, SystemTime};

/// A moment, on both clocks of this machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    monotonic: Instant,
    wall: SystemTime,
}

impl Moment {
    pub(crate) fn now() -> Self {
        Self {
            monotonic: Instant::now(),
            wall: wall(),
        }
    }

    /// How long ago it was, at least by one of the clocks.
    pub(crate) fn elapsed(self) -> Duration {
        let by_wall = wall().duration_since(self.wall).unwrap_or_default();
        self.monotonic.elapsed().max(by_wall)
    }

    /// The monotonic clock's part of it.
    pub(crate) const fn monotonic(self) -> Instant {
        self.monotonic
    }
}

#[cfg(not(test))]
fn wall() -> SystemTime {
    SystemTime::now()
}

#[cfg(test)]
use self::moved::wall;
#[cfg(test)]
pub(crate) use self::moved::{set_back, suspend};

/// A wall clock that a test moves, on its own thread.
#[cfg(test)]
mod moved {
    use super::*;

    thread_local! {
        static AHEAD: std::cell::Cell<Duration> = const { std::cell::Cell::new(FAR) };
    }

    /// So that it may be set back without a sign.
    const FAR: Duration = Duration::from_secs(1_000_000);

    pub(super) fn wall() -> SystemTime {
        SystemTime::now() + AHEAD.get()
    }

    /// Lets the wall clock alone go on, as while the machine is suspended, or as the clock is set forward.
    pub(crate) fn suspend(time: Duration) {
        AHEAD.set(AHEAD.get() + time);
    }

    /// Sets the wall clock back.
    pub(crate) fn set_back(time: Duration) {
        AHEAD.set(AHEAD.get() - time);
    }
}

#[cfg(test)]
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
