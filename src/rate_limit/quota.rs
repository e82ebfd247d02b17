//! Quotas: how many units per period, and how many of them at once.

use std::time::Duration;

/// N units per period on average, with a burst.
///
/// In any span W of the database's clock, at most `burst + W × N / period` units are allowed for a key. The units come back
/// continuously, one per `period / N`, and not at the end of a period.
///
/// Constants cannot return an error, so the first operation does, as
/// [`Input::BadQuota`](crate::error::Input::BadQuota): N and the burst are at least 1, the period is longer than zero, at most
/// 366 days, and rounded up to microseconds, and the burst must be refilled within 36,600 days.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::Quota;
///
/// const API: Quota = Quota::per_minute(100).burst(20); // at most 20 at once, and 100 more in each minute
/// const LOGIN: Quota = Quota::per(5, Duration::from_secs(900));
/// assert_eq!((API.n, API.burst), (100, 20));
/// assert_eq!((LOGIN.n, LOGIN.burst), (5, 5));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "a quota does nothing until a rate limit has it"]
#[non_exhaustive]
pub struct Quota {
    /// How many units come back per period.
    pub n: u32,
    /// The period.
    pub period: Duration,
    /// How many units may be spent at once.
    pub burst: u32,
}

impl Quota {
    /// `n` units per period. The burst is `n`, too, so a key that was not used may spend up to `2 × n` in its first period.
    /// [`burst`](Self::burst) sets another one.
    pub const fn per(n: u32, period: Duration) -> Self {
        Self {
            n,
            period,
            burst: n,
        }
    }

    /// `n` units per second, as [`per`](Self::per).
    pub const fn per_second(n: u32) -> Self {
        Self::per(n, Duration::from_secs(1))
    }

    /// `n` units per minute, as [`per`](Self::per).
    pub const fn per_minute(n: u32) -> Self {
        Self::per(n, Duration::from_secs(60))
    }

    /// `n` units per hour, as [`per`](Self::per).
    pub const fn per_hour(n: u32) -> Self {
        Self::per(n, Duration::from_secs(60 * 60))
    }

    /// `n` units per day of 24 hours, as [`per`](Self::per).
    pub const fn per_day(n: u32) -> Self {
        Self::per(n, Duration::from_secs(24 * 60 * 60))
    }

    /// Sets how many units may be spent at once, by a key that was not used for a while.
    ///
    /// The burst comes on top of what is refilled: with 100 per minute and a burst of 100, a key may spend 200 units in
    /// its first minute. A smaller burst spreads the units more evenly. Defaults to N.
    pub const fn burst(mut self, burst: u32) -> Self {
        self.burst = burst;
        self
    }

    /// Returns the period in microseconds, rounded up.
    pub(super) fn period_us(self) -> u128 {
        u128::from(self.period.as_secs()) * 1_000_000
            + u128::from(self.period.subsec_nanos().div_ceil(1000))
    }

    /// Returns how many microseconds it takes to refill so many units, rounded up.
    pub(super) fn time_of(self, units: u32) -> u128 {
        (u128::from(units) * self.period_us()).div_ceil(u128::from(self.n.max(1)))
    }

    /// Returns how many microseconds it takes to refill so many units, rounded down.
    #[cfg(any(feature = "r2d2", feature = "async"))]
    pub(super) fn floor_of(self, units: u32) -> u128 {
        u128::from(units) * self.period_us() / u128::from(self.n.max(1))
    }

    /// Returns how many units are refilled in so many microseconds, with a part of a unit counted as one.
    pub(crate) fn units_owed(self, debt_us: u128) -> u128 {
        (debt_us * u128::from(self.n)).div_ceil(self.period_us().max(1))
    }

    /// Returns the largest debt in microseconds with which so many units may be spent. `None` above the burst.
    pub(super) fn room_for(self, units: u32) -> Option<u128> {
        let spare = self.burst.checked_sub(units)?;
        Some(u128::from(spare) * self.period_us() / u128::from(self.n.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_and_rounded_to_the_strict_side() {
        let seven = Quota::per_second(7).burst(20);
        assert_eq!(seven.time_of(1), 142_858);
        assert_eq!(seven.time_of(7), 1_000_000);
        assert_eq!(seven.units_owed(142_857), 1);
        assert_eq!(seven.units_owed(142_858), 2);
        assert_eq!(seven.room_for(20), Some(0));
        assert_eq!(seven.room_for(13), Some(1_000_000));
        assert_eq!(seven.room_for(14), Some(857_142));
        assert_eq!(seven.room_for(21), None);
    }

    #[test]
    fn a_key_that_may_not_spend_one_unit_has_none_left() {
        for (n, period, burst) in [
            (1, 1, 1),
            (7, 1, 20),
            (3, 60, 1),
            (100, 60, 20),
            (7, 3600, 1000),
        ] {
            let quota = Quota::per(n, Duration::from_secs(period)).burst(burst);
            let room = quota.room_for(1).unwrap();
            assert!(quota.units_owed(room) < u128::from(burst));
            assert!(quota.units_owed(room + 1) >= u128::from(burst));
        }
    }

    #[test]
    fn no_quota_overflows() {
        let largest = Quota::per(u32::MAX, Duration::MAX).burst(u32::MAX);
        assert_eq!(largest.time_of(u32::MAX), largest.period_us());
        assert!(largest.room_for(0).is_some());
        let nothing = Quota::per(0, Duration::ZERO);
        assert_eq!(nothing.time_of(7), 0);
        assert_eq!(nothing.units_owed(7), 0);
    }
}
