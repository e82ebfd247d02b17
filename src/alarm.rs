//! Pauses that others may end: what a waiter, a renewal and a loop sleep on, and what stops a loop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Locks a mutex, also after a panic of a thread that held it: nothing here is left half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pause between three and five quarters of this one, so that those who began together do not go
/// on together.
pub(crate) fn jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.75 + fastrand::f64() / 2.0)
}

/// A time that somebody sleeps until, and others may change. A mode knows how to sleep.
#[derive(Debug)]
pub struct Alarm {
    state: Mutex<(Instant, Option<Waker>)>,
    changed: Condvar,
}

impl Alarm {
    pub(crate) fn new(due: Instant) -> Self {
        Self {
            state: Mutex::new((due, None)),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn set(&self, due: Instant) {
        self.set_if(due, |_| true);
    }

    /// Sets it if it was to be due later.
    pub(crate) fn advance(&self, due: Instant) {
        self.set_if(due, |before| before > due);
    }

    /// Sets it unless it was set to a time after `began`.
    pub(crate) fn postpone(&self, began: Instant, due: Instant) {
        self.set_if(due, |before| before <= began);
    }

    fn set_if(&self, due: Instant, is_to_be_set: impl FnOnce(Instant) -> bool) {
        let mut state = lock(&self.state);
        if !is_to_be_set(state.0) {
            return;
        }
        state.0 = due;
        let waker = state.1.take();
        drop(state);
        self.changed.notify_one();
        waker.inspect(Waker::wake_by_ref);
    }

    /// When it is due, but not later than the deadline.
    #[cfg(feature = "async")]
    pub(crate) fn due(&self, deadline: Option<Instant>) -> Instant {
        let due = lock(&self.state).0;
        deadline.map_or(due, |deadline| deadline.min(due))
    }

    /// Blocks the thread until it is due.
    #[cfg(feature = "r2d2")]
    pub(crate) fn block(&self, deadline: Option<Instant>) {
        let mut state = lock(&self.state);
        loop {
            let due = deadline.map_or(state.0, |deadline| deadline.min(state.0));
            let rest = due.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// When it will be due. `None` if it is.
    #[cfg(feature = "async")]
    pub(crate) fn pending(&self, deadline: Option<Instant>) -> Option<Instant> {
        Some(self.due(deadline)).filter(|due| *due > Instant::now())
    }

    /// Wakes the task once it is set. Returns whether it is still set to `due`.
    #[cfg(feature = "async")]
    pub(crate) fn register(&self, waker: &Waker, due: Instant, deadline: Option<Instant>) -> bool {
        // Cloned and dropped outside the mutex, because a waker may do anything.
        let new = Some(waker.clone());
        let before = std::mem::replace(&mut lock(&self.state).1, new);
        drop(before);
        self.due(deadline) == due
    }
}

/// Those who sleep until something happens. The flag that says so must be set before they are
/// woken.
#[derive(Debug, Default)]
pub(crate) struct Sleepers(Mutex<Vec<Arc<Alarm>>>);

impl Sleepers {
    /// It happened.
    pub(crate) fn wake(&self) {
        let all = std::mem::take(&mut *lock(&self.0));
        for alarm in all {
            alarm.set(Instant::now());
        }
    }

    /// Joins them until `until`. Sleep on its alarm unless it has happened meanwhile.
    pub(crate) fn join(&self, until: Instant) -> Sleeper<'_> {
        self.join_with(Arc::new(Alarm::new(until)))
    }

    /// As [`join`](Self::join), of one who waits for something else, too.
    pub(crate) fn join_with(&self, alarm: Arc<Alarm>) -> Sleeper<'_> {
        lock(&self.0).push(alarm.clone());
        Sleeper { all: self, alarm }
    }
}

/// One of them. Its drop leaves.
#[derive(Debug)]
pub(crate) struct Sleeper<'a> {
    all: &'a Sleepers,
    pub(crate) alarm: Arc<Alarm>,
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        let mut all = lock(&self.all.0);
        // `self` keeps the alarm, so its waker is not dropped under the mutex.
        all.retain(|other| !Arc::ptr_eq(other, &self.alarm));
    }
}

/// Ends the loops that it was given to: [`Leader::lead`](crate::leader::Leader::lead) and
/// [`Schedule::run`](crate::schedule::Schedule::run) of the blocking half. Clones are one.
///
/// ```
/// let stop = diesel_interlock::Stop::new();
/// let on_signal = stop.clone(); // for the handler of SIGTERM
/// on_signal.stop();
/// assert!(stop.is_stopped());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<(AtomicBool, Sleepers)>);

impl Stop {
    /// Makes one that is not stopped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops the loops, for ever. Their pauses end at once, and their work when it looks.
    pub fn stop(&self) {
        let (is_stopped, sleepers) = &*self.0;
        is_stopped.store(true, Ordering::SeqCst);
        sleepers.wake();
    }

    /// Returns whether it was stopped.
    pub fn is_stopped(&self) -> bool {
        self.0.0.load(Ordering::SeqCst)
    }

    pub(crate) fn sleepers(&self) -> &Sleepers {
        &self.0.1
    }
}
