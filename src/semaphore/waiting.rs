//! The polls of a wait for a slot, blocking or asynchronous.

use std::borrow::Cow;
use std::future::Future;
use std::time::{Duration, Instant};

use super::Admission;
use super::wakeups::Waiter;
use crate::backoff::Backoff;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::pollers::Pollers;

/// Polls until a slot is free, or `timeout` has passed.
///
/// `claim` polls once, and waits for a connection as long as it is told at most. `sleep` ends after the pause, or when a
/// release in this process wakes the waiter. `is_closed` tells that the pool never has a connection again.
pub(super) async fn for_slot<P, C, S>(
    waiter: &Waiter,
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
    let mut seen_full = Instant::now();
    let poller = POLLERS.join(waiter.service().clone());
    let mut backoff = Backoff::new();
    let mut surely_free = full.retry_after;
    while let Some(pause) = backoff.next(poller.apart(), surely_free, deadline.remaining()) {
        sleep(pause).await;
        let claimed = claim(deadline.remaining()).await;
        if claimed.is_ok() {
            waiter.has_looked();
        }
        match claimed {
            Ok(Admission::Full(still_full)) => {
                (full, seen_full) = (still_full, Instant::now());
                surely_free = full.retry_after;
            }
            // The pool had no connection in time, or its server is down. The wait for a slot goes on. The hint has passed with the
            // pause, so it must not shorten the next ones.
            Err(Error::Pool(_)) if !is_closed() => surely_free = Duration::MAX,
            outcome => return outcome,
        }
    }
    // The last polls may have had no connection.
    let retry_after = full.retry_after.saturating_sub(seen_full.elapsed());
    full.retry_after = retry_after.max(Duration::from_micros(1));
    Ok(Admission::Full(full))
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use std::cell::RefCell;
    use std::future::ready;
    use std::iter::once;

    use super::*;
    use crate::semaphore::Full;
    use crate::session::now;

    const LONG: Duration = Duration::from_secs(600);
    const SOON: Duration = Duration::from_micros(1);

    fn full(retry_after: Duration) -> Result<Admission<()>> {
        Ok(Admission::Full(Full {
            retry_after,
            service: "geocoder".into(),
            slots: 1,
        }))
    }

    fn no_connection() -> Result<Admission<()>> {
        Err(Error::Pool("the server is down".into()))
    }

    #[test]
    fn the_hint_of_a_wait_without_a_connection_counts_from_the_last_reply() {
        let hint = Duration::from_secs(60);
        let timeout = Duration::from_millis(20);
        let first = RefCell::new(Some(full(hint)));
        let claim = |_| ready(first.borrow_mut().take().unwrap_or_else(no_connection));
        let sleep = |pause| {
            std::thread::sleep(pause);
            ready(())
        };
        let waiter = Waiter::register("geocoder".into());
        let waited = now(for_slot(&waiter, timeout, claim, sleep, || false)).unwrap();
        assert!(waited.full().unwrap().retry_after < hint);
    }

    #[test]
    fn a_hint_shortens_the_pauses_until_the_next_reply_only() {
        // What a claim finds, twenty times after the first, and whether the last pause is long.
        for (name, first, then, is_long) in [
            ("a busy semaphore", LONG, (|| full(LONG)) as fn() -> _, true),
            ("a slot that is free soon", SOON, || full(SOON), false),
            ("an outage", LONG, no_connection, true),
            ("an outage after a hint", SOON, no_connection, true),
        ] {
            let last = once(Ok(Admission::Admitted(())));
            let replies = once(full(first)).chain((0..20).map(|_| then())).chain(last);
            let (replies, pauses) = (RefCell::new(replies), RefCell::new(Vec::new()));
            let claim = |_| ready(replies.borrow_mut().next().unwrap());
            let sleep = |pause| {
                pauses.borrow_mut().push(pause);
                ready(())
            };
            let waiter = Waiter::register(name.into());
            let waited = for_slot(&waiter, LONG, claim, sleep, || false);
            assert_eq!(now(waited).unwrap(), Admission::Admitted(()), "{name}");
            let last = *pauses.borrow().last().unwrap();
            let was_long = last > Duration::from_millis(10);
            assert_eq!(was_long, is_long, "{name}: {last:?}");
        }
    }
}
