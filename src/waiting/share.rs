//! How a process shares slots with the other processes that wait for them.

use std::time::Duration;

use super::{LONGEST_SPAN, SHORTEST_SPAN, YIELD};
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
    pub(super) const fn new() -> Self {
        Self {
            since: None,
            span: SHORTEST_SPAN,
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
        let until = now + YIELD;
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
                SHORTEST_SPAN
            } else {
                (self.span * 2).min(LONGEST_SPAN)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A share that yields, and until when.
    fn yielding() -> (Share, Instant) {
        let (mut share, began) = (Share::new(), Instant::now());
        assert_eq!(share.note_release(began), began);
        let until = share.note_release(began + SHORTEST_SPAN);
        assert_eq!(until, began + SHORTEST_SPAN + YIELD);
        (share, until)
    }

    /// How long after `now` the process lives on its own releases until it yields.
    fn span(share: &mut Share, now: Instant) -> Duration {
        let is_at_once = |span: Duration| Share { ..*share }.note_release(now + span) == now + span;
        let spans = [0, 1, 2, 4, 8, 16, 20].map(|n| n * SHORTEST_SPAN);
        let longest = spans
            .into_iter()
            .rfind(|span| is_at_once(*span - MS.min(*span)));
        longest.unwrap()
    }

    #[test]
    fn a_release_within_the_first_span_wakes_at_once() {
        let (mut share, began) = (Share::new(), Instant::now());
        for release in [began, began + 200 * MS, began + SHORTEST_SPAN - MS] {
            assert_eq!(share.note_release(release), release);
        }
    }

    #[test]
    fn while_slots_are_left_to_others_each_release_waits_for_the_end_of_that() {
        let (mut share, until) = yielding();
        assert_eq!(share.note_release(until - MS), until);
        // The oldest has not tried yet.
        assert_eq!(share.note_release(until + MS), until + MS);
    }

    #[test]
    fn a_try_while_slots_are_left_to_others_decides_nothing() {
        let (mut share, until) = yielding();
        share.note_try(until - MS, true);
        share.note_try(until - MS, false);
        assert_eq!(share.yields_until, Some(until));
    }

    #[test]
    fn if_nobody_takes_the_slots_the_next_span_is_longer_up_to_a_bound() {
        let (mut share, mut now) = yielding();
        for doublings in 1..8 {
            share.note_try(now, false);
            let next = (SHORTEST_SPAN * 2_u32.pow(doublings)).min(LONGEST_SPAN);
            assert_eq!(span(&mut share, now), next);
            now = share.note_release(now + next);
        }
    }

    #[test]
    fn if_others_take_the_slots_the_next_span_is_the_first_again_from_the_next_release() {
        let (mut share, until) = yielding();
        share.note_try(until, false);
        let until = share.note_release(until + 2 * SHORTEST_SPAN);
        share.note_try(until, true);
        let release = until + 7 * SHORTEST_SPAN;
        assert_eq!(share.note_release(release), release);
        assert_eq!(span(&mut share, release), SHORTEST_SPAN);
    }
}
