//! What a semaphore answers where a slot is asked for.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::query::Answer;
use crate::attempt::Attempt;
use crate::events::Outcome;
use crate::time::{self, Timestamp};

/// A slot of a semaphore that was claimed, as plain data: for work that ends elsewhere than it
/// began, in another thread, process or program.
///
/// Nothing frees the slot but [`Semaphore::complete_on`](crate::Semaphore::complete_on) (or the
/// function `resource_control.complete_service_request`) and the time-out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "unless it is completed, its slot stays taken until it times out"]
#[non_exhaustive]
pub struct Claim {
    /// The row's `id` in `resource_control.service_request`, which completes and renews it. It is
    /// the fencing token as well.
    pub id: i64,
    /// Which slot, from 0 on.
    pub slot: i16,
    /// When it was claimed, by the database's clock.
    pub created_at: DateTime<Utc>,
    /// When it times out, by the database's clock.
    pub expires_at: DateTime<Utc>,
}

/// The answer of a semaphore, which tells when to ask again if it is full.
///
/// The forms that answer [`Attempt`] say the same without the hint.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "if a slot was claimed, dropping the answer releases it, or leaves it to its time-out"]
pub enum Admission<P> {
    /// A slot is ours.
    Admitted(P),
    /// Every slot is taken. Nothing was changed, and nothing is held.
    Full(Full),
}

impl<P> Admission<P> {
    /// Forgets the hint.
    pub fn into_attempt(self) -> Attempt<P> {
        match self {
            Admission::Admitted(inner) => Attempt::Acquired(inner),
            Admission::Full(_) => Attempt::Busy,
        }
    }

    /// How an event names it.
    pub(super) const fn outcome(&self) -> Outcome {
        match self {
            Admission::Admitted(_) => Outcome::Acquired,
            Admission::Full(_) => Outcome::Busy,
        }
    }

    #[cfg(feature = "r2d2")]
    pub(super) fn map<T>(self, f: impl FnOnce(P) -> T) -> Admission<T> {
        match self {
            Admission::Admitted(inner) => Admission::Admitted(f(inner)),
            Admission::Full(full) => Admission::Full(full),
        }
    }
}

/// A semaphore without a free slot, and when to ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Full {
    /// How long until a slot is free at the latest, by the database's clock: always above zero. That is when the
    /// first of the requests in flight times out, or as many as are in flight beyond a number of slots that was
    /// lowered, and one more. A hint, because most are released long before, and some are renewed. Where those in
    /// flight are being claimed right now, the time-out of the semaphore.
    pub retry_after: Duration,
}

impl Full {
    /// Whole seconds until a slot is free at the latest, rounded up: what HTTP's `Retry-After` wants.
    /// At least 1.
    pub fn retry_after_secs(&self) -> u64 {
        time::whole_seconds(self.retry_after)
    }
}

/// `timeout` is that of the semaphore.
pub(super) fn from_answer(answer: &Answer, timeout: Duration) -> Admission<Claim> {
    if let (Some(id), Some(slot), Some(created_at), Some(expires_at)) = (
        answer.id,
        answer.slot,
        answer.created_at.and_then(Timestamp::at),
        answer.expires_at.and_then(Timestamp::at),
    ) {
        return Admission::Admitted(Claim {
            id,
            slot,
            created_at,
            expires_at,
        });
    }
    let next_expiry = answer.next_expiry.and_then(Timestamp::at);
    let retry_after = match (next_expiry, answer.answered_at.at()) {
        (Some(next), Some(now)) => (next - now)
            .to_std()
            .unwrap_or_default()
            .max(Duration::from_micros(1)),
        _ => timeout,
    };
    Admission::Full(Full { retry_after })
}

#[cfg(test)]
mod tests {
    use diesel::data_types::PgTimestamp;

    use super::*;

    fn full(next_expiry: Option<i64>) -> Duration {
        let answer = Answer {
            id: None,
            slot: None,
            created_at: None,
            expires_at: None,
            answered_at: PgTimestamp(7_000_000).into(),
            next_expiry: next_expiry.map(|next| PgTimestamp(next).into()),
        };
        match from_answer(&answer, Duration::from_secs(30)) {
            Admission::Full(full) => full.retry_after,
            Admission::Admitted(claim) => panic!("{claim:?}"),
        }
    }

    #[test]
    fn the_hint_is_the_time_until_the_next_expiry_and_never_zero() {
        assert_eq!(full(Some(8_500_000)), Duration::from_millis(1500));
        assert_eq!(full(Some(7_000_000)), Duration::from_micros(1));
        assert_eq!(full(Some(6_000_000)), Duration::from_micros(1));
    }

    #[test]
    fn where_no_expiry_is_known_the_hint_is_the_time_out() {
        assert_eq!(full(None), Duration::from_secs(30));
        assert_eq!(full(Some(i64::MAX)), Duration::from_secs(30));
    }
}
