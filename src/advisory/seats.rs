//! How many connections the waiters for session locks may occupy.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::key::LockId;

/// The threads of this process that wait for locks out of a pool. Those with a seat wait on the server, each
/// with a connection; the others hold none. A pool does not tell which one it is, so those of all pools count:
/// with several, more threads wait without a connection than need to.
static SEATS: Mutex<Seats> = Mutex::new(Seats::new());

#[derive(Debug)]
struct Seats {
    taken: u32,
    keys: BTreeMap<LockId, Waiters>,
    /// Counts the seats that were given back, and the keys that came.
    events: u64,
}

/// Those who wait for one key.
#[derive(Debug, Default)]
struct Waiters {
    seated: u32,
    standing: u32,
    /// When this key last came, or last gave a seat back: between keys with the same number of seats, it is
    /// the turn of the one for which that is longest ago.
    since: u64,
    given_back: Arc<Condvar>,
}

impl Seats {
    const fn new() -> Self {
        Self {
            taken: 0,
            keys: BTreeMap::new(),
            events: 0,
        }
    }

    fn join(&mut self, id: LockId) -> &Arc<Condvar> {
        self.events += 1;
        let since = self.events;
        let waiters = self.keys.entry(id).or_insert_with(|| Waiters {
            since,
            ..Waiters::default()
        });
        waiters.standing += 1;
        &waiters.given_back
    }

    fn leave(&mut self, id: LockId) {
        if let Some(waiters) = self.keys.get_mut(&id) {
            waiters.standing -= 1;
            if waiters.standing + waiters.seated == 0 {
                self.keys.remove(&id);
            }
        }
    }

    /// The key whose waiter is to have the next seat.
    fn next(&self) -> Option<(&LockId, &Waiters)> {
        let standing = self.keys.iter().filter(|(_, key)| key.standing > 0);
        standing.max_by_key(|(_, key)| Reverse((key.seated, key.since)))
    }

    fn has_seat_for(&self, id: LockId, pool_size: u32) -> bool {
        self.taken < seats(pool_size) && self.next().is_some_and(|(next, _)| *next == id)
    }

    fn sit(&mut self, id: LockId, pool_size: u32) -> bool {
        let has_seat = self.has_seat_for(id, pool_size);
        if let Some(waiters) = self.keys.get_mut(&id).filter(|_| has_seat) {
            waiters.standing -= 1;
            waiters.seated += 1;
            self.taken += 1;
        }
        has_seat
    }

    fn stand(&mut self, id: LockId) {
        self.events += 1;
        if let Some(waiters) = self.keys.get_mut(&id) {
            waiters.seated -= 1;
            waiters.standing += 1;
            waiters.since = self.events;
            self.taken -= 1;
        }
    }

    /// Returns whether another key has so few seats that one of this key's is to go there.
    fn is_wanted_elsewhere(&self, id: LockId, pool_size: u32) -> bool {
        let own = self.keys.get(&id).map_or(0, |waiters| waiters.seated);
        self.taken >= seats(pool_size)
            && self.next().is_some_and(|(next, waiters)| {
                *next != id && (waiters.seated == 0 || waiters.seated + 1 < own)
            })
    }

    fn wake_next(&self) {
        if let Some((_, waiters)) = self.next() {
            waiters.given_back.notify_one();
        }
    }
}

/// Half of the pool, and one at least.
fn seats(pool_size: u32) -> u32 {
    (pool_size / 2).max(1)
}

/// A thread that waits for a lock. It has no seat at first.
#[derive(Debug)]
pub(super) struct Waiter {
    id: LockId,
    is_seated: bool,
    given_back: Arc<Condvar>,
}

impl Waiter {
    pub(super) fn of(id: LockId) -> Self {
        Self {
            id,
            is_seated: false,
            given_back: Arc::clone(lock().join(id)),
        }
    }

    pub(super) fn id(&self) -> LockId {
        self.id
    }

    /// Takes a seat, if the waiters have less than half of such a pool and it is this key's turn.
    pub(super) fn sit(&mut self, pool_size: u32) -> bool {
        let mut all = lock();
        self.is_seated = all.sit(self.id, pool_size);
        if self.is_seated {
            // There may be more than one.
            all.wake_next();
        }
        self.is_seated
    }

    /// Gives its seat back.
    pub(super) fn stand(&mut self) {
        if self.is_seated {
            self.is_seated = false;
            let mut all = lock();
            all.stand(self.id);
            all.wake_next();
        }
    }

    /// Returns whether the waiter for another key is to have its seat.
    pub(super) fn is_to_stand(&self, pool_size: u32) -> bool {
        lock().is_wanted_elsewhere(self.id, pool_size)
    }

    /// Waits that long, or until there is a seat.
    pub(super) fn wait_for_seat(&self, pool_size: u32, limit: Duration) {
        drop(
            self.given_back
                .wait_timeout_while(lock(), limit, |all| !all.has_seat_for(self.id, pool_size)),
        );
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.stand();
        let mut all = lock();
        all.leave(self.id);
        // It may have been woken for a seat that it does not take.
        all.wake_next();
    }
}

fn lock() -> MutexGuard<'static, Seats> {
    SEATS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: LockId = LockId::BigInt(1);
    const Y: LockId = LockId::BigInt(2);
    const Z: LockId = LockId::Pair(0, 0);

    fn waiting(crowds: &[(LockId, u32)]) -> Seats {
        let mut all = Seats::new();
        for (id, number) in crowds {
            for _ in 0..*number {
                all.join(*id);
            }
        }
        all
    }

    fn seated(all: &Seats, id: LockId) -> u32 {
        all.keys.get(&id).map_or(0, |waiters| waiters.seated)
    }

    /// Each that has to stand up does, as after a slice; the seats are taken again.
    fn slice(all: &mut Seats, pool_size: u32) {
        for id in [X, Y, Z] {
            for _ in 0..seated(all, id) {
                if all.is_wanted_elsewhere(id, pool_size) {
                    all.stand(id);
                }
            }
        }
        for _ in 0..pool_size {
            for id in [X, Y, Z] {
                all.sit(id, pool_size);
            }
        }
    }

    #[test]
    fn half_of_a_pool_and_one_at_least() {
        for (pool_size, expected) in [(1, 1), (2, 1), (3, 1), (7, 3), (8, 4)] {
            let mut all = waiting(&[(X, 10)]);
            while all.sit(X, pool_size) {}
            assert_eq!(seated(&all, X), expected);
            assert!(!all.is_wanted_elsewhere(X, pool_size));
        }
    }

    #[test]
    fn who_is_alone_at_a_key_gets_a_seat_from_a_crowd() {
        let mut all = waiting(&[(X, 1000)]);
        slice(&mut all, 8);
        assert_eq!(seated(&all, X), 4);
        all.join(Y);
        assert!(!all.sit(Y, 8));
        slice(&mut all, 8);
        assert_eq!((seated(&all, X), seated(&all, Y)), (3, 1));
        // And keeps it.
        slice(&mut all, 8);
        assert_eq!((seated(&all, X), seated(&all, Y)), (3, 1));
        all.stand(Y);
        all.leave(Y);
        slice(&mut all, 8);
        assert_eq!(seated(&all, X), 4);
    }

    #[test]
    fn two_crowds_have_as_many_seats_each() {
        let mut all = waiting(&[(X, 100), (Y, 100)]);
        slice(&mut all, 8);
        assert_eq!((seated(&all, X), seated(&all, Y)), (2, 2));
        slice(&mut all, 8);
        assert_eq!((seated(&all, X), seated(&all, Y)), (2, 2));
    }

    #[test]
    fn keys_that_are_more_than_the_seats_take_turns() {
        let mut all = waiting(&[(X, 100), (Y, 1), (Z, 1)]);
        let mut turns = [0; 3];
        for _ in 0..30 {
            slice(&mut all, 2);
            for (turns, id) in turns.iter_mut().zip([X, Y, Z]) {
                *turns += seated(&all, id);
            }
        }
        assert!(turns.iter().all(|turns| *turns >= 10), "{turns:?}");
    }

    #[test]
    fn who_has_gone_is_not_counted() {
        let mut all = waiting(&[(X, 2)]);
        assert!(all.sit(X, 4));
        all.leave(X);
        all.stand(X);
        all.leave(X);
        assert_eq!(all.taken, 0);
        assert!(all.keys.is_empty());
    }

    #[test]
    fn a_waiter_is_woken_for_a_seat_that_is_given_back() {
        const LONG: Duration = Duration::from_secs(600);
        let id = LockId::Pair(-1, -2);
        let mut first = Waiter::of(id);
        first.wait_for_seat(2, LONG);
        assert!(first.sit(2));
        let mut second = Waiter::of(id);
        assert!(!second.sit(2));
        second.wait_for_seat(2, Duration::from_millis(1));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                second.wait_for_seat(2, LONG);
                assert!(second.sit(2));
            });
            first.stand();
        });
    }
}
