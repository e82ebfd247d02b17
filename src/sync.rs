//! The clock and the locks of what waits. The model in `tools/waits` compiles the same files over a
//! module of this name that is its own: a clock that it moves, and locks whose order it chooses.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use std::sync::{Condvar, LazyLock, Mutex, MutexGuard};
pub(crate) use std::time::Instant;
