//! How many connections the threads and tasks that wait for session locks may occupy, and which of them is woken.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

#[cfg(feature = "async")]
use tokio::sync::Notify;

use crate::key::LockId;
use crate::panics;

/// The threads and tasks of this process that wait for locks out of a pool. Those within the budget wait on the server, each
/// with a connection. The others hold none. A pool has no identity, so those of all pools are counted together: with several
/// pools, more of them wait without a connection than necessary.
static BUDGET: Mutex<ConnectionBudget> = Mutex::new(ConnectionBudget::new());

/// How many there are, so that a release that nobody waits for does not lock the budget.
static WAITING: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct ConnectionBudget {
    occupied: u32,
    keys: BTreeMap<LockId, KeyWaiters>,
    /// The keys with a waiter that holds no connection: the one whose waiter gets the next connection comes first.
    order: BTreeSet<(u32, u64, LockId)>,
    /// Counts the connections that were vacated, and the waiters.
    events: u64,
}

/// Those who wait for one key.
#[derive(Debug, Default)]
struct KeyWaiters {
    /// How many occupy a connection.
    connected: u32,
    /// Those that hold none, in the order in which they began to wait.
    unconnected: BTreeMap<u64, Arc<Wakeup>>,
    /// The event at which this key was added or last vacated a connection. Among keys with the same number of connections,
    /// the one for which that is longest ago is next.
    since: u64,
}

/// Wakes a thread or a task.
#[derive(Debug, Default)]
struct Wakeup {
    is_pending: AtomicBool,
    thread: Condvar,
    #[cfg(feature = "async")]
    task: Notify,
}

impl Wakeup {
    /// Only while the budget is locked, because a thread that is about to wait on it must not miss this.
    fn wake(&self) {
        self.is_pending.store(true, Ordering::Relaxed);
        self.thread.notify_one();
        #[cfg(feature = "async")]
        self.task.notify_one();
    }

    fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Relaxed)
    }
}

impl KeyWaiters {
    fn place(&self, id: LockId) -> Option<(u32, u64, LockId)> {
        (!self.unconnected.is_empty()).then_some((self.connected, self.since, id))
    }
}

impl ConnectionBudget {
    const fn new() -> Self {
        Self {
            occupied: 0,
            keys: BTreeMap::new(),
            order: BTreeSet::new(),
            events: 0,
        }
    }

    /// Changes the waiters of a key, and its place in the order.
    fn change(&mut self, id: LockId, change: impl FnOnce(&mut KeyWaiters)) {
        let waiters = self.keys.entry(id).or_default();
        let before = waiters.place(id);
        change(waiters);
        let after = waiters.place(id);
        if waiters.connected == 0 && after.is_none() {
            self.keys.remove(&id);
        }
        if before != after {
            before.map(|place| self.order.remove(&place));
            after.map(|place| self.order.insert(place));
        }
    }

    /// Returns the number of the waiter, by which it is served.
    fn join(&mut self, id: LockId, wakeup: &Arc<Wakeup>) -> u64 {
        self.events += 1;
        let number = self.events;
        self.change(id, |waiters| {
            if waiters.connected == 0 && waiters.unconnected.is_empty() {
                waiters.since = number;
                // The lock may have been released after it was found held, when nobody was there to be woken.
                wakeup.wake();
            }
            waiters.unconnected.insert(number, Arc::clone(wakeup));
        });
        number
    }

    fn leave(&mut self, id: LockId, number: u64) {
        self.change(id, |waiters| {
            waiters.unconnected.remove(&number);
        });
    }

    /// The key whose waiter gets the next connection, and how many it has.
    fn next(&self) -> Option<(LockId, u32)> {
        let (connected, _, id) = self.order.first()?;
        Some((*id, *connected))
    }

    fn allows(&self, id: LockId, budget: u32) -> bool {
        self.occupied < budget && self.next().is_some_and(|(next, _)| next == id)
    }

    fn occupy(&mut self, id: LockId, number: u64, budget: u32) -> bool {
        let allowed = self.allows(id, budget);
        if allowed {
            self.change(id, |waiters| {
                waiters.unconnected.remove(&number);
                waiters.connected += 1;
            });
            self.occupied += 1;
        }
        allowed
    }

    fn vacate(&mut self, id: LockId, number: u64, wakeup: &Arc<Wakeup>) {
        self.events += 1;
        let since = self.events;
        self.change(id, |waiters| {
            waiters.connected -= 1;
            waiters.unconnected.insert(number, Arc::clone(wakeup));
            waiters.since = since;
        });
        self.occupied -= 1;
    }

    /// Returns whether this key must yield a connection: the budget has become smaller, or another key has too few.
    fn must_yield(&self, id: LockId, budget: u32) -> bool {
        let own = self.keys.get(&id).map_or(0, |waiters| waiters.connected);
        self.occupied > budget
            || self.occupied == budget
                && self.next().is_some_and(|(next, connected)| {
                    next != id && (connected == 0 || connected + 1 < own)
                })
    }

    /// Wakes the waiter that gets the next connection, if the budget has one left.
    fn wake_next(&self, budget: u32) {
        if let Some((id, _)) = self.next().filter(|_| self.occupied < budget) {
            self.wake_first(id);
        }
    }

    /// Wakes the waiter for the key that holds no connection, and has waited longest.
    fn wake_first(&self, id: LockId) {
        let waiters = self.keys.get(&id);
        if let Some((_, wakeup)) = waiters.and_then(|waiters| waiters.unconnected.first_key_value())
        {
            wakeup.wake();
        }
    }

    /// Wakes a waiter for a lock that may be free. If one waits on the server, the server has granted the lock to it.
    fn freed(&self, id: LockId) {
        if self.keys.get(&id).is_some_and(|key| key.connected == 0) {
            self.wake_first(id);
        }
    }
}

/// How many connections the waiters may occupy: half of the pool, and at least one. If others wait for a connection, an
/// eighth, because a waiter does nothing with its own. A release in this process then wakes the waiters.
pub(super) fn budget(pool_size: u32, is_contended: bool) -> u32 {
    let share = if is_contended { 8 } else { 2 };
    (pool_size / share).max(1)
}

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

    pub(super) fn id(&self) -> LockId {
        self.id
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
    pub(super) fn wait_for_turn(&mut self, budget: u32, limit: Duration) {
        drop(
            self.wakeup
                .thread
                .wait_timeout_while(lock(), limit, |all| !self.may_try(all, budget)),
        );
        self.budget = budget;
        self.is_woken = self.wakeup.is_pending();
    }

    /// Takes note that it now tries to take the lock. A wake-up that comes later makes it try again.
    pub(super) fn tries(&mut self) {
        self.is_woken |= self.wakeup.is_pending.swap(false, Ordering::Relaxed);
    }

    /// Takes note that it has the lock.
    pub(super) fn is_granted(&mut self, is_shared: bool) {
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

    /// Waits until this task may occupy a connection, or the lock may be free, for at most `limit`.
    pub(super) async fn turn(&mut self, budget: u32, limit: Duration) {
        let turn = async {
            while !self.may_try(&lock(), budget) {
                self.wakeup.task.notified().await;
            }
        };
        let _ = tokio::time::timeout(limit, turn).await;
        self.budget = budget;
        self.is_woken = self.wakeup.is_pending();
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

/// A lock that is held in this process. Dropping it wakes a waiter for the lock, so it is dropped when the connection is back
/// in its pool.
#[derive(Debug)]
pub(super) struct LocalHold(LockId);

impl LocalHold {
    pub(super) fn of(id: LockId) -> Self {
        Self(id)
    }
}

impl Drop for LocalHold {
    fn drop(&mut self) {
        // A waiter that is not counted yet tries after this, or polls.
        if WAITING.load(Ordering::SeqCst) > 0 {
            lock().freed(self.0);
        }
    }
}

fn lock() -> MutexGuard<'static, ConnectionBudget> {
    panics::lock(&BUDGET)
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: LockId = LockId::BigInt(1);
    const Y: LockId = LockId::BigInt(2);
    const Z: LockId = LockId::Pair(0, 0);

    fn waiting(waiters: &[(LockId, u32)]) -> ConnectionBudget {
        let mut all = ConnectionBudget::new();
        for (id, number) in waiters {
            for _ in 0..*number {
                join(&mut all, *id);
            }
        }
        all
    }

    fn join(all: &mut ConnectionBudget, id: LockId) -> Arc<Wakeup> {
        let wakeup = Arc::default();
        all.join(id, &wakeup);
        wakeup
    }

    /// The first waiter without a connection.
    fn first(all: &ConnectionBudget, id: LockId) -> u64 {
        let waiters = all.keys.get(&id);
        let first = waiters.and_then(|waiters| waiters.unconnected.first_key_value());
        first.map_or(0, |(number, _)| *number)
    }

    fn occupy(all: &mut ConnectionBudget, id: LockId, pool_size: u32) -> bool {
        let number = first(all, id);
        all.occupy(id, number, budget(pool_size, false))
    }

    /// A waiter vacates its connection, behind the others.
    fn vacate(all: &mut ConnectionBudget, id: LockId) {
        let number = all.events + 1;
        all.vacate(id, number, &Arc::default());
    }

    fn leave(all: &mut ConnectionBudget, id: LockId) {
        let number = first(all, id);
        all.leave(id, number);
    }

    fn must_yield(all: &ConnectionBudget, id: LockId, pool_size: u32) -> bool {
        all.must_yield(id, budget(pool_size, false))
    }

    fn connected(all: &ConnectionBudget, id: LockId) -> u32 {
        all.keys.get(&id).map_or(0, |waiters| waiters.connected)
    }

    /// The end of a slice: each thread that must yield does, and the budget is distributed again.
    fn slice(all: &mut ConnectionBudget, pool_size: u32) {
        for id in [X, Y, Z] {
            for _ in 0..connected(all, id) {
                if must_yield(all, id, pool_size) {
                    vacate(all, id);
                }
            }
        }
        for _ in 0..pool_size {
            for id in [X, Y, Z] {
                occupy(all, id, pool_size);
            }
        }
    }

    #[test]
    fn the_budget_is_half_of_a_pool_and_at_least_one() {
        for (pool_size, expected) in [(1, 1), (2, 1), (3, 1), (7, 3), (8, 4)] {
            let mut all = waiting(&[(X, 10)]);
            while occupy(&mut all, X, pool_size) {}
            assert_eq!(connected(&all, X), expected);
            assert!(!must_yield(&all, X, pool_size));
        }
    }

    #[test]
    fn the_only_waiter_for_a_key_gets_a_connection_from_many_for_another() {
        let mut all = waiting(&[(X, 1000)]);
        slice(&mut all, 8);
        assert_eq!(connected(&all, X), 4);
        join(&mut all, Y);
        assert!(!occupy(&mut all, Y, 8));
        slice(&mut all, 8);
        assert_eq!((connected(&all, X), connected(&all, Y)), (3, 1));
        // And keeps it.
        slice(&mut all, 8);
        assert_eq!((connected(&all, X), connected(&all, Y)), (3, 1));
        vacate(&mut all, Y);
        leave(&mut all, Y);
        slice(&mut all, 8);
        assert_eq!(connected(&all, X), 4);
    }

    #[test]
    fn two_keys_with_many_waiters_have_as_many_connections_each() {
        let mut all = waiting(&[(X, 100), (Y, 100)]);
        slice(&mut all, 8);
        assert_eq!((connected(&all, X), connected(&all, Y)), (2, 2));
        slice(&mut all, 8);
        assert_eq!((connected(&all, X), connected(&all, Y)), (2, 2));
    }

    #[test]
    fn keys_take_turns_if_they_are_more_than_the_budget() {
        let mut all = waiting(&[(X, 100), (Y, 1), (Z, 1)]);
        let mut turns = [0; 3];
        for _ in 0..30 {
            slice(&mut all, 2);
            for (turns, id) in turns.iter_mut().zip([X, Y, Z]) {
                *turns += connected(&all, id);
            }
        }
        assert!(turns.iter().all(|turns| *turns >= 10), "{turns:?}");
    }

    #[test]
    fn a_waiter_that_has_gone_is_not_counted() {
        let mut all = waiting(&[(X, 2)]);
        assert!(occupy(&mut all, X, 4));
        leave(&mut all, X);
        vacate(&mut all, X);
        leave(&mut all, X);
        assert_eq!(all.occupied, 0);
        assert!(all.keys.is_empty() && all.order.is_empty());
    }

    #[test]
    fn a_smaller_budget_is_kept_after_the_slices_end() {
        let mut all = waiting(&[(X, 2), (Y, 2), (Z, 2)]);
        assert_eq!((budget(16, false), budget(16, true)), (8, 2));
        for id in [X, Y, Z, X, Y, Z] {
            assert!(occupy(&mut all, id, 16));
        }
        assert!(!must_yield(&all, X, 16));
        for id in [X, Y, Z, X] {
            assert!(all.must_yield(id, budget(16, true)));
            vacate(&mut all, id);
        }
        assert_eq!(all.occupied, 2);
        let all = waiting(&[(X, 1), (Y, 1)]);
        assert!(!all.must_yield(X, 2));
    }

    #[test]
    fn a_lock_that_is_freed_wakes_the_first_waiter_unless_one_waits_on_the_server() {
        let mut all = ConnectionBudget::new();
        let [first, second, other] = [X, X, Y].map(|id| join(&mut all, id));
        for wakeup in [&first, &other] {
            assert!(wakeup.is_pending.swap(false, Ordering::Relaxed));
        }
        all.freed(X);
        assert!(first.is_pending() && !second.is_pending() && !other.is_pending());
        leave(&mut all, X);
        all.freed(X);
        assert!(second.is_pending());

        second.is_pending.store(false, Ordering::Relaxed);
        assert!(occupy(&mut all, X, 4));
        let third = join(&mut all, X);
        all.freed(X);
        assert!(!third.is_pending());
    }

    #[test]
    fn a_waiter_keeps_its_turn_when_it_vacates_a_connection() {
        let mut all = ConnectionBudget::new();
        let first = Arc::default();
        let number = all.join(X, &first);
        let second = join(&mut all, X);
        assert!(all.occupy(X, number, 1));
        all.vacate(X, number, &first);
        first.is_pending.store(false, Ordering::Relaxed);
        all.freed(X);
        assert!(first.is_pending() && !second.is_pending());
    }

    #[test]
    fn a_waiter_that_does_not_take_the_lock_wakes_the_next() {
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
                first.is_granted(false);
            }
            drop(first);
            assert_eq!(second.wakeup.is_pending(), !is_granted);
            drop((second, third));
        }
    }

    #[test]
    fn sharers_wake_each_other() {
        let id = LockId::Pair(-5, -6);
        let [mut first, second] = [(); 2].map(|()| Waiter::for_lock(id));
        first.tries();
        first.is_granted(true);
        drop(first);
        assert!(second.wakeup.is_pending());
    }

    #[test]
    fn a_waiter_is_woken_for_a_connection_that_is_vacated() {
        const LONG: Duration = Duration::from_secs(600);
        let id = LockId::Pair(-1, -2);
        let mut first = Waiter::for_lock(id);
        first.tries();
        first.wait_for_turn(1, LONG);
        assert!(first.occupy(1));
        let mut second = Waiter::for_lock(id);
        assert!(!second.occupy(1));
        second.wait_for_turn(1, Duration::from_millis(1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                second.wait_for_turn(1, LONG);
                assert!(second.occupy(1));
            });
            first.vacate();
        });
    }
}
