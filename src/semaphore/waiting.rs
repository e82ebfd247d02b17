//! The polls of a wait for a slot, blocking or asynchronous.

use std::borrow::Cow;
use std::future::Future;
use std::time::Duration;

use super::Admission;
use crate::backoff::Backoff;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::pollers::Pollers;

/// Polls until a slot is free, or `timeout` has passed.
///
/// `claim` polls once, and waits for a connection as long as it is told at most. `sleep` ends after the pause, or when a
/// release in this process wakes the waiter. `is_closed` tells that the pool never has a connection again.
pub(super) async fn for_slot<P, C, S>(
    service: Cow<'static, str>,
    timeout: Duration,
    claim: impl Fn(Duration) -> C,
    sleep: impl Fn(Duration) -> S,
    is_closed: impl Fn() -> bool,
) -> Result<Admission<P>>
where
    C: Future<Output = Result<Admission<P>>>,
    S: Future<Output = ()>,
{
    static POLLERS: Pollers<Cow<'static, str>> = Pollers::new();
    let deadline = Deadline::after(timeout);
    let mut full = match claim(timeout).await? {
        Admission::Full(full) => full,
        admitted => return Ok(admitted),
    };
    let poller = POLLERS.join(service);
    let mut backoff = Backoff::new();
    while let Some(pause) = backoff.next(poller.apart(), full.retry_after, deadline.remaining()) {
        sleep(pause).await;
        match claim(deadline.remaining()).await {
            Ok(Admission::Full(still_full)) => full = still_full,
            // All connections were in use for the pool's timeout. The wait for a slot goes on.
            Err(Error::Pool(_)) if !is_closed() => {}
            outcome => return outcome,
        }
    }
    Ok(Admission::Full(full))
}
