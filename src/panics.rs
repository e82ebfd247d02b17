//! What a panic of the caller's code must not break.
//!
//! Diesel's instrumentation, r2d2's handlers and `tracing`'s subscribers are the caller's code, and run with every
//! statement and event of ours. A panic there must neither end a thread of this crate, nor abort the process while
//! another panic unwinds, nor make a mutex useless to everybody else. What our mutexes protect is changed in single
//! steps, so it is whole whenever such a panic strikes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{LockResult, Mutex, MutexGuard, PoisonError};

/// Calls it. Returns `None` if it panicked.
pub(crate) fn caught<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}

/// Locks the mutex, also after a panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    unpoisoned(mutex.lock())
}

/// What a mutex or a condition variable returned, also after a panic.
pub(crate) fn unpoisoned<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}
