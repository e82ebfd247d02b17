//! What this crate does on the runtime of its caller: work that goes on when a future or a guard is dropped.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::runtime::{EnterGuard, Handle};

use crate::error::{Error, Result};
use crate::panics::caught;

/// Returns the runtime that polls this. It is captured while a lock or a slot is acquired, because a guard may be dropped
/// anywhere.
///
/// A runtime without timers is refused, because tokio panics at the first timer. It does not tell whether it has any, so a
/// timer is made. That panic is reported by the hook of the process before it is caught.
pub(crate) fn current() -> Result<Handle> {
    let runtime = Handle::try_current().map_err(|_| Error::NoRuntime)?;
    let timer = || drop(tokio::time::sleep(Duration::ZERO));
    caught(timer).ok_or(Error::NoRuntime)?;
    Ok(runtime)
}

/// Leaves a future to a runtime, as a drop does that cannot await it. A runtime that has ended drops the future at once.
pub(crate) fn leave_to(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
    let _entered = entered(runtime);
    runtime.spawn(future);
}

/// Drops what belongs to a pool inside a runtime, because the pool may need one when it takes a connection back. A panic of the
/// pool ends here, because a panic may be unwinding already.
pub(crate) fn drop_inside(runtime: Option<&Handle>, dropped: impl FnOnce()) {
    let _entered = runtime.map(entered);
    caught(dropped);
}

/// Enters a runtime, because a pool may need one when it takes a connection back or is dropped. `None` while the thread ends
/// and has no place for it any more, where tokio panics.
pub(crate) fn entered(runtime: &Handle) -> Option<EnterGuard<'_>> {
    caught(|| runtime.enter())
}

/// Polls a future, and drops it as soon as it is ready.
fn poll<F: Future>(future: &mut Option<Pin<Box<F>>>, context: &mut Context<'_>) -> Poll<F::Output> {
    let Some(pending) = future else {
        return Poll::Pending; // It was ready before, and must not be polled again.
    };
    let polled = pending.as_mut().poll(context);
    if polled.is_ready() {
        *future = None;
    }
    polled
}

/// A future of a pool, which is dropped inside the runtime that first polled it: it may contain a connection that it was checking.
pub(crate) struct DroppedInside<F: Future> {
    future: Option<Pin<Box<F>>>,
    runtime: Option<Handle>,
}

impl<F: Future> DroppedInside<F> {
    /// Called where the future is then polled.
    pub(crate) fn new(future: F) -> Self {
        Self {
            future: Some(Box::pin(future)),
            runtime: Handle::try_current().ok(),
        }
    }
}

impl<F: Future> Future for DroppedInside<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        poll(&mut self.future, context)
    }
}

impl<F: Future> Drop for DroppedInside<F> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take() {
            drop_inside(self.runtime.as_ref(), || drop(future));
        }
    }
}

/// A future that is polled in place. If it is dropped after its first poll, the runtime finishes it, and its output is
/// dropped there.
///
/// A message is queued when a future is first polled, and the server executes it whether or not the reply is awaited. So the
/// reply must be read, because it says what is to be undone.
pub(crate) struct Finished<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    future: Option<Pin<Box<F>>>,
    is_begun: bool,
    runtime: Handle,
}

impl<F> Finished<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    pub(crate) fn new(runtime: Handle, future: F) -> Self {
        Self {
            future: Some(Box::pin(future)),
            is_begun: false,
            runtime,
        }
    }
}

impl<F> Future for Finished<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.is_begun = true;
        poll(&mut self.future, context)
    }
}

impl<F> Drop for Finished<F>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn drop(&mut self) {
        if let Some(future) = self.future.take().filter(|_| self.is_begun) {
            leave_to(&self.runtime, async move { drop(future.await) });
        }
    }
}
