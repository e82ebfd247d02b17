//! The locks, semaphores and throttles that the workers contend for.

use std::time::Duration;

use diesel_interlock::{AdvisoryLock, Fence, LockKey, Semaphore, throttled_resources};

throttled_resources! {
    /// The throttles.
    pub(crate) enum Resource {
        Quick = "quick" every Duration::from_millis(60),
        Slow = "slow" every Duration::from_millis(500),
    }
}

pub(crate) const LOCKS: u64 = 6;
pub(crate) const BOOKINGS: u64 = 4;
pub(crate) const KEYS: u64 = 4;

/// The semaphores have few slots, and timeouts that are shorter than some processes are frozen.
pub(crate) static SEMAPHORES: [Semaphore; 3] = [
    Semaphore::named("short", 3, Duration::from_millis(700)),
    Semaphore::named("lease", 1, Duration::from_millis(500)),
    Semaphore::named("long", 5, Duration::from_secs(3)),
];

/// The semaphore that is claimed in plain SQL only.
pub(crate) static BY_THE_ARTICLE: Semaphore =
    Semaphore::named("by the article", 1, Duration::from_millis(600));

/// A session lock, of either kind of key.
pub(crate) fn session_lock(number: i32) -> AdvisoryLock {
    AdvisoryLock::new(if number % 2 == 0 {
        LockKey::parts(["faults", &number.to_string()])
    } else {
        LockKey::pair(77, number)
    })
}

/// The fence of a session lock.
pub(crate) fn fence(number: i32) -> Fence {
    Fence::new(format!("faults {number}"))
}

pub(crate) fn booking_lock(number: i32) -> AdvisoryLock {
    AdvisoryLock::new(LockKey::parts(["faults booking", &number.to_string()]))
}
