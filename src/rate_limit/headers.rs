//! The HTTP header fields of a check.

use std::fmt::Write;
use std::time::Duration;

use super::Quota;
use crate::headers::{self, Headers, LARGEST};
use crate::time;

/// What the fields tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Told<'a> {
    pub(super) name: &'a str,
    pub(super) partition_key: Option<&'a [u8]>,
    pub(super) quota: Quota,
    pub(super) remaining: u32,
    /// How long until the key is full.
    pub(super) full_in: Duration,
    /// If the call was limited, when it may be repeated, unless it never may.
    pub(super) limited: Option<Option<Duration>>,
}

impl Told<'_> {
    pub(super) fn headers(self) -> Headers {
        let Quota { burst, .. } = self.quota;
        let retry_after = self.limited.flatten().map(time::whole_seconds);
        let (r, t) = match retry_after {
            // What is refilled until then may be less than what is left.
            Some(seconds) => {
                let seconds = u128::from(seconds);
                let refilled =
                    seconds * 1_000_000 * u128::from(self.quota.n) / self.quota.period_us().max(1);
                (refilled.min(self.remaining.into()), seconds)
            }
            None => (self.remaining.into(), self.seconds_of_the_rest()),
        };
        let mut policy = headers::string(self.name);
        let mut limit = policy.clone();
        let _ = write!(policy, ";q={burst}");
        let window = self.quota.time_of(burst);
        if window >= 1_000_000 {
            let _ = write!(policy, ";w={}", window.div_ceil(1_000_000).min(LARGEST));
        }
        let _ = write!(limit, ";r={r};t={}", t.min(LARGEST));
        if let Some(key) = self.partition_key {
            let key = headers::base64(key);
            let _ = write!(policy, ";pk=:{key}:");
            let _ = write!(limit, ";pk=:{key}:");
        }
        Headers {
            policy,
            limit,
            retry_after: retry_after.map(|seconds| u128::from(seconds).min(LARGEST).to_string()),
        }
    }

    /// The whole seconds in which the quota refills what is left, or until it has refilled a unit if nothing is.
    fn seconds_of_the_rest(self) -> u128 {
        let time = match self.remaining {
            0 => {
                let room = self.quota.room_for(1).unwrap_or(0);
                self.full_in.as_micros().saturating_sub(room)
            }
            rest => self.quota.time_of(rest),
        };
        time.div_ceil(1_000_000).max(1)
    }
}
