//! The slot that a permit holds, without the pool by which it is released. Both halves share it.

use std::borrow::Cow;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::{Claim, Semaphore};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::panics::lock;

/// A claimed slot, and how long it lasts.
#[derive(Debug, Clone)]
pub(super) struct HeldSlot {
    pub(super) claim: Claim,
    pub(super) service: Cow<'static, str>,
    /// The timeout of the semaphore, for renewals.
    pub(super) timeout: Duration,
    /// Before the claim, or the latest renewal, was sent.
    sent: Moment,
    /// How long the permit lasts from then on. Zero once the server has reported that it timed out.
    lasts: Duration,
    since: Instant,
}

impl HeldSlot {
    /// `sent` is when the claim was sent, or before.
    pub(super) fn new(semaphore: &Semaphore, claim: Claim, sent: Moment) -> Self {
        Self {
            claim,
            service: semaphore.service.clone(),
            timeout: semaphore.timeout,
            sent,
            lasts: semaphore.timeout,
            since: Instant::now(),
        }
    }

    /// Returns how long the slot is held at least. Zero if it may have timed out.
    pub(super) fn remaining(&self) -> Duration {
        self.lasts.saturating_sub(self.sent.elapsed())
    }

    /// Takes in what a renewal returned that was sent at `sent`, or later. Returns when the slot expires.
    pub(super) fn renewed(
        &mut self,
        sent: Moment,
        renewed: Option<DateTime<Utc>>,
    ) -> Result<DateTime<Utc>> {
        match renewed {
            Some(expires_at) => {
                (self.sent, self.lasts) = (sent, self.timeout);
                self.claim.expires_at = expires_at;
                Ok(expires_at)
            }
            None => {
                self.lasts = Duration::ZERO;
                Err(self.timed_out())
            }
        }
    }

    /// Returns what a completion means that ended the request, or found that it had ended before.
    pub(super) fn completed(&self, completed: bool) -> Result<()> {
        if completed {
            Ok(())
        } else {
            Err(self.timed_out())
        }
    }

    pub(super) fn record_renewal(&self, renewed: &Result<DateTime<Utc>>) {
        events::record(&Event::of("renew", self.subject(), renewed, |_| {
            Outcome::Renewed
        }));
    }

    pub(super) fn record_release(&self, released: &Result<()>) {
        let event = Event::of("release", self.subject(), released, |()| Outcome::Released);
        events::record(&event.held_since(self.since));
    }

    /// Records that a release is left to the background.
    pub(super) fn record_deferral(&self) {
        let deferred = Event::new("release", self.subject(), Outcome::Deferred);
        events::record(&deferred.held_since(self.since));
    }

    /// Returns what is left to release in the background.
    pub(super) fn late_release(&self) -> LateRelease {
        LateRelease {
            service: self.service.clone(),
            id: self.claim.id,
            deadline: self.sent.monotonic().checked_add(self.lasts),
            retries: Mutex::new(Retries {
                pause: PAUSE,
                backoff: Backoff::between(PAUSE, LONGEST_PAUSE),
            }),
        }
    }

    fn subject(&self) -> Subject<'_> {
        Subject::Semaphore {
            service: &self.service,
            id: Some(self.claim.id),
        }
    }

    fn timed_out(&self) -> Error {
        Error::TimedOut {
            service: self.service.to_string(),
            id: self.claim.id,
        }
    }
}

/// How long the background waits for a connection at a time. A busy pool has no idle connection, and hands each one to a caller
/// that waits.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// How long the background pauses before it retries a release, at first.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// How long it pauses on average, at most. A slot stays taken for as long after a connection was there again.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// A release that found no idle connection, and is retried in the background until the slot has timed out.
#[derive(Debug)]
pub(super) struct LateRelease {
    pub(super) service: Cow<'static, str>,
    pub(super) id: i64,
    /// When the request has timed out, and there is nothing left to release. By the monotonic clock alone, because a
    /// release that comes too late changes nothing, but a release that is given up too early, after the wall clock was
    /// set forward, keeps the slot taken.
    deadline: Option<Instant>,
    retries: Mutex<Retries>,
}

#[derive(Debug)]
struct Retries {
    pause: Duration,
    backoff: Backoff,
}

impl LateRelease {
    /// How long the slot lasts from now on.
    pub(super) fn remaining(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |end| {
            end.saturating_duration_since(Instant::now())
        })
    }

    /// Returns how long to pause before the next retry.
    pub(super) fn pause(&self) -> Duration {
        lock(&self.retries).pause
    }

    /// Makes the next pauses longer after a retry that failed, because the server may be down, or a standby, for long.
    pub(super) fn failed(&self) {
        let retries = &mut *lock(&self.retries);
        let pause = (retries.backoff).next(Duration::ZERO, Duration::MAX, self.remaining());
        retries.pause = pause.unwrap_or_default();
    }

    /// Returns whether the slot has timed out, and records it.
    pub(super) fn is_over(&self) -> bool {
        let is_over = self.deadline.is_some_and(|end| end <= Instant::now());
        if is_over {
            self.record_timeout();
        }
        is_over
    }

    /// Records that the slot is free by its timeout only.
    pub(super) fn record_timeout(&self) {
        let request = Subject::Semaphore {
            service: &self.service,
            id: Some(self.id),
        };
        events::record(&Event::new("release", request, Outcome::TimedOut));
    }
}
