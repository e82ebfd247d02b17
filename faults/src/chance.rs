//! Rng choices that both kinds of workers make.

use std::time::Duration;

use fastrand::Rng;

/// Two choices that `fastrand` lacks.
pub(crate) trait Chance {
    /// True once in `n` times on average.
    fn one_in(&mut self, n: u64) -> bool;

    /// A duration of whole milliseconds; both ends are included.
    fn millis(&mut self, from: u64, to: u64) -> Duration;
}

impl Chance for Rng {
    fn one_in(&mut self, n: u64) -> bool {
        self.u64(..n) == 0
    }

    fn millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_millis(self.u64(from..=to))
    }
}
