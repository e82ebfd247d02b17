//! What the workers of both halves do alike with semaphores.

use std::time::{Duration, Instant};

use diesel_interlock::{Admission, Claim, Semaphore};

use super::report::{report, violation};
use crate::clock::{self, Micros};
use crate::record::Record;

pub(super) fn claimed(semaphore: &Semaphore, claim: &Claim, sent: Micros) {
    report(&Record::Claimed {
        service: semaphore.service().to_owned(),
        id: claim.id,
        slot: claim.slot,
        created: claim.created_at.timestamp_micros(),
        sent,
    });
}

pub(super) fn renewed(claim: &Claim, sent: Micros) {
    report(&Record::Renewed {
        id: claim.id,
        created: claim.created_at.timestamp_micros(),
        expires: claim.expires_at.timestamp_micros(),
        sent,
    });
}

pub(super) fn released(claim: &Claim, in_time: bool, sent: Micros) {
    report(&Record::Released {
        id: claim.id,
        created: claim.created_at.timestamp_micros(),
        in_time,
        sent,
    });
}

/// A wait is refused at its timeout, and not before.
pub(super) fn require_patience<P>(attempt: &Admission<P>, sent: Instant, timeout: Duration) {
    if matches!(attempt, Admission::Full(_)) && sent.elapsed() < timeout {
        violation(format!(
            "a wait of {timeout:?} for a slot ended after {:?}",
            sent.elapsed()
        ));
    }
}

/// The time in which a permit reported that it had not timed out. It is reported when this is dropped.
#[derive(Debug)]
pub(super) struct Stay {
    service: &'static str,
    id: i64,
    from: Micros,
    /// `None` if the claim returned so late that the permit had timed out.
    until: Option<Micros>,
}

impl Stay {
    pub(super) fn of(semaphore: &'static Semaphore, id: i64) -> Self {
        Self {
            service: semaphore.service(),
            id,
            from: clock::now(),
            until: None,
        }
    }

    /// Asks the permit how long it remains valid. The clock is read before, so the result is no older than that.
    pub(super) fn is_believed(&mut self, remaining: impl FnOnce() -> Duration) -> bool {
        let now = clock::now();
        let is_valid = !remaining().is_zero();
        if is_valid {
            self.until = Some(now);
        }
        is_valid
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        if let Some(until) = self.until {
            report(&Record::Believed {
                service: self.service.to_owned(),
                id: self.id,
                from: self.from,
                until,
            });
        }
    }
}
