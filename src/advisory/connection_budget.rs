//! How many connections the threads that wait for session locks may occupy.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crate::key::LockId;
use crate::panics;

/// The threads of this process that wait for locks out of a pool. Those within the budget wait on the server, each with a
/// connection. The others hold none. A pool has no identity, so the threads of all pools are counted together: with several
/// pools, more threads wait without a connection than necessary.
static BUDGET: Mutex<ConnectionBudget> = Mutex::new(ConnectionBudget::new());

#[derive(Debug)]
struct ConnectionBudget {
    occupied: u32,
    keys: BTreeMap<LockId, KeyWaiters>,
    /// Counts the connections that were vacated, and the keys that were added.
    events: u64,
}

/// The threads that wait for one key.
#[derive(Debug, Default)]
struct KeyWaiters {
    /// Those that occupy a connection.
    connected: u32,
    /// Those that hold none.
    unconnected: u32,
    /// The event at which this key was added or last vacated a connection. Among keys with the same number of connections,
    /// the one for which that is longest ago is next.
    since: u64,
    vacated: Arc<Condvar>,
}

impl ConnectionBudget {
    const fn new() -> Self {
        Self {
            occupied: 0,
            keys: BTreeMap::new(),
            events: 0,
        }
    }

    fn join(&mut self, id: LockId) -> &Arc<Condvar> {
        self.events += 1;
        let since = self.events;
        let waiters = self.keys.entry(id).or_insert_with(|| KeyWaiters {
            since,
            ..KeyWaiters::default()
        });
        waiters.unconnected += 1;
        &waiters.vacated
    }

    fn leave(&mut self, id: LockId) {
        if let Some(waiters) = self.keys.get_mut(&id) {
            waiters.unconnected -= 1;
            if waiters.unconnected + waiters.connected == 0 {
                self.keys.remove(&id);
            }
        }
    }

    /// The key whose waiter gets the next connection.
    fn next(&self) -> Option<(&LockId, &KeyWaiters)> {
        let unconnected = self.keys.iter().filter(|(_, key)| key.unconnected > 0);
        unconnected.max_by_key(|(_, key)| Reverse((key.connected, key.since)))
    }

    fn allows(&self, id: LockId, pool_size: u32) -> bool {
        self.occupied < budget(pool_size) && self.next().is_some_and(|(next, _)| *next == id)
    }

    fn occupy(&mut self, id: LockId, pool_size: u32) -> bool {
        let allowed = self.allows(id, pool_size);
        if let Some(waiters) = self.keys.get_mut(&id).filter(|_| allowed) {
            waiters.unconnected -= 1;
            waiters.connected += 1;
            self.occupied += 1;
        }
        allowed
    }

    fn vacate(&mut self, id: LockId) {
        self.events += 1;
        if let Some(waiters) = self.keys.get_mut(&id) {
            waiters.connected -= 1;
            waiters.unconnected += 1;
            waiters.since = self.events;
            self.occupied -= 1;
        }
    }

    /// Returns whether another key has so few connections that this key must yield one to it.
    fn must_yield(&self, id: LockId, pool_size: u32) -> bool {
        let own = self.keys.get(&id).map_or(0, |waiters| waiters.connected);
        self.occupied >= budget(pool_size)
            && self.next().is_some_and(|(next, waiters)| {
                *next != id && (waiters.connected == 0 || waiters.connected + 1 < own)
            })
    }

    fn wake_next(&self) {
        if let Some((_, waiters)) = self.next() {
            waiters.vacated.notify_one();
        }
    }
}

/// Half of the pool, and at least one connection.
fn budget(pool_size: u32) -> u32 {
    (pool_size / 2).max(1)
}

/// A thread that waits for a lock. At first it occupies no connection.
#[derive(Debug)]
pub(super) struct Waiter {
    id: LockId,
    is_connected: bool,
    vacated: Arc<Condvar>,
}

impl Waiter {
    pub(super) fn for_lock(id: LockId) -> Self {
        Self {
            id,
            is_connected: false,
            vacated: Arc::clone(lock().join(id)),
        }
    }

    pub(super) fn id(&self) -> LockId {
        self.id
    }

    /// Occupies a connection, if the budget for such a pool has one left and it is this key's turn.
    pub(super) fn occupy(&mut self, pool_size: u32) -> bool {
        let mut all = lock();
        self.is_connected = all.occupy(self.id, pool_size);
        if self.is_connected {
            // The budget may have more than one left.
            all.wake_next();
        }
        self.is_connected
    }

    /// Vacates the connection that it occupies, if any.
    pub(super) fn vacate(&mut self) {
        if self.is_connected {
            self.is_connected = false;
            let mut all = lock();
            all.vacate(self.id);
            all.wake_next();
        }
    }

    /// Returns whether a waiter for another key gets the connection of this one.
    pub(super) fn must_yield(&self, pool_size: u32) -> bool {
        lock().must_yield(self.id, pool_size)
    }

    /// Waits until this thread may occupy a connection, for at most `limit`.
    pub(super) fn wait_for_turn(&self, pool_size: u32, limit: Duration) {
        drop(
            self.vacated
                .wait_timeout_while(lock(), limit, |all| !all.allows(self.id, pool_size)),
        );
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.vacate();
        let mut all = lock();
        all.leave(self.id);
        // It may have been woken for a connection that it does not occupy.
        all.wake_next();
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
                all.join(*id);
            }
        }
        all
    }

    fn connected(all: &ConnectionBudget, id: LockId) -> u32 {
        all.keys.get(&id).map_or(0, |waiters| waiters.connected)
    }

    /// The end of a slice: each thread that must yield does, and the budget is distributed again.
    fn slice(all: &mut ConnectionBudget, pool_size: u32) {
        for id in [X, Y, Z] {
            for _ in 0..connected(all, id) {
                if all.must_yield(id, pool_size) {
                    all.vacate(id);
                }
            }
        }
        for _ in 0..pool_size {
            for id in [X, Y, Z] {
                all.occupy(id, pool_size);
            }
        }
    }

    #[test]
    fn the_budget_is_half_of_a_pool_and_at_least_one() {
        for (pool_size, expected) in [(1, 1), (2, 1), (3, 1), (7, 3), (8, 4)] {
            let mut all = waiting(&[(X, 10)]);
            while all.occupy(X, pool_size) {}
            assert_eq!(connected(&all, X), expected);
            assert!(!all.must_yield(X, pool_size));
        }
    }

    #[test]
    fn the_only_waiter_for_a_key_gets_a_connection_from_many_for_another() {
        let mut all = waiting(&[(X, 1000)]);
        slice(&mut all, 8);
        assert_eq!(connected(&all, X), 4);
        all.join(Y);
        assert!(!all.occupy(Y, 8));
        slice(&mut all, 8);
        assert_eq!((connected(&all, X), connected(&all, Y)), (3, 1));
        // And keeps it.
        slice(&mut all, 8);
        assert_eq!((connected(&all, X), connected(&all, Y)), (3, 1));
        all.vacate(Y);
        all.leave(Y);
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
        assert!(all.occupy(X, 4));
        all.leave(X);
        all.vacate(X);
        all.leave(X);
        assert_eq!(all.occupied, 0);
        assert!(all.keys.is_empty());
    }

    #[test]
    fn a_waiter_is_woken_for_a_connection_that_is_vacated() {
        const LONG: Duration = Duration::from_secs(600);
        let id = LockId::Pair(-1, -2);
        let mut first = Waiter::for_lock(id);
        first.wait_for_turn(2, LONG);
        assert!(first.occupy(2));
        let mut second = Waiter::for_lock(id);
        assert!(!second.occupy(2));
        second.wait_for_turn(2, Duration::from_millis(1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                second.wait_for_turn(2, LONG);
                assert!(second.occupy(2));
            });
            first.vacate();
        });
    }
}
