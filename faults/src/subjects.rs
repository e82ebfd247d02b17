//! The locks, semaphores, throttles and rate limits that the workers contend for.

use std::time::Duration;

use diesel_interlock::{
    AdvisoryLock, Fence, LockKey, Quota, RateLimit, Semaphore, throttled_resources,
};

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

/// The rate limits. The workers want more of them than they allow.
pub(crate) static CALLS: RateLimit = RateLimit::named("calls", Quota::per_second(5).burst(3));
pub(crate) static PAID: RateLimit =
    RateLimit::named("paid", Quota::per_second(4).burst(5)).durable();
/// The one whose keys are reset.
pub(crate) static LOGIN: RateLimit = RateLimit::named("login", Quota::per_second(2).burst(4));
/// Two versions of a program, of which the second has the looser quota. An override has the [`OVERRIDDEN`] quota.
pub(crate) static DEPLOYED: [RateLimit; 2] = [
    RateLimit::named("deployed", Quota::per_second(2).burst(3)),
    RateLimit::named("deployed", LOOSEST),
];
pub(crate) const OVERRIDDEN: Quota = Quota::per_second(1).burst(3);
const LOOSEST: Quota = Quota::per_second(6).burst(6);

/// The loosest of the quotas that a rate limit has at some time.
pub(crate) fn loosest_quota(name: &str) -> Option<Quota> {
    [&CALLS, &PAID, &LOGIN, &DEPLOYED[1]]
        .into_iter()
        .find(|limit| limit.name() == name)
        .map(RateLimit::quota)
}

/// The keys of each rate limit, the busiest first.
pub(crate) const LIMITED_KEYS: [&str; 3] = ["hot", "warm", "cold"];

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
