//! The threads and tasks of this process that wait for session locks out of a pool, and the releases that wake them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::connection_budget::ConnectionBudget;
use super::wakeup::Wakeup;
use crate::key::LockId;
use crate::panics;

/// All waiters of this process, threads and tasks. Those within the budget wait on the server, each with a connection. The
/// others hold none. A pool has no identity, so those of all pools are counted together: with several pools, more of them wait
/// without a connection than necessary.
static BUDGET: Mutex<ConnectionBudget> = Mutex::new(ConnectionBudget::new());

/// How many there are, so that a release that nobody waits for does not lock the budget.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// A thread or a task that waits for a lock. At first it occupies no connection.
#[derive(Debug)]
pub(super) struct Waiter {
    id: LockId,
    number: u64,
    is_connected: bool,
    /// Whether it was woken, so that another one must be woken if this one does not take the lock.
    is_woken: bool,
    /// The budget when it was last known.
    budget: u32,
    wakeup: Arc<Wakeup>,
}

impl Waiter {
    pub(super) fn for_lock(id: LockId) -> Self {
        let wakeup = Arc::new(Wakeup::default());
        WAITING.fetch_add(1, Ordering::SeqCst);
        Self {
            id,
            number: lock().join(id, &wakeup),
            is_connected: false,
            is_woken: false,
            budget: 1,
            wakeup,
        }
    }

    /// Occupies a connection, if the budget has one left and it is this key's turn.
    pub(super) fn occupy(&mut self, budget: u32) -> bool {
        self.budget = budget;
        let mut all = lock();
        self.is_connected = all.occupy(self.id, self.number, budget);
        if self.is_connected {
            // The budget may have more than one left.
            all.wake_next(budget);
        }
        self.is_connected
    }

    /// Vacates the connection that it occupies, if any.
    pub(super) fn vacate(&mut self) {
        if self.is_connected {
            self.is_connected = false;
            let mut all = lock();
            all.vacate(self.id, self.number, &self.wakeup);
            all.wake_next(self.budget);
        }
    }

    /// Returns whether a waiter for another key gets the connection of this one.
    pub(super) fn must_yield(&self, budget: u32) -> bool {
        lock().must_yield(self.id, budget)
    }

    /// Waits until this thread may occupy a connection, or the lock may be free, for at most `limit`.
    #[cfg(feature = "r2d2")]
    pub(super) fn block_for_turn(&mut self, budget: u32, limit: Duration) {
        self.wakeup
            .block_while(lock(), limit, |all| !self.may_try(all, budget));
        self.budget = budget;
        self.is_woken = self.wakeup.is_pending();
    }

    /// Takes note that it now tries to take the lock. A wake-up that comes later makes it try again.
    pub(super) fn tries(&mut self) {
        self.is_woken |= self.wakeup.take();
    }

    /// Takes note that it has the lock.
    pub(super) fn took_lock(&mut self, is_shared: bool) {
        self.tries();
        self.is_woken = false;
        if is_shared {
            lock().freed(self.id);
        }
    }

    fn may_try(&self, all: &ConnectionBudget, budget: u32) -> bool {
        self.wakeup.is_pending() || all.allows(self.id, budget)
    }
}

#[cfg(feature = "async")]
impl Waiter {
    /// Returns whether anybody in this process waits for a lock.
    pub(super) fn exists() -> bool {
        WAITING.load(Ordering::Relaxed) > 0
    }

    /// Waits until this task may occupy a connection, or the lock may be free, for at most `limit`. Returns whether it may.
    pub(super) async fn await_turn(&mut self, budget: u32, limit: Duration) -> bool {
        let turn = async {
            while !self.may_try(&lock(), budget) {
                self.wakeup.notified().await;
            }
        };
        let is_turn = tokio::time::timeout(limit, turn).await.is_ok();
        self.budget = budget;
        self.is_woken = self.wakeup.is_pending();
        is_turn
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.vacate();
        let mut all = lock();
        all.leave(self.id, self.number);
        if self.is_woken || self.wakeup.is_pending() {
            all.freed(self.id);
        }
        // It may have been woken for a connection that it does not occupy.
        all.wake_next(self.budget);
        WAITING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The locks of the asynchronous guards of this process, each with the pid of its session.
#[cfg(feature = "async")]
static GUARDS: Mutex<Vec<(LockId, i32)>> = Mutex::new(Vec::new());

/// A lock that is held in this process. Dropping it wakes a waiter for the lock, so it is dropped when the connection is back
/// in its pool.
#[derive(Debug)]
pub(super) struct LocalHold {
    id: LockId,
    /// The session, if an asynchronous guard has the lock.
    #[cfg(feature = "async")]
    guarded_on: Option<i32>,
}

impl LocalHold {
    pub(super) fn of(id: LockId) -> Self {
        Self {
            id,
            #[cfg(feature = "async")]
            guarded_on: None,
        }
    }
}

#[cfg(feature = "async")]
impl LocalHold {
    /// The hold of an asynchronous guard, on the session with this pid.
    pub(super) fn of_guard(id: LockId, pid: i32) -> Self {
        panics::lock(&GUARDS).push((id, pid));
        Self {
            id,
            guarded_on: Some(pid),
        }
    }

    /// Returns whether more than one asynchronous guard holds the lock on the session with this pid.
    pub(super) fn is_nested(id: LockId, pid: i32) -> bool {
        let guards = panics::lock(&GUARDS);
        guards.iter().filter(|guard| **guard == (id, pid)).count() > 1
    }
}

impl Drop for LocalHold {
    fn drop(&mut self) {
        #[cfg(feature = "async")]
        if let Some(pid) = self.guarded_on {
            let mut guards = panics::lock(&GUARDS);
            // The latest ones are at the end.
            let at = guards.iter().rposition(|guard| *guard == (self.id, pid));
            at.map(|at| guards.swap_remove(at));
        }
        // A waiter that is not counted yet tries after this, or polls.
        if WAITING.load(Ordering::SeqCst) > 0 {
            lock().freed(self.id);
        }
    }
}

fn lock() -> MutexGuard<'static, ConnectionBudget> {
    panics::lock(&BUDGET)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Held by each test, because a waiter of one may be woken for the connection that another vacates.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_waiter_that_does_not_take_the_lock_wakes_the_next() {
        let _alone = panics::lock(&ALONE);
        let id = LockId::Pair(-3, -4);
        for is_granted in [false, true] {
            let [mut first, second, third] = [(); 3].map(|()| Waiter::for_lock(id));
            // It leaves no connection to the others.
            first.budget = 0;
            first.tries();
            drop(LocalHold::of(id));
            assert!(first.wakeup.is_pending() && !second.wakeup.is_pending());
            first.tries();
            if is_granted {
                first.took_lock(false);
            }
            drop(first);
            assert_eq!(second.wakeup.is_pending(), !is_granted);
            drop((second, third));
        }
    }

    #[cfg(feature = "async")]
    #[test]
    fn two_guards_of_a_lock_on_one_session_are_nested() {
        let id = LockId::Pair(-7, -8);
        let outer = LocalHold::of_guard(id, 1);
        let elsewhere = LocalHold::of_guard(id, 2);
        let in_doubt = LocalHold::of(id);
        assert!(!LocalHold::is_nested(id, 1));
        let inner = LocalHold::of_guard(id, 1);
        assert!(LocalHold::is_nested(id, 1) && !LocalHold::is_nested(id, 2));
        drop(inner);
        assert!(!LocalHold::is_nested(id, 1));
        drop((outer, elsewhere, in_doubt));
        assert!(!panics::lock(&GUARDS).contains(&(id, 1)));
    }

    #[test]
    fn sharers_wake_each_other() {
        let _alone = panics::lock(&ALONE);
        let id = LockId::Pair(-5, -6);
        let [mut first, second] = [(); 2].map(|()| Waiter::for_lock(id));
        first.tries();
        first.took_lock(true);
        drop(first);
        assert!(second.wakeup.is_pending());
    }

    #[cfg(feature = "r2d2")]
    #[test]
    fn a_waiter_is_woken_for_a_connection_that_is_vacated() {
        const LONG: Duration = Duration::from_secs(600);
        let _alone = panics::lock(&ALONE);
        let id = LockId::Pair(-1, -2);
        let mut first = Waiter::for_lock(id);
        first.tries();
        first.block_for_turn(1, LONG);
        assert!(first.occupy(1));
        // For another key, because one who vacates comes first among those of its own.
        let mut second = Waiter::for_lock(LockId::Pair(-1, -3));
        second.tries();
        assert!(!second.occupy(1));
        second.block_for_turn(1, Duration::from_millis(1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                second.block_for_turn(1, LONG);
                assert!(second.occupy(1));
            });
            first.vacate();
        });
    }
}
