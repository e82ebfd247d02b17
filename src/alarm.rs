//! Pauses that others may end: what a waiter, a renewal and a loop sleep on, and what stops a loop.

#[cfg(feature = "async")]
use std::future::poll_fn;
#[cfg(feature = "async")]
use std::pin::pin;
use std::sync::{Arc, PoisonError};
#[cfg(feature = "async")]
use std::task::Poll;
use std::task::Waker;
use std::time::Duration;

use crate::sync::{AtomicBool, Condvar, Instant, Mutex, MutexGuard, Ordering};

/// Locks a mutex, even after a panic of a thread that held it: nothing here is left half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A random pause between three and five quarters of this one, so that waiters that began together
/// do not retry together.
pub(crate) fn jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.75 + fastrand::f64() / 2.0)
}

/// A time that one sleeper waits for, and that others may change. `Mode::sleep` waits for it.
#[derive(Debug)]
pub struct Alarm {
    /// When it is due, once that is set, and whom it wakes.
    state: Mutex<(Option<Instant>, Option<Waker>)>,
    changed: Condvar,
}

impl Alarm {
    pub(crate) fn new(due: Instant) -> Self {
        Self {
            state: Mutex::new((Some(due), None)),
            changed: Condvar::new(),
        }
    }

    /// An alarm that is never due until it is set. It needs no timer.
    pub(crate) fn unset() -> Self {
        Self {
            state: Mutex::new((None, None)),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn set(&self, due: Instant) {
        self.set_if(due, |_| true);
    }

    /// Sets the alarm if it was due later.
    pub(crate) fn advance(&self, due: Instant) {
        self.set_if(due, |before| before > due);
    }

    /// Sets the alarm unless it was set to a time after `began`.
    pub(crate) fn postpone(&self, began: Instant, due: Instant) {
        self.set_if(due, |before| before <= began);
    }

    fn set_if(&self, due: Instant, is_to_be_set: impl FnOnce(Instant) -> bool) {
        let mut state = lock(&self.state);
        if !state.0.is_none_or(is_to_be_set) {
            return;
        }
        state.0 = Some(due);
        let waker = state.1.take();
        drop(state);
        self.changed.notify_one();
        waker.inspect(Waker::wake_by_ref);
    }

    /// When the alarm is due, but not later than the deadline.
    #[cfg(feature = "async")]
    fn due(&self, deadline: Option<Instant>) -> Option<Instant> {
        earlier(lock(&self.state).0, deadline)
    }

    /// Blocks the thread until the alarm is due, or until the deadline.
    #[cfg(feature = "r2d2")]
    pub(crate) fn block(&self, deadline: Option<Instant>) {
        let mut state = lock(&self.state);
        loop {
            let Some(due) = earlier(state.0, deadline) else {
                let waited = self.changed.wait(state);
                state = waited.unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let rest = due.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return;
            }
            let waited = self.changed.wait_timeout(state, rest);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until the alarm is due, or until the deadline. `timer` makes a future that is ready at
    /// a time.
    #[cfg(feature = "async")]
    pub(crate) async fn wait<T: Future<Output = ()>>(
        &self,
        deadline: Option<Instant>,
        timer: impl Fn(Instant) -> T,
    ) {
        loop {
            let due = self.due(deadline);
            if due.is_some_and(|due| due <= Instant::now()) {
                return;
            }
            let mut timer = pin!(due.map(&timer));
            poll_fn(|context| {
                if !self.register(context.waker(), due, deadline) {
                    return Poll::Ready(());
                }
                match timer.as_mut().as_pin_mut() {
                    Some(timer) => timer.poll(context),
                    None => Poll::Pending,
                }
            })
            .await;
        }
    }

    /// Wakes the task once the alarm is set. Returns whether it is still set to `due`.
    #[cfg(feature = "async")]
    fn register(&self, waker: &Waker, due: Option<Instant>, deadline: Option<Instant>) -> bool {
        // Cloned and dropped outside the mutex, because a waker runs foreign code.
        let new = Some(waker.clone());
        let before = std::mem::replace(&mut lock(&self.state).1, new);
        drop(before);
        self.due(deadline) == due
    }
}

fn earlier(due: Option<Instant>, deadline: Option<Instant>) -> Option<Instant> {
    due.into_iter().chain(deadline).min()
}

/// The alarms of those who sleep until something happens. Set the flag that says so before you wake
/// them.
#[derive(Debug, Default)]
pub(crate) struct Sleepers(Mutex<Vec<Arc<Alarm>>>);

impl Sleepers {
    /// Wakes all, because it has happened.
    pub(crate) fn wake(&self) {
        let all = std::mem::take(&mut *lock(&self.0));
        for alarm in all {
            alarm.set(Instant::now());
        }
    }

    /// Adds a sleeper until `until`. Look at the flag again after that, and sleep on the alarm only
    /// if the flag is not set.
    pub(crate) fn join(&self, until: Instant) -> Sleeper<'_> {
        self.join_with(Arc::new(Alarm::new(until)))
    }

    /// As [`join`](Self::join), with the alarm of one who also waits for something else.
    pub(crate) fn join_with(&self, alarm: Arc<Alarm>) -> Sleeper<'_> {
        lock(&self.0).push(alarm.clone());
        Sleeper { all: self, alarm }
    }
}

/// One who sleeps. Its drop removes it.
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

/// Stops the loops that it was given to: [`Leader::lead`](crate::leader::Leader::lead) and
/// [`Schedule::run`](crate::schedule::Schedule::run) of the blocking half.
///
/// Clones share one state: give one to the loop, and call [`stop`](Self::stop) on another when
/// SIGTERM arrives: from a thread that waits for the signal, as the crates `signal-hook` and
/// `ctrlc` have it, and not inside a raw signal handler, because `stop` takes a mutex.
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
    /// Makes a `Stop` that is not stopped.
    pub fn new() -> Self {
        Self::default()
    }

    /// Stops the loops, for ever.
    ///
    /// Pauses end immediately; work ends at its next `is_leader` or
    /// [`is_stopped`](Self::is_stopped).
    pub fn stop(&self) {
        let (is_stopped, sleepers) = &*self.0;
        is_stopped.store(true, Ordering::SeqCst);
        sleepers.wake();
    }

    /// Returns whether [`stop`](Self::stop) was called.
    pub fn is_stopped(&self) -> bool {
        self.0.0.load(Ordering::SeqCst)
    }

    pub(crate) fn sleepers(&self) -> &Sleepers {
        &self.0.1
    }
}
