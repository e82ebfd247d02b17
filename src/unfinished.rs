//! What drops have left to the background, for [`drain`](crate::drain).
//!
//! Only two values, one of each for the whole process, because it is the process that ends: the
//! number of operations that drops have left behind, and the time when a connection in doubt was
//! last closed. Renewals are not counted, because what they renew was not dropped.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::alarm::lock;

/// How many operations go on although nobody awaits them.
static UNFINISHED: AtomicUsize = AtomicUsize::new(0);

/// When a connection was last closed whose session may hold something.
static CLOSED: Mutex<Option<Instant>> = Mutex::new(None);

/// An operation that goes on although nobody awaits it, until it has ended or its runtime has
/// dropped it.
pub(crate) struct Unfinished(());

impl Unfinished {
    pub(crate) fn new() -> Self {
        UNFINISHED.fetch_add(1, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        UNFINISHED.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Notes that a connection was closed whose session may hold something. The server frees that
/// within a second.
pub(crate) fn note_closed() {
    *lock(&CLOSED) = Some(Instant::now());
}

pub(crate) fn has_drained() -> bool {
    // The server checks every second, from when the end of the connection reaches it, so wait a
    // little longer.
    let is_recent = |closed: Instant| closed.elapsed() <= Duration::from_millis(1500);
    UNFINISHED.load(Ordering::SeqCst) == 0 && !lock(&CLOSED).is_some_and(is_recent)
}
