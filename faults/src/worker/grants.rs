//! What the workers of both halves do alike with throttles.

use diesel_interlock::{Grant, Throttle, ThrottledResource};
use fastrand::Rng;

use super::report::report;
use crate::chance::Chance;
use crate::clock::{self, Micros};
use crate::record::{Outcome, Record};
use crate::subjects::{self, Resource};

/// A throttle that is to be attempted, with or without a key.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    resource: Resource,
    key: String,
    /// A time before the attempt.
    sent: Micros,
}

impl Wanted {
    pub(super) fn any(random: &mut Rng) -> Self {
        let resource = if random.one_in(3) {
            Resource::Slow
        } else {
            Resource::Quick
        };
        let key = match random.u64(..2 * subjects::KEYS) {
            key if key < subjects::KEYS => format!("key {key}"),
            _ => String::new(),
        };
        Self {
            resource,
            key,
            sent: clock::now(),
        }
    }

    pub(super) fn throttle(&self) -> Throttle<Resource> {
        let throttle = Throttle::of(self.resource).details("a worker of the campaign");
        if self.key.is_empty() {
            throttle
        } else {
            throttle.key(&self.key)
        }
    }

    /// Reports a grant that was committed.
    pub(super) fn outcome(self, granted: Option<Grant>) -> Outcome {
        let Some(grant) = granted else {
            return Outcome::Busy;
        };
        report(&Record::Granted {
            resource: self.resource.label().to_owned(),
            key: self.key,
            at: grant.granted_at.timestamp_micros(),
            sent: self.sent,
        });
        Outcome::Done
    }
}
