//! Decides what comes next, given a function that returns the first tick after a time. Uses no
//! database and no clock: the time is an argument.
//!
//! A row says what comes next: `next_at`, and the scheduled tick that it was counted from. Several
//! loops look at a row, and during a deployment their expressions differ. A loop was not there
//! before `since`, its first look, so its expression was not in force before, and its own next tick
//! is counted from `since` if that is later. Whether a tick that is due is its own is told by
//! counting from `counted_from`.
//!
//! | the row, as a loop sees it | what follows |
//! |---|---|
//! | there is none | [`Plan::from_now`] |
//! | the loop's own next tick is sooner than `next_at` | [`Plan::amend`]: it stores its own |
//! | its first look; `next_at` lies ahead, its own is later | [`Plan::amend`]: it stores its own |
//! | `next_at` is due, and is the loop's own | [`Plan::due`]: missed ticks go by [`CatchUp`] |
//! | `next_at` is due, by another expression | [`Plan::due`]: it runs alone |
//! | what is due is too old for [`CatchUp::Skip`] | [`Plan::due`]: it is passed over |
//! | `next_at` lies ahead | nothing is due |
//!
//! The second row keeps a version whose ticks are more frequent from losing them to one whose ticks
//! are rarer: who claims a tick stores only its own next one. The third does nothing where
//! `next_at` is what the loop itself would have counted, which also holds for a fixed delay,
//! `|t| Some(t + HOUR)`.

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
    /// One run for each of this many latest missed ticks, 1 to 1,000, the oldest first. A larger
    /// number counts as 1,000.
    All(u32),
}

/// What comes next, as a row says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plan {
    /// The scheduled tick that `next_at` was counted from. At first, when the row was made.
    pub(super) counted_from: DateTime<Utc>,
    /// The next tick. `None` if there is none, or if no loop has looked yet.
    pub(super) next_at: Option<DateTime<Utc>>,
}

/// A loop, as far as it matters for what comes next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Observer<N> {
    /// The first tick after a time.
    pub(super) next: N,
    /// When the loop first looked.
    pub(super) since: DateTime<Utc>,
    /// Whether it has not yet compared its own next tick with that of a row.
    pub(super) is_new: bool,
    pub(super) catch_up: CatchUp,
}

/// How a loop changes what comes next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Amendment {
    /// The loop's own next tick is sooner.
    Sooner(Plan),
    /// The expression was edited: the loop is new, and its next tick is later.
    Edited(Plan),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// This tick is due. So many ticks before it were missed and are not run.
    Tick {
        at: DateTime<Utc>,
        missed: u32,
        /// What comes after it.
        then: Plan,
    },
    /// What is due is too old to run. What comes after it.
    PassedOver(Plan),
    /// Nothing is due now. The next tick, if there is one.
    Later(Option<DateTime<Utc>>),
}

impl Plan {
    /// The plan of a new row.
    pub(super) fn from_now<N: Next>(next: &N, now: DateTime<Utc>) -> Result<Self> {
        Self::counted(next, now, now)
    }

    /// Counts from a tick, or from a later time at which the loop was not there yet.
    fn counted<N: Next>(
        next: &N,
        counted_from: DateTime<Utc>,
        since: DateTime<Utc>,
    ) -> Result<Self> {
        Ok(Self {
            counted_from,
            next_at: following(next, counted_from.max(since))?,
        })
    }

    /// What the loop stores instead.
    pub(super) fn amend<N: Next>(
        self,
        of: &Observer<N>,
        now: DateTime<Utc>,
    ) -> Result<Option<Amendment>> {
        let own = Self::counted(&of.next, self.counted_from, of.since)?;
        // No tick is later than any.
        let sorted = |tick: Option<DateTime<Utc>>| (tick.is_none(), tick);
        if sorted(own.next_at) < sorted(self.next_at) {
            return Ok(Some(Amendment::Sooner(own)));
        }
        let is_ahead = self.next_at.is_some_and(|next_at| next_at > now);
        let is_edited = of.is_new
            && is_ahead
            && own != self
            && following(&of.next, self.counted_from)? != self.next_at;
        Ok(is_edited.then_some(Amendment::Edited(own)))
    }

    /// Decides which tick runs now.
    pub(super) fn due<N: Next>(self, of: &Observer<N>, now: DateTime<Utc>) -> Result<Due> {
        let Some(next_at) = self.next_at.filter(|next_at| *next_at <= now) else {
            return Ok(Due::Later(self.next_at));
        };
        let next = &of.next;
        let is_own = following(next, self.counted_from)? == self.next_at;
        let (at, missed, then) = if is_own {
            let (at, missed) = of.catch_up.choose(next, next_at, now)?;
            (at, missed, Self::counted(next, at, at)?)
        } else {
            (next_at, 0, Self::counted(next, next_at, of.since)?)
        };
        Ok(if of.catch_up.is_over(at, now) {
            Due::PassedOver(then)
        } else {
            Due::Tick { at, missed, then }
        })
    }
}

/// A function that returns the first tick after a time.
pub(super) trait Next: Fn(DateTime<Utc>) -> Option<DateTime<Utc>> {}
impl<N: Fn(DateTime<Utc>) -> Option<DateTime<Utc>>> Next for N {}

impl CatchUp {
    /// Whether a tick is too old to run, including to run again.
    pub(super) fn is_over(self, tick: DateTime<Utc>, now: DateTime<Utc>) -> bool {
        let is_late = |grace| (now - tick).to_std().is_ok_and(|late| late > grace);
        matches!(self, Self::Skip(grace) if is_late(grace))
    }

    /// Chooses one of the ticks from `first` on that are due, and counts those before it.
    fn choose(
        self,
        next: &impl Next,
        first: DateTime<Utc>,
        now: DateTime<Utc>,
    ) -> Result<(DateTime<Utc>, u32)> {
        let most = match self {
            Self::All(max) => (max as usize).min(COUNTED),
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
        let chosen = due.front().copied().unwrap_or(first);
        Ok((chosen, missed.min(COUNTED) as u32))
    }
}

/// Finds a time between `after` and `now`, shortly before `now`, with at least `wanted` ticks from
/// there to `now`.
fn before(
    next: &impl Next,
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
pub(super) fn following(next: &impl Next, after: DateTime<Utc>) -> Result<Option<DateTime<Utc>>> {
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
mod histories;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(seconds, 0).unwrap()
    }

    fn observer<N: Next>(next: N, since: i64, catch_up: CatchUp) -> Observer<N> {
        Observer {
            next,
            since: at(since),
            is_new: true,
            catch_up,
        }
    }

    fn plan(counted_from: i64, next_at: i64) -> Plan {
        Plan {
            counted_from: at(counted_from),
            next_at: Some(at(next_at)),
        }
    }

    fn ten() -> impl Next {
        every(Duration::from_secs(10))
    }

    /// The tick, how many were missed, and what comes after it.
    fn due(catch_up: CatchUp, first: i64, now: i64) -> (Option<i64>, u32, i64) {
        let plan = plan(first - 10, first);
        let then = |plan: Plan| plan.next_at.unwrap().timestamp();
        match plan.due(&observer(ten(), now, catch_up), at(now)).unwrap() {
            Due::Tick {
                at,
                missed,
                then: plan,
            } => (Some(at.timestamp()), missed, then(plan)),
            Due::PassedOver(plan) => (None, 0, then(plan)),
            Due::Later(next_at) => (None, 0, next_at.unwrap().timestamp()),
        }
    }

    #[test]
    fn the_latest_runs_for_all_that_were_missed() {
        assert_eq!(due(CatchUp::Latest, 10, 9), (None, 0, 10));
        assert_eq!(due(CatchUp::Latest, 10, 10), (Some(10), 0, 20));
        assert_eq!(due(CatchUp::Latest, 10, 19), (Some(10), 0, 20));
        assert_eq!(due(CatchUp::Latest, 10, 47), (Some(40), 3, 50));
    }

    #[test]
    fn the_oldest_of_the_latest_so_many_runs_first() {
        assert_eq!(due(CatchUp::All(3), 10, 47), (Some(20), 1, 30));
        assert_eq!(due(CatchUp::All(9), 10, 47), (Some(10), 0, 20));
    }

    #[test]
    fn a_late_tick_is_passed_over() {
        let skip = CatchUp::Skip(Duration::from_secs(5));
        assert_eq!(due(skip, 10, 43), (Some(40), 3, 50));
        assert_eq!(due(skip, 10, 46), (None, 0, 50));
    }

    #[test]
    fn a_tick_of_another_expression_runs_alone() {
        for catch_up in [CatchUp::Latest, CatchUp::All(9)] {
            // Counted by every 7 seconds. Since 40 it is every 10.
            let due = plan(7, 14).due(&observer(ten(), 40, catch_up), at(47));
            let expected = Due::Tick {
                at: at(14),
                missed: 0,
                then: plan(14, 50),
            };
            assert_eq!(due.unwrap(), expected);
        }
    }

    #[test]
    fn a_loop_brings_its_own_tick_forward_and_a_new_one_also_puts_it_off() {
        let mut observer = observer(ten(), 25, CatchUp::Latest);
        let amend = |plan: Plan, observer: &_| plan.amend(observer, at(25)).unwrap();
        let own = |counted_from| plan(counted_from, 30);
        // What was counted by another expression, or is not known.
        assert_eq!(
            amend(plan(7, 77), &observer),
            Some(Amendment::Sooner(own(7)))
        );
        let unknown = Plan {
            counted_from: at(7),
            next_at: None,
        };
        assert_eq!(amend(unknown, &observer), Some(Amendment::Sooner(own(7))));
        assert_eq!(
            amend(plan(7, 27), &observer),
            Some(Amendment::Edited(own(7)))
        );
        // What is due, and what the loop itself has counted, stays.
        assert_eq!(amend(plan(7, 24), &observer), None);
        assert_eq!(amend(plan(20, 30), &observer), None);
        observer.is_new = false;
        assert_eq!(amend(plan(7, 27), &observer), None);
    }

    #[test]
    fn a_fixed_delay_is_not_put_off_by_each_new_loop() {
        let delay = |after| Some(after + TimeDelta::seconds(10));
        let observer = observer(delay, 9, CatchUp::Latest);
        assert_eq!(plan(0, 10).amend(&observer, at(9)).unwrap(), None);
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
            let now = 10_000_003;
            let due = plan(0, 10).due(&observer(next, now, catch_up), at(now));
            let Due::Tick { at, missed, .. } = due.unwrap() else {
                panic!("nothing is due")
            };
            assert_eq!((at.timestamp(), missed as usize), (expected, COUNTED));
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
