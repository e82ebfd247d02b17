//! The budget of connections for the waits for session locks: how many of them a pool's waiters may occupy, and whose turn it is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::wakeup::Wakeup;
use crate::key::LockId;

/// Who waits for which lock, and who of them occupies a connection.
#[derive(Debug)]
pub(super) struct ConnectionBudget {
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

impl KeyWaiters {
    fn place(&self, id: LockId) -> Option<(u32, u64, LockId)> {
        (!self.unconnected.is_empty()).then_some((self.connected, self.since, id))
    }
}

impl ConnectionBudget {
    pub(super) const fn new() -> Self {
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
    pub(super) fn join(&mut self, id: LockId, wakeup: &Arc<Wakeup>) -> u64 {
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

    pub(super) fn leave(&mut self, id: LockId, number: u64) {
        self.change(id, |waiters| {
            waiters.unconnected.remove(&number);
        });
    }

    /// The key whose waiter gets the next connection, and how many it has.
    fn next(&self) -> Option<(LockId, u32)> {
        let (connected, _, id) = self.order.first()?;
        Some((*id, *connected))
    }

    pub(super) fn allows(&self, id: LockId, budget: u32) -> bool {
        self.occupied < budget && self.next().is_some_and(|(next, _)| next == id)
    }

    pub(super) fn occupy(&mut self, id: LockId, number: u64, budget: u32) -> bool {
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

    pub(super) fn vacate(&mut self, id: LockId, number: u64, wakeup: &Arc<Wakeup>) {
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
    pub(super) fn must_yield(&self, id: LockId, budget: u32) -> bool {
        let own = self.keys.get(&id).map_or(0, |waiters| waiters.connected);
        self.occupied > budget
            || self.occupied == budget
                && self.next().is_some_and(|(next, connected)| {
                    next != id && (connected == 0 || connected + 1 < own)
                })
    }

    /// Wakes the waiter that gets the next connection, if the budget has one left.
    pub(super) fn wake_next(&self, budget: u32) {
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
    pub(super) fn freed(&self, id: LockId) {
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
            assert!(wakeup.take());
        }
        all.freed(X);
        assert!(first.is_pending() && !second.is_pending() && !other.is_pending());
        leave(&mut all, X);
        all.freed(X);
        assert!(second.is_pending());

        assert!(second.take());
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
        first.take();
        all.freed(X);
        assert!(first.is_pending() && !second.is_pending());
    }
}
