//! The wait for a session lock out of a pool, blocking or asynchronous.

use std::future::Future;
use std::time::Duration;

use super::lock::{Lock, LockMode};
use super::waiter::Waiter;
use crate::attempt::Attempt;
use crate::backoff::Backoff;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::key::LockId;
use crate::pollers::Pollers;

/// How a half of the crate takes a connection, waits on it, and pauses without one.
pub(super) trait Half: Sync {
    /// An acquisition on a connection out of the pool.
    type Acquisition;
    type Guard;

    /// How many connections the waiters may occupy.
    fn budget(&self) -> u32;

    /// Takes a connection, for which it waits for at most `limit`, and tries once.
    fn begin(
        &self,
        waiter: &mut Waiter,
        limit: Duration,
    ) -> impl Future<Output = Result<Self::Acquisition>> + Send;

    /// Waits on the server until the deadline, or until `give_up` returns true after a slice.
    fn wait(
        &self,
        acquisition: &mut Self::Acquisition,
        deadline: Deadline,
        give_up: impl FnMut() -> bool + Send,
    ) -> impl Future<Output = Result<()>> + Send;

    fn is_granted(&self, acquisition: &Self::Acquisition) -> bool;

    /// Makes it the guard of the lock that was granted. Otherwise gives the connection back.
    fn end(&self, acquisition: Self::Acquisition) -> Attempt<Self::Guard>;

    /// Pauses until it is the waiter's turn, for at most `limit`.
    fn turn(&self, waiter: &mut Waiter, limit: Duration) -> impl Future<Output = ()> + Send;

    fn pause(&self, time: Duration) -> impl Future<Output = ()> + Send;

    /// Whether the pool never has a connection again.
    fn is_closed(&self) -> bool {
        false
    }
}

/// Waits for a lock that a try found held. Waits on the server while the connection budget allows it. Otherwise gives the
/// connection back, and tries when the lock is released in this process, and now and then.
pub(super) async fn for_session_lock<H: Half>(
    half: &H,
    mut acquisition: H::Acquisition,
    lock: Lock,
    deadline: Deadline,
) -> Result<Attempt<H::Guard>> {
    static POLLERS: Pollers<LockId> = Pollers::new();
    let mut waiter = Waiter::for_lock(lock.id);
    let mut polling = None;
    while !half.is_granted(&acquisition) {
        if waiter.occupy(half.budget()) {
            polling = None;
            let must_yield = || half.is_closed() || waiter.must_yield(half.budget());
            half.wait(&mut acquisition, deadline, must_yield).await?;
            waiter.vacate();
            if half.is_granted(&acquisition) || deadline.remaining().is_zero() {
                break;
            }
        }
        // The connection is back in the pool before the pause.
        drop(half.end(acquisition));
        let (poller, backoff) =
            polling.get_or_insert_with(|| (POLLERS.join(lock.id), Backoff::new()));
        acquisition = loop {
            let remaining = deadline.remaining();
            let Some(pause) = backoff.next(poller.apart(), Duration::MAX, remaining) else {
                return Ok(Attempt::Busy);
            };
            half.turn(&mut waiter, pause).await;
            match half.begin(&mut waiter, deadline.remaining()).await {
                // The pool had no connection in time, but the wait for the lock is not over.
                Err(Error::Pool(_)) if !half.is_closed() => {
                    half.pause(pause.min(deadline.remaining())).await;
                }
                begun => break begun?,
            }
        };
    }
    if half.is_granted(&acquisition) {
        waiter.took_lock(lock.mode == LockMode::Shared);
    }
    Ok(half.end(acquisition))
}
