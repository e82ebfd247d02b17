//! Decides which tick is due, given a function that returns the first tick after a time. Uses no
//! database and no clock: the time is an argument.

use std::collections::VecDeque;
use std::time::Duration;

use chrono::{DateTime, SubsecRound, TimeDelta, Utc};

use crate::error::{Error, Result};

/// The largest number of missed ticks that are counted, and that are caught up with.
const COUNTED: usize = 1000;
/// The largest number of ticks that one look computes. So an hour with a tick each microsecond is
/// not computed tick by tick.
const LOOKED_AT: usize = 100_000;

/// What happens to missed ticks: no instance was running when they were due, or the run before took
/// too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CatchUp {
    /// One run of the latest missed tick stands for all of them.
    #[default]
    Latest,
    /// One run of the latest missed tick, but only if that tick is not older than this. Choose at
    /// least two seconds, because a look comes a moment after its tick, and after an error a second
    /// later.
    Skip(Duration),
    /// One run for each of this many latest missed ticks, at most 1,000, the oldest first.
    All(u32),
}

pub(super) enum Due {
    /// This tick is due. So many ticks before it were missed and are not run.
    Tick(DateTime<Utc>, u32),
    /// Nothing is due now. The next tick, if there is one.
    Later(Option<DateTime<Utc>>),
}

impl CatchUp {
    /// Whether a tick is too old to run, including to run again.
    pub(super) fn is_over(self, tick: DateTime<Utc>, now: DateTime<Utc>) -> bool {
        let is_late = |grace| (now - tick).to_std().is_ok_and(|late| late > grace);
        matches!(self, Self::Skip(grace) if is_late(grace))
    }

    /// Decides which of the ticks from `first` on runs now.
    pub(super) fn due(
        self,
        next: &impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>>,
        first: DateTime<Utc>,
        now: DateTime<Utc>,
    ) -> Result<Due> {
        let most = match self {
            Self::All(max) => (max.max(1) as usize).min(COUNTED),
            Self::Latest | Self::Skip(_) => 1,
        };
        let (mut due, mut missed, mut tick) = (VecDeque::new(), 0, Some(first));
        for _ in 0..LOOKED_AT {
            let Some(at) = tick.filter(|tick| *tick <= now) else {
                break;
            };
            due.push_back(at);
            if due.len() > most {
                due.pop_front();
                missed += 1;
            }
            tick = following(next, at)?;
            if missed == COUNTED && tick.is_some_and(|tick| tick <= now) {
                // There are too many to compute, so go on from a time shortly before `now`.
                tick = following(next, before(next, most, at, now)?)?;
            }
        }
        Ok(match (due.front(), self) {
            (Some(at), _) if self.is_over(*at, now) => Due::Later(tick),
            (Some(at), _) => Due::Tick(*at, missed.min(COUNTED) as u32),
            (None, _) => Due::Later(tick),
        })
    }
}

/// Finds a time between `after` and `now`, shortly before `now`, with at least `wanted` ticks from
/// there to `now`.
fn before(
    next: &impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>>,
    wanted: usize,
    after: DateTime<Utc>,
    now: DateTime<Utc>,
) -> Result<DateTime<Utc>> {
    let mut back = TimeDelta::microseconds(1);
    loop {
        let from = now.checked_sub_signed(back).unwrap_or(after).max(after);
        let mut at = from;
        let mut found = 0;
        while found < wanted {
            match following(next, at)? {
                Some(tick) if tick <= now => (at, found) = (tick, found + 1),
                _ => break,
            }
        }
        if found == wanted || from == after {
            return Ok(from);
        }
        back = back * 2;
    }
}

/// Returns the next tick in whole microseconds, which is the precision of the database.
pub(super) fn following(
    next: &impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>>,
    after: DateTime<Utc>,
) -> Result<Option<DateTime<Utc>>> {
    match next(after).map(|tick| tick.trunc_subsecs(6)) {
        Some(tick) if tick <= after => Err(Error::input(format!(
            "`next` of a schedule must return a tick at least a microsecond later than its \
             argument, but returned {tick} for {after}: some cron crates do this at clock \
             changes, croner does not"
        ))),
        tick => Ok(tick),
    }
}

/// Returns a function for ticks at each multiple of `period`, counted from 1970.
///
/// For a `period` under a microsecond, a schedule returns an error.
pub fn every(
    period: Duration,
) -> impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Copy + Send + Sync + 'static {
    let period = i64::try_from(period.as_micros()).unwrap_or(i64::MAX);
    move |after| {
        let Some(count) = after.timestamp_micros().checked_div_euclid(period) else {
            // The period is zero. A tick that does not advance is then refused by the schedule.
            return Some(after);
        };
        DateTime::from_timestamp_micros((count + 1).checked_mul(period)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn due(catch_up: CatchUp, first: i64, now: i64) -> (Option<i64>, u32) {
        match catch_up
            .due(&every(Duration::from_secs(10)), at(first), at(now))
            .unwrap()
        {
            Due::Tick(tick, missed) => (Some(tick.timestamp()), missed),
            Due::Later(tick) => (None, tick.map_or(0, |tick| tick.timestamp() as u32)),
        }
    }

    #[test]
    fn the_latest_runs_for_all_that_were_missed() {
        assert_eq!(due(CatchUp::Latest, 10, 10), (Some(10), 0));
        assert_eq!(due(CatchUp::Latest, 10, 19), (Some(10), 0));
        assert_eq!(due(CatchUp::Latest, 10, 47), (Some(40), 3));
    }

    #[test]
    fn the_oldest_of_the_latest_so_many_runs_first() {
        assert_eq!(due(CatchUp::All(3), 10, 47), (Some(20), 1));
        assert_eq!(due(CatchUp::All(9), 10, 47), (Some(10), 0));
    }

    #[test]
    fn a_late_tick_is_skipped() {
        assert_eq!(
            due(CatchUp::Skip(Duration::from_secs(5)), 10, 43),
            (Some(40), 3)
        );
        assert_eq!(
            due(CatchUp::Skip(Duration::from_secs(5)), 10, 46),
            (None, 50)
        );
    }

    #[test]
    fn a_million_missed_ticks_are_not_looked_through() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let calls = AtomicUsize::new(0);
        let ten = every(Duration::from_secs(10));
        let next = |after| {
            calls.fetch_add(1, Ordering::Relaxed);
            ten(after)
        };
        for (catch_up, expected) in [(CatchUp::Latest, 10_000_000), (CatchUp::All(5), 9_999_960)] {
            let Due::Tick(tick, missed) = catch_up.due(&next, at(10), at(10_000_003)).unwrap()
            else {
                panic!("nothing is due")
            };
            assert_eq!((tick.timestamp(), missed as usize), (expected, COUNTED));
        }
        assert!(calls.into_inner() < 4 * COUNTED);
    }

    #[test]
    fn ticks_must_go_on() {
        assert!(following(&|after| Some(after), at(1)).is_err());
        let less_than_a_microsecond =
            |after: DateTime<Utc>| Some(after + TimeDelta::nanoseconds(1));
        assert!(following(&less_than_a_microsecond, at(1)).is_err());
        assert!(matches!(following(&|_| None, at(1)), Ok(None)));
    }
}
