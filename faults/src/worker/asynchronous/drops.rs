//! Operations that are dropped before they are done: at some await point, with their task, or because another future was
//! ready first.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;

use fastrand::Rng;
use tokio::task::JoinError;
use tokio::time::{sleep, timeout};

use crate::chance::Chance;
use crate::fault::Fault;
use crate::record::Record;
use crate::worker::report::report;

/// Performs an operation in a task of its own. Returns `None` if it was dropped, which is reported as a fault.
pub(super) async fn perform<F>(
    random: &mut Rng,
    operation: F,
) -> Option<Result<F::Output, JoinError>>
where
    F: Future<Output: Send> + Send + 'static,
{
    let is_short = random.one_in(4);
    let time = random.millis(0, if is_short { 3 } else { 200 });
    let (ended, kind) = match random.u64(..10) {
        0 => {
            let polls = random.u32(1..=if is_short { 4 } else { 40 });
            let task = tokio::spawn(at_most(polls, operation));
            (task.await.transpose(), Fault::DroppedFuture)
        }
        1 => {
            let mut task = tokio::spawn(operation);
            let ended = match timeout(time, &mut task).await {
                Ok(ended) => ended,
                Err(_) => {
                    task.abort();
                    task.await
                }
            };
            let was_aborted = matches!(&ended, Err(error) if error.is_cancelled());
            ((!was_aborted).then_some(ended), Fault::AbortedTask)
        }
        2 => {
            let task = tokio::spawn(async move {
                tokio::select! {
                    output = operation => Some(output),
                    () = sleep(time) => None,
                }
            });
            (task.await.transpose(), Fault::LostSelect)
        }
        _ => return Some(tokio::spawn(operation).await),
    };
    if ended.is_none() {
        report(&Record::Fault { kind });
    }
    ended
}

/// Polls a future until it is ready, or so many times, and drops it. A future is polled each time that something happens that
/// it waits for.
pub(super) async fn at_most<F: Future>(mut polls: u32, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|context| {
        polls = polls.saturating_sub(1);
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
