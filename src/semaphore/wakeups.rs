//! Wake-ups of the threads and tasks that wait for a slot.
//!
//! A release in this process wakes one of its waiters at once, a thread or a task. A release in another process is found by the
//! next poll.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::panics::lock;
use crate::signal::Signal;

/// All waiters of this process, for any service. The waiter at the front is woken next.
static WAITERS: Mutex<VecDeque<Arc<Wakeup>>> = Mutex::new(VecDeque::new());

#[derive(Debug)]
struct Wakeup {
    service: Cow<'static, str>,
    signal: Signal,
}

/// A thread or task that waits for a slot of a service. It is registered before its first claim, so it misses no release.
#[derive(Debug)]
pub(super) struct Waiter {
    wakeup: Arc<Wakeup>,
    /// Whether it was woken, and no claim of its own has looked for the slot since.
    is_woken: AtomicBool,
}

impl Waiter {
    pub(super) fn register(service: Cow<'static, str>) -> Self {
        let wakeup = Arc::new(Wakeup {
            service,
            signal: Signal::default(),
        });
        lock(&WAITERS).push_back(Arc::clone(&wakeup));
        Self {
            wakeup,
            is_woken: AtomicBool::new(false),
        }
    }

    pub(super) fn service(&self) -> &Cow<'static, str> {
        &self.wakeup.service
    }

    /// Blocks the thread for the pause, or until a release wakes this waiter.
    #[cfg(feature = "r2d2")]
    pub(super) fn sleep(&self, pause: Duration) {
        self.wakeup.signal.wait(pause);
        self.take();
    }

    /// Ends after the pause, or when a release wakes this waiter.
    #[cfg(feature = "async")]
    pub(super) async fn woken(&self, pause: Duration) {
        self.wakeup.signal.awaited(pause).await;
        self.take();
    }

    /// Takes the wake-up, before the next claim, which finds what was released until now.
    fn take(&self) {
        if self.wakeup.signal.take() {
            self.is_woken.store(true, Ordering::Relaxed);
        }
    }

    /// Notes that a claim has had its reply, so the wake-up before it has served its purpose.
    pub(super) fn has_looked(&self) {
        self.is_woken.store(false, Ordering::Relaxed);
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        lock(&WAITERS).retain(|wakeup| !Arc::ptr_eq(wakeup, &self.wakeup));
        // This waiter has its slot already, or gives up. The next waiter gets the wake-up that it did not use.
        if self.wakeup.signal.is_set() || *self.is_woken.get_mut() {
            wake_one(&self.wakeup.service);
        }
    }
}

/// Wakes one waiter for the service. Called after a release, once its connection is back in the pool.
pub(super) fn wake_one(service: &str) {
    let mut waiters = lock(&WAITERS);
    let first = waiters.iter().position(|wakeup| wakeup.service == service);
    if let Some(wakeup) = first.and_then(|first| waiters.remove(first)) {
        // If its claim finds no slot, it waits on, behind the others.
        waiters.push_back(Arc::clone(&wakeup));
        // This happens under the lock of the list, so a waiter that leaves the list afterwards sees its wake-up, and
        // passes it on.
        wakeup.signal.set();
        drop(waiters);
        wakeup.signal.wake();
    }
}

#[cfg(all(test, feature = "r2d2"))]
mod tests {
    use std::time::Instant;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    fn waiter(service: &'static str) -> Waiter {
        Waiter::register(Cow::Borrowed(service))
    }

    fn is_woken(waiter: &Waiter) -> bool {
        waiter.wakeup.signal.is_set()
    }

    #[test]
    fn one_waiter_of_the_service_is_woken_in_turn() {
        let other = waiter("other");
        let waiters = [(); 3].map(|()| waiter("in turn"));
        for waiter in &waiters {
            assert!(!is_woken(waiter));
            wake_one("in turn");
            assert!(is_woken(waiter));
        }
        // A wake-up that comes before the sleep is not missed.
        waiters[0].sleep(LONG);
        assert!(!is_woken(&waiters[0]) && !is_woken(&other));
    }

    #[test]
    fn a_waiter_that_needs_no_slot_any_more_passes_its_wakeup_on() {
        let (first, second) = (waiter("passed on"), waiter("passed on"));
        wake_one("passed on");
        assert!(!is_woken(&second));
        drop(first);
        assert!(is_woken(&second));
        // It is woken, and gives up before its claim has a reply.
        let third = waiter("passed on");
        second.sleep(LONG);
        assert!(!is_woken(&second) && !is_woken(&third));
        drop(second);
        assert!(is_woken(&third));
        // A claim has had a reply, so there is nothing to pass on.
        let fourth = waiter("passed on");
        third.sleep(LONG);
        third.has_looked();
        drop(third);
        assert!(!is_woken(&fourth));
        drop(fourth);
        wake_one("passed on");
        let waiters = lock(&WAITERS);
        assert!(waiters.iter().all(|wakeup| wakeup.service != "passed on"));
    }

    #[test]
    fn a_wait_whose_claims_had_replies_passes_no_wakeup_on() {
        use std::future::ready;

        use crate::semaphore::waiting::for_slot;
        use crate::semaphore::{Admission, Full};
        use crate::session::now;

        let (first, second) = (waiter("looks"), waiter("looks"));
        wake_one("looks");
        let full = || Full {
            retry_after: LONG,
            service: "looks".into(),
            slots: 1,
        };
        let claim = |_| ready(Ok(Admission::<()>::Full(full())));
        let sleep = |pause| {
            first.sleep(pause);
            ready(())
        };
        let waited = for_slot(&first, Duration::from_millis(20), claim, sleep, || false);
        assert!(now(waited).unwrap().is_full());
        drop(first);
        assert!(!is_woken(&second));
    }

    #[cfg(feature = "migrations")]
    #[test]
    fn every_release_wakes_a_waiter() {
        use crate::Semaphore;

        let database = workbench::Database::new();
        let conn = &mut database.connect();
        crate::migrations::install(conn).unwrap();
        let pool = database.pool(1);
        let semaphore = Semaphore::named("wakes", 1, LONG);
        let waiter = waiter("wakes");
        let permit = || semaphore.try_acquire(&pool).unwrap().admitted().unwrap();

        permit().release().unwrap();
        assert!(is_woken(&waiter));
        waiter.sleep(LONG);
        drop(permit());
        assert!(is_woken(&waiter));
        waiter.sleep(LONG);
        let claim = permit().into_claim();
        assert!(!is_woken(&waiter));
        semaphore.complete_on(conn, claim.id).unwrap();
        assert!(is_woken(&waiter));
        waiter.sleep(LONG);
        let late = permit();
        let busy = pool.get().unwrap();
        drop(late);
        assert!(!is_woken(&waiter));
        drop(busy);
        // This sleep ends only if the background release wakes the waiter.
        waiter.sleep(Duration::MAX);
    }

    #[test]
    fn a_sleep_ends_by_itself() {
        let waiter = waiter("by itself");
        let begun = Instant::now();
        waiter.sleep(Duration::from_millis(5));
        assert!(begun.elapsed() >= Duration::from_millis(5));
    }
}
