//! The wait for units, blocking or asynchronous.

use std::future::Future;
use std::time::Duration;

use super::{Limited, LimitedReason};
use crate::clock::Deadline;
use crate::error::Result;

/// How long a wait pauses after another transaction held the key, before it asks again.
const PAUSE: Duration = Duration::from_millis(20);

/// Reserves, and asks again while another transaction holds the key. The units may be used when the wait of the reservation
/// is over.
pub(super) async fn for_reservation<T, R, S>(
    deadline: Deadline,
    mut reserve: impl FnMut() -> R,
    pause: impl Fn(Duration) -> S,
) -> Result<Result<T, Limited>>
where
    R: Future<Output = Result<Result<T, Limited>>>,
    S: Future<Output = ()>,
{
    loop {
        let reserved = reserve().await?;
        let remaining = deadline.remaining();
        match reserved {
            Err(Limited {
                reason: LimitedReason::Contended,
                ..
            }) if !remaining.is_zero() => pause(PAUSE.min(remaining)).await,
            reserved => return Ok(reserved),
        }
    }
}
