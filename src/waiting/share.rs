//! How a process shares slots with the other processes that wait for them.

use std::time::Duration;

use crate::sync::Instant;

/// Keeps a process from taking all slots. Processes have no common queue for slots on the server: a
/// release wakes a waiter of this process at once, while waiters of other processes poll. So after
/// a process has lived on its own releases for a span, it leaves free slots to the others, for as
/// long as one of their polls takes. If none of them takes a slot, the next span is longer.
#[derive(Debug)]
pub(super) struct Share {
    since: Option<Instant>,
    span: Duration,
    /// Until when free slots are left to other processes.
    pub(super) yields_until: Option<Instant>,
}

impl Share {
    const SHORTEST: Duration = Duration::from_millis(500);
    const LONGEST: Duration = Duration::from_secs(10);
    /// The longest pause of a poll, and a margin. Round trips cancel out: they add as much to the
    /// time between two polls of another process as to the time from a release here to the next try
    /// of this process.
    const YIELD: Duration = Duration::from_millis(140);
    /// How much later than the oldest a newcomer tries.
    pub(super) const AFTER_THE_OLDEST: Duration = Duration::from_millis(20);

    pub(super) const fn new() -> Self {
        Self {
            since: None,
            span: Self::SHORTEST,
            yields_until: None,
        }
    }

    /// Notes that a slot was released in this process. Returns when the oldest may try.
    pub(super) fn note_release(&mut self, now: Instant) -> Instant {
        if let Some(until) = self.yields_until {
            return until.max(now);
        }
        let since = *self.since.get_or_insert(now);
        if now.duration_since(since) < self.span {
            return now;
        }
        let until = now + Self::YIELD;
        self.yields_until = Some(until);
        until
    }

    /// Notes that the oldest has tried, and whether other processes had taken the slots that were
    /// left to them.
    pub(super) fn note_try(&mut self, now: Instant, is_taken: bool) {
        if self.yields_until.is_some_and(|until| until <= now) {
            self.yields_until = None;
            self.since = if is_taken { None } else { Some(now) };
            self.span = if is_taken {
                Self::SHORTEST
            } else {
                (self.span * 2).min(Self::LONGEST)
            };
        }
    }
}
