//! Waits for a slot, as in `Semaphore::acquire`, while another process waits for it, too.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

use crate::alarm::jitter;
use crate::clock::{explore, join, lock, pause, sleep_until, spawn};
use crate::locks::{End, any_end};
use crate::mode::{Async, Blocking, Mode};
use crate::statement::Database;
use crate::sync::Instant;
use crate::waiting::{Turns, What, let_others_pass, wake_oldest};
use crate::watch::{MS, Watch};

const TRIP: Duration = MS;
const DATABASE: Database = Database(1);

fn slot() -> What {
    What::Slot("slot".into())
}

/// A service on the server, with the number of free slots.
#[derive(Clone)]
struct World {
    free: Arc<Mutex<u32>>,
    watch: Watch,
}

/// A slot that is held until the drop.
struct Permit(World);

impl World {
    fn new(slots: u32, longest: Duration, patience: Duration) -> Self {
        Self {
            free: Arc::new(Mutex::new(slots)),
            watch: Watch::new(longest, patience),
        }
    }

    fn take(&self) -> bool {
        let mut free = lock(&self.free);
        let taken = free.checked_sub(1);
        *free = taken.unwrap_or(*free);
        taken.is_some()
    }

    fn give_back(&self) {
        *lock(&self.free) += 1;
    }

    async fn claim<M: Mode>(&self) -> Option<Permit> {
        let world = self.clone();
        let runtime = M::Runtime::default();
        let claim = M::run_detached(&runtime, None, async move {
            let _on_its_way = world.watch.send();
            M::run(sleep_until(Instant::now() + TRIP / 2)).await;
            let permit = world.take().then(|| Permit(world.clone()));
            M::run(sleep_until(Instant::now() + TRIP / 2)).await;
            Ok(permit)
        });
        claim.await.unwrap()
    }

    async fn acquire<M: Mode>(&self, deadline: Option<Instant>) -> Option<Permit> {
        let has_time = deadline.filter(|deadline| *deadline > Instant::now());
        let (mut waiting, mut has_asked) = (None, false);
        let mut turns = Turns::new(deadline);
        let_others_pass::<M>(&slot(), deadline).await;
        while turns.next::<M>().await {
            let sent = Instant::now();
            let is_in_time = has_asked || has_time.is_none_or(|deadline| sent < deadline);
            assert!(is_in_time, "the first try comes before the deadline");
            has_asked = true;
            match M::within(deadline, self.claim::<M>()).await {
                Some(None) => {
                    turns.note_refusal(slot(), DATABASE, sent);
                    waiting.get_or_insert_with(|| self.watch.wait());
                    turns.not_after(Duration::from_secs(3600));
                }
                Some(granted) => return granted,
                None => break,
            }
        }
        assert!(has_asked, "a waiter asks at least once");
        None
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let world = self.0.clone();
        spawn(move || {
            pause(TRIP / 2);
            world.give_back();
            pause(TRIP / 2);
            world.watch.owe();
            wake_oldest(&slot());
        });
    }
}

fn start(world: &World, is_async: bool, begin: Duration, end: End, hold: Duration) {
    let world = world.clone();
    spawn(move || {
        pause(begin);
        let acquired = end.wait(
            is_async,
            |deadline| world.acquire::<Async>(deadline),
            |deadline| world.acquire::<Blocking>(deadline),
        );
        if acquired.is_some() {
            pause(hold);
        } else {
            assert!(!matches!(end, End::Never), "it waits until it has a slot");
        }
    });
}

/// A newcomer must be woken as the oldest, or a place was left behind.
fn assert_no_place_is_left() {
    let mut turns = Turns::new(None);
    turns.note_refusal(slot(), DATABASE, Instant::now());
    assert!(turns.slice().is_some(), "a place is left in the queue");
}

#[test]
fn slots_of_a_crowd() {
    explore(|| {
        // A waiter that is woken by a release tries at once: the process yields only after it has
        // taken its own releases for half a second.
        let world = World::new(2, 130 * MS, Duration::ZERO);
        for _ in 0..2 {
            assert!(world.take());
            let held = world.clone();
            let hold = MS * thread_rng().gen_range(0..10);
            // The holder is in this process or in another one.
            let is_here = thread_rng().r#gen::<bool>();
            spawn(move || {
                pause(hold);
                if is_here {
                    drop(Permit(held));
                } else {
                    held.give_back();
                }
            });
        }
        for _ in 0..4 {
            let (is_async, end) = any_end(30);
            let (begin, hold) = (thread_rng().gen_range(0..6), thread_rng().gen_range(0..3));
            start(&world, is_async, MS / 2 * begin, end, MS * hold);
        }
        join();
        assert_no_place_is_left();
        assert_eq!(*lock(&world.free), 2, "all slots are free");
    });
}

/// Polls, as another process does. Returns how long the wait took.
fn poll(world: &World) -> Duration {
    let (began, mut next) = (Instant::now(), 5 * MS);
    loop {
        pause(TRIP);
        if world.take() {
            return began.elapsed();
        }
        pause(jitter(next));
        next = next.mul_f64(1.5).min(100 * MS);
    }
}

/// Two waiters keep the slot busy and others have no time to yield, while another process waits twice.
#[test]
fn slots_reach_another_process_and_those_without_time() {
    explore(|| {
        let world = World::new(1, 400 * MS, 170 * MS);
        let is_over = Arc::new(AtomicBool::new(false));
        for _ in 0..2 {
            let (world, is_over) = (world.clone(), is_over.clone());
            let is_async = thread_rng().r#gen();
            spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    let permit = End::Never.wait(
                        is_async,
                        |deadline| world.acquire::<Async>(deadline),
                        |deadline| world.acquire::<Blocking>(deadline),
                    );
                    assert!(permit.is_some());
                    pause(20 * MS);
                    drop(permit);
                }
            });
        }
        let hurried = Arc::new(AtomicUsize::new(0));
        {
            let (world, is_over, hurried) = (world.clone(), is_over.clone(), hurried.clone());
            spawn(move || {
                while !is_over.load(Ordering::SeqCst) {
                    let is_async = thread_rng().r#gen();
                    let end = End::Deadline(MS * thread_rng().gen_range(10..150));
                    pause(MS * thread_rng().gen_range(0..300));
                    end.wait(
                        is_async,
                        |deadline| world.acquire::<Async>(deadline),
                        |deadline| world.acquire::<Blocking>(deadline),
                    );
                    hurried.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let other = world.clone();
        spawn(move || {
            for longest in [2500, 2500] {
                pause(MS * thread_rng().gen_range(0..500));
                let waited = poll(&other);
                assert!(
                    waited < MS * longest,
                    "another process waits for {waited:?}"
                );
                // Long enough for the process to notice, so that it soon shares again.
                pause(200 * MS);
                other.give_back();
            }
            is_over.store(true, Ordering::SeqCst);
        });
        join();
        assert_no_place_is_left();
    });
}
