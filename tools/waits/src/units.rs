//! Waits for units of a rate limit, as in `RateLimit::acquire_timeout`.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

use crate::clock::{explore, invariant, join, lock, pause, sleep_until, spawn};
use crate::locks::{End, any_end};
use crate::mode::{Async, Blocking, Mode};
use crate::statement::Database;
use crate::sync::Instant;
use crate::waiting::{Turns, What, wake_oldest};
use crate::watch::MS;

const TRIP: Duration = MS;
const REFILL: Duration = Duration::from_millis(20);
const BURST: u32 = 3;
const DATABASE: Database = Database(1);

fn units() -> What {
    What::Units("limit", "key".into())
}

/// The row of a key, and its waiters.
#[derive(Debug)]
struct Row {
    full_at: Instant,
    /// The units that refused waiters still want.
    wanted: Vec<u32>,
    sent: usize,
    idle_since: Instant,
    is_locked_until: Instant,
    reset_at: Instant,
}

#[derive(Debug, Clone)]
struct World(Arc<Mutex<Row>>);

enum Reply {
    Allowed,
    Limited(Duration),
    Locked,
}

impl Row {
    /// When this many units are available.
    fn due(&self, units: u32) -> Instant {
        self.full_at - REFILL * (BURST - units)
    }
}

impl World {
    /// Fails if wanted units are available and no waiter tries for longer than `longest`.
    fn new(longest: Duration) -> Self {
        let now = Instant::now();
        let world = Self(Arc::new(Mutex::new(Row {
            full_at: now,
            wanted: Vec::new(),
            sent: 0,
            idle_since: now,
            is_locked_until: now,
            reset_at: now,
        })));
        let watched = world.clone();
        invariant(move |next| {
            let since = {
                let row = lock(&watched.0);
                let least = row.wanted.iter().min().filter(|_| row.sent == 0);
                least.map(|units| row.due(*units).max(row.idle_since).max(row.reset_at))
            };
            let idle = since.map_or(Duration::ZERO, |since| next.duration_since(since));
            assert!(
                idle <= longest,
                "units are there, and nobody tries for {idle:?}"
            );
        });
        world
    }

    async fn check<M: Mode>(&self, units: u32) -> Reply {
        let on_its_way = Sent::new(self);
        M::run(sleep_until(Instant::now() + TRIP / 2)).await;
        let now = Instant::now();
        let locked_until = lock(&self.0).is_locked_until;
        let reply = if locked_until > now {
            M::run(sleep_until(locked_until.min(now + 250 * MS))).await;
            Reply::Locked
        } else {
            let mut row = lock(&self.0);
            let due = row.due(units);
            if due <= now {
                row.full_at = row.full_at.max(now) + REFILL * units;
                Reply::Allowed
            } else {
                Reply::Limited(due.duration_since(now))
            }
        };
        M::run(sleep_until(Instant::now() + TRIP / 2)).await;
        drop(on_its_way);
        reply
    }

    async fn acquire<M: Mode>(&self, units: u32, deadline: Option<Instant>) -> Option<()> {
        let mut waiting = None;
        let mut turns = Turns::for_units(units, deadline);
        while turns.next::<M>().await {
            let sent = Instant::now();
            match M::within(deadline, self.check::<M>(units)).await {
                Some(Reply::Allowed) => return Some(()),
                Some(Reply::Limited(retry_after)) => {
                    let due = Instant::now() + retry_after;
                    if deadline.is_some_and(|deadline| due > deadline) {
                        break;
                    }
                    turns.note_refusal(self::units(), DATABASE, sent);
                    turns.not_before(retry_after);
                    waiting.get_or_insert_with(|| Wanted::new(self, units));
                }
                Some(Reply::Locked) => turns.note_lock(self::units()),
                None => break,
            }
        }
        None
    }

    fn reset(&self) {
        pause(TRIP / 2);
        let now = Instant::now();
        {
            let mut row = lock(&self.0);
            (row.full_at, row.reset_at) = (now, now);
        }
        pause(TRIP / 2);
        wake_oldest(&units());
    }
}

struct Sent<'a>(&'a World);

impl<'a> Sent<'a> {
    fn new(world: &'a World) -> Self {
        lock(&world.0).sent += 1;
        Self(world)
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut row = lock(&self.0.0);
        row.sent -= 1;
        row.idle_since = now;
    }
}

struct Wanted<'a>(&'a World, u32);

impl<'a> Wanted<'a> {
    fn new(world: &'a World, units: u32) -> Self {
        lock(&world.0).wanted.push(units);
        Self(world, units)
    }
}

impl Drop for Wanted<'_> {
    fn drop(&mut self) {
        let mut row = lock(&self.0.0);
        let i = row.wanted.iter().position(|units| *units == self.1);
        row.wanted.swap_remove(i.unwrap());
    }
}

fn crowd(world: &World) {
    for _ in 0..4 {
        let (is_async, end) = any_end(150);
        let units = thread_rng().gen_range(1..=BURST);
        let begin = MS / 2 * thread_rng().gen_range(0..20);
        let world = world.clone();
        spawn(move || {
            pause(begin);
            let acquired = end.wait(
                is_async,
                |deadline| world.acquire::<Async>(units, deadline),
                |deadline| world.acquire::<Blocking>(units, deadline),
            );
            assert!(acquired.is_some() || !matches!(end, End::Never));
        });
    }
}

fn assert_no_place_is_left() {
    for database in [DATABASE, Database(i32::MIN)] {
        let mut turns = Turns::for_units(u32::MAX, None);
        turns.note_refusal(units(), database, Instant::now());
        assert!(turns.slice().is_some(), "a place is left in the queue");
    }
}

#[test]
fn units_of_a_crowd_that_wants_few_and_many() {
    explore(|| {
        let world = World::new(5 * MS);
        lock(&world.0).full_at = Instant::now() + REFILL * BURST;
        crowd(&world);
        join();
        assert_no_place_is_left();
    });
}

#[test]
fn units_that_a_reset_gives_back_are_tried_for_at_once() {
    explore(|| {
        let world = World::new(5 * MS);
        lock(&world.0).full_at = Instant::now() + Duration::from_secs(100);
        crowd(&world);
        // Also while refusals are on their way.
        let reset = MS / 2 * thread_rng().gen_range(2..50);
        // Others want more than there was, so each needs one.
        for _ in 0..4 {
            let world = world.clone();
            spawn(move || {
                pause(reset + Duration::from_millis(160));
                world.reset();
            });
        }
        let first = world.clone();
        spawn(move || {
            pause(reset);
            first.reset();
        });
        join();
        assert_no_place_is_left();
    });
}

#[test]
fn units_of_a_key_that_a_transaction_has_locked() {
    explore(|| {
        let world = World::new(135 * MS);
        lock(&world.0).is_locked_until = Instant::now() + MS * thread_rng().gen_range(1..300);
        crowd(&world);
        join();
        assert_no_place_is_left();
    });
}
