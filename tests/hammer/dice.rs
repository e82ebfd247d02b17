//! Chance, without a dependency.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::time::Duration;

/// A source of random numbers; `SplitMix64`.
#[derive(Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new() -> Self {
        Self(RandomState::new().build_hasher().finish())
    }

    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.roll() % bound as u64) as usize
    }

    pub(crate) fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }

    pub(crate) fn milliseconds(&mut self, range: Range<usize>) -> Duration {
        let milliseconds = range.start + self.below(range.len());
        Duration::from_millis(milliseconds as u64)
    }
}
