//! Quotas: how much a rate limit allows.

use std::fmt;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::input;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The longest period: a leap year.
const LONGEST: Duration = Duration::from_secs(366 * 24 * 60 * 60);
/// The longest time in which a burst may refill, in microseconds: 100 years.
const LONGEST_REFILL: u128 = 3_155_760_000_000_000;

/// N units per period on average, and up to `burst` units at once.
///
/// ```
/// use diesel_interlock::Quota;
///
/// // 100 a minute on average, and never more than 20 at once.
/// const API: Quota = Quota::per_minute(100).burst(20);
/// assert_eq!((API.units, API.burst), (100, 20));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Quota {
    /// How many units are refilled per period.
    pub units: u32,
    /// The period, between a microsecond and 366 days.
    pub period: Duration,
    /// How many units a full key has.
    pub burst: u32,
}

impl Quota {
    /// Allows this many units per period, and as many at once.
    pub const fn new(units: u32, period: Duration) -> Self {
        Self {
            units,
            period,
            burst: units,
        }
    }

    /// Allows this many units per second, and as many at once.
    pub const fn per_second(units: u32) -> Self {
        Self::new(units, Duration::from_secs(1))
    }

    /// Allows this many units per minute, and as many at once.
    pub const fn per_minute(units: u32) -> Self {
        Self::new(units, Duration::from_secs(60))
    }

    /// Allows this many units per hour, and as many at once.
    pub const fn per_hour(units: u32) -> Self {
        Self::new(units, Duration::from_secs(60 * 60))
    }

    /// Allows this many units per 24 hours, and as many at once.
    pub const fn per_day(units: u32) -> Self {
        Self::new(units, DAY)
    }

    /// Allows one unit per period.
    pub const fn once_per(period: Duration) -> Self {
        Self::new(1, period)
    }

    /// Sets how many units may be spent at once, and keeps the rate.
    pub const fn burst(self, burst: u32) -> Self {
        Self { burst, ..self }
    }

    pub(super) fn exact(self) -> Result<Exact> {
        let period = input::check_duration(
            self.period,
            LONGEST,
            "the period of a quota must be between a microsecond and 366 days",
        )?;
        let exact = Exact {
            n: self.units.into(),
            period: period.unsigned_abs().into(),
            burst: self.burst.into(),
        };
        if exact.n == 0 || exact.burst == 0 {
            return Err(Error::input(
                "the units and the burst of a quota must be at least 1",
            ));
        }
        if exact.burst * exact.period > LONGEST_REFILL * exact.n {
            return Err(Error::input(
                "the burst of a quota must refill within 100 years",
            ));
        }
        Ok(exact)
    }
}

/// As in `100 per 60s, 20 at once`.
impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} per {:?}, {} at once",
            self.units, self.period, self.burst
        )
    }
}

/// A validated quota, for exact arithmetic in microseconds.
///
/// This is the generic cell rate algorithm. The state of a key is one time: when it will be full. A
/// call is allowed if the key will be full within the [`lead`](Self::lead) of the call's units from
/// now. The call then moves that time later by the [`refill`](Self::refill) of its units.
#[derive(Debug, Clone, Copy)]
pub(super) struct Exact {
    n: u128,
    period: u128,
    burst: u128,
}

impl Exact {
    pub(super) const fn burst(&self) -> i64 {
        self.burst as i64
    }

    /// The microseconds in which one unit refills, as the column `unit_us` stores them.
    pub(super) const fn unit(&self) -> f64 {
        self.period as f64 / self.n as f64
    }

    /// How many microseconds this many units take to refill.
    pub(super) fn refill(&self, units: u32) -> i64 {
        (u128::from(units) * self.period).div_ceil(self.n) as i64
    }

    /// The largest `full_in`, in microseconds, at which this many units are available. `None` if
    /// they exceed the burst.
    pub(super) fn lead(&self, units: u32) -> Option<i64> {
        let rest = self.burst.checked_sub(units.into())?;
        Some((rest * self.period / self.n) as i64)
    }

    /// The available units of a key that is full in `full_in` microseconds.
    pub(super) fn remaining(&self, full_in: i64) -> u32 {
        let owed = (u128::from(full_in.max(0).unsigned_abs()) * self.n).div_ceil(self.period);
        self.burst.saturating_sub(owed) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_as_many_units_as_its_lead_says() {
        for (n, seconds, burst) in [
            (1, 1, 1),
            (3, 60, 3),
            (100, 60, 20),
            (7, 86_400, 1000),
            (700_000, 1, 5),
            (u32::MAX, 1, 5),
        ] {
            let exact = Quota::new(n, Duration::from_secs(seconds))
                .burst(burst)
                .exact()
                .unwrap();
            assert_eq!(exact.remaining(0), burst);
            for units in 1..=burst.min(10) {
                let lead = exact.lead(units).unwrap();
                assert!(exact.remaining(lead) >= units);
                // Refills are rounded up, so that no call is allowed too early.
                let refill = u128::try_from(exact.refill(units)).unwrap();
                assert!(refill * exact.n >= u128::from(units) * exact.period);
                assert!(
                    exact.remaining(lead + exact.refill(units)) <= burst - units
                        || exact.unit() < 1.0
                );
            }
            assert_eq!(exact.lead(burst), Some(0));
        }
        assert_eq!(Quota::per_second(2).exact().unwrap().lead(3), None);
    }

    #[test]
    fn bad_quotas_are_refused() {
        let century = Quota::once_per(LONGEST).burst(101);
        for quota in [
            Quota::per_second(0),
            Quota::per_second(1).burst(0),
            Quota::once_per(Duration::ZERO),
            century,
        ] {
            assert!(matches!(quota.exact(), Err(Error::Input(_))));
        }
    }
}
