//! A slot that is released in this process is offered to a waiter of this process at once. One that another
//! process releases is found as a waiter asks again.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::panics::{lock, unpoisoned};

/// Those who wait, for a slot of whatever service; the one that is to be woken next comes first.
static QUEUE: Mutex<VecDeque<Arc<Bell>>> = Mutex::new(VecDeque::new());

#[derive(Debug)]
struct Bell {
    service: String,
    rung: Mutex<bool>,
    ringing: Condvar,
}

/// A thread that waits for a slot of a service, from before it asks for the first time: so it misses no release.
#[derive(Debug)]
pub(super) struct Waiter(Arc<Bell>);

impl Waiter {
    pub(super) fn of(service: &str) -> Self {
        let bell = Arc::new(Bell {
            service: service.to_owned(),
            rung: Mutex::new(false),
            ringing: Condvar::new(),
        });
        lock(&QUEUE).push_back(Arc::clone(&bell));
        Self(bell)
    }

    /// Sleeps that long, or until a slot was released that nobody else was woken for.
    pub(super) fn sleep(&self, pause: Duration) {
        let rung = lock(&self.0.rung);
        let woken = self
            .0
            .ringing
            .wait_timeout_while(rung, pause, |rung| !*rung);
        *unpoisoned(woken).0 = false;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        lock(&QUEUE).retain(|bell| !Arc::ptr_eq(bell, &self.0));
        // It has its slot already, or gives up: the one that was released is for another.
        if *lock(&self.0.rung) {
            wake_one(&self.0.service);
        }
    }
}

/// A slot was released, and the connection that released it is back in its pool.
pub(super) fn wake_one(service: &str) {
    let mut queue = lock(&QUEUE);
    let first = queue.iter().position(|bell| bell.service == service);
    if let Some(bell) = first.and_then(|first| queue.remove(first)) {
        // Should it be refused, it goes on waiting, behind the others.
        queue.push_back(Arc::clone(&bell));
        // Under the lock of the queue: a waiter that leaves the queue afterwards finds its bell rung, and passes it on.
        *lock(&bell.rung) = true;
        drop(queue);
        bell.ringing.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn is_rung(waiter: &Waiter) -> bool {
        *lock(&waiter.0.rung)
    }

    #[test]
    fn one_waiter_of_the_service_is_woken_in_turn() {
        let other = Waiter::of("other");
        let waiters = [(); 3].map(|()| Waiter::of("in turn"));
        for waiter in &waiters {
            assert!(!is_rung(waiter));
            wake_one("in turn");
            assert!(is_rung(waiter));
        }
        // A wake that comes before the sleep is not missed.
        waiters[0].sleep(LONG);
        assert!(!is_rung(&waiters[0]) && !is_rung(&other));
    }

    #[test]
    fn who_needs_no_slot_any_more_passes_it_on() {
        let (first, second) = (Waiter::of("passed on"), Waiter::of("passed on"));
        wake_one("passed on");
        assert!(!is_rung(&second));
        drop(first);
        assert!(is_rung(&second));
        drop(second);
        wake_one("passed on");
        assert!(lock(&QUEUE).iter().all(|bell| bell.service != "passed on"));
    }

    #[cfg(feature = "migrations")]
    #[test]
    fn every_release_wakes_somebody() {
        use crate::Semaphore;

        let database = workbench::Database::new();
        let conn = &mut database.connect();
        crate::migrations::install(conn).unwrap();
        let pool = database.pool(1);
        let semaphore = Semaphore::named("wakes", 1, LONG);
        let waiter = Waiter::of("wakes");
        let permit = || semaphore.try_acquire(&pool).unwrap().acquired().unwrap();

        permit().release().unwrap();
        assert!(is_rung(&waiter));
        waiter.sleep(LONG);
        drop(permit());
        assert!(is_rung(&waiter));
        waiter.sleep(LONG);
        let claim = permit().into_claim();
        assert!(!is_rung(&waiter));
        semaphore.complete_on(conn, claim.id).unwrap();
        assert!(is_rung(&waiter));
        waiter.sleep(LONG);
        let late = permit();
        let busy = pool.get().unwrap();
        drop(late);
        assert!(!is_rung(&waiter));
        drop(busy);
        // Ends only if it is woken.
        waiter.sleep(Duration::MAX);
    }

    #[test]
    fn a_sleep_ends_by_itself() {
        let waiter = Waiter::of("by itself");
        let begun = Instant::now();
        waiter.sleep(Duration::from_millis(5));
        assert!(begun.elapsed() >= Duration::from_millis(5));
    }
}
