//! Panics of the caller's code inside this crate.
//!
//! Diesel's instrumentation, r2d2's handlers and the subscribers of `tracing` are the caller's code, and run with every
//! statement and event of this crate. A panic there must not end a thread of this crate, must not abort the process while
//! another panic unwinds, and must not make a mutex unusable. Each change under a mutex of this crate is a single step, so its
//! data is consistent after such a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Makes a call. Returns `None` if it panicked.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}

/// Awaits a future. Returns `None` if it panicked.
#[cfg(feature = "async")]
pub(crate) async fn caught_while_awaited<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| match caught(|| future.as_mut().poll(context)) {
        Some(polled) => polled.map(Some),
        None => std::task::Poll::Ready(None),
    })
    .await
}

/// Locks a mutex, even after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// Unwraps what a mutex or a condition variable returned, even after a panic.
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
