//! How many connections the waiters for session locks may occupy.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The threads of this process that wait on the server, each with a connection out of a pool, for whatever lock.
static TAKEN: Mutex<u32> = Mutex::new(0);
static GIVEN_BACK: Condvar = Condvar::new();

/// The right to wait on the server, with a connection out of a pool. Given back when dropped.
#[derive(Debug)]
pub(super) struct Seat(());

impl Seat {
    /// Takes one, if the waiters have less than half of such a pool. A pool does not tell which one it is, so those of
    /// all pools count: with several, more threads wait without a connection than need to.
    pub(super) fn take(pool_size: u32) -> Option<Self> {
        let mut taken = taken();
        if *taken >= (pool_size / 2).max(1) {
            return None;
        }
        *taken += 1;
        Some(Self(()))
    }

    /// Waits that long, or until somebody gives one back.
    pub(super) fn wait_for_one(limit: Duration) {
        // Whether there is one is seen when it is taken.
        drop(GIVEN_BACK.wait_timeout(taken(), limit));
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        *taken() -= 1;
        GIVEN_BACK.notify_one();
    }
}

fn taken() -> MutexGuard<'static, u32> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All of this in one test, since the seats are the process's.
    #[test]
    fn half_of_a_pool_and_one_at_least() {
        let seats: Vec<_> = std::iter::from_fn(|| Seat::take(7)).collect();
        assert_eq!(seats.len(), 3);
        assert!(Seat::take(1).is_none());
        let fourth = Seat::take(8);
        assert!(fourth.is_some());
        drop((seats, fourth));

        let one = Seat::take(1);
        assert!(one.is_some());
        assert!(Seat::take(2).is_none());
        assert!(Seat::take(3).is_none());
        assert!(Seat::take(4).is_some());
    }
}
