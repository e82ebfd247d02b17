//! Waiting for something that happens soon.

use std::thread;
use std::time::{Duration, Instant};

/// Waits until `happened`, and panics if that takes half a minute.
#[track_caller]
pub(crate) fn until(what: &str, happened: impl FnMut() -> bool) {
    assert!(soon(happened), "waited in vain until {what}");
}

/// Waits until `happened`, and says whether it did within half a minute.
pub(crate) fn soon(mut happened: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happened() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
    true
}
