//! Waits for a lock, as `AdvisoryLock::acquire` has them.

use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};

use crate::clock::{block_on, explore, lock, pause, run_until, sleep_until, spawn};
use crate::key::LockId;
use crate::mode::{Async, Blocking, Mode};
use crate::statement::Database;
use crate::sync::Instant;
use crate::waiting::{Turns, What, wake_oldest};
use crate::watch::{MS, Waiting, Watch};

const LOCK: What = What::Lock(LockId(7));
const TRIP: Duration = MS;
const DATABASE: Database = Database(1);

/// The lock on the server, and its waiters there.
#[derive(Default)]
struct Server {
    holder: Option<u64>,
    waiting: Vec<(u64, Waker)>,
    last: u64,
}

#[derive(Clone)]
struct World {
    server: Arc<Mutex<Server>>,
    watch: Watch,
    can_spare: bool,
}

/// A session of the server that has the lock, or may get it.
struct Session {
    world: World,
    id: u64,
    waits_until: Option<Instant>,
}

impl World {
    fn new(can_spare: bool) -> Self {
        Self {
            server: Arc::default(),
            // A waiter that cannot wait on the server pauses for at most an eighth of a second.
            watch: Watch::new(if can_spare { 10 * MS } else { 130 * MS }, Duration::ZERO),
            can_spare,
        }
    }

    fn session(&self) -> Session {
        let mut server = lock(&self.server);
        server.last += 1;
        Session {
            world: self.clone(),
            id: server.last,
            waits_until: None,
        }
    }

    async fn acquire<M: Mode>(&self, deadline: Option<Instant>) -> Option<Session> {
        let mut waiting = None;
        let mut turns = Turns::new(deadline);
        while turns.next::<M>().await {
            let attempt = self.attempt::<M>(&mut turns, &mut waiting);
            match M::within(deadline, attempt).await {
                Some(None) => {}
                Some(granted) => return granted,
                None => break,
            }
        }
        None
    }

    async fn attempt<M: Mode>(
        &self,
        turns: &mut Turns,
        waiting: &mut Option<Waiting>,
    ) -> Option<Session> {
        let mut session = self.session();
        let on_its_way = self.watch.send();
        let sent = Instant::now();
        M::run(sleep_until(sent + TRIP / 2)).await;
        let is_taken = session.take();
        M::run(sleep_until(Instant::now() + TRIP / 2)).await;
        if is_taken {
            return Some(session);
        }
        turns.note_refusal(LOCK, DATABASE, sent);
        waiting.get_or_insert_with(|| self.watch.wait());
        let slice = turns.slice().filter(|_| self.can_spare)?;
        let until = Instant::now() + slice;
        session.waits_until = Some(until);
        let is_granted = M::run(session.wait(until)).await;
        session.waits_until = None;
        M::run(sleep_until(Instant::now() + TRIP / 2)).await;
        turns.note_wait();
        drop(on_its_way);
        is_granted.then_some(session)
    }
}

impl Session {
    fn take(&self) -> bool {
        let mut server = lock(&self.world.server);
        server.holder = server.holder.or(Some(self.id));
        self.has_it(&server)
    }

    fn has_it(&self, server: &Server) -> bool {
        server.holder == Some(self.id)
    }

    async fn wait(&self, until: Instant) -> bool {
        let mut timer = std::pin::pin!(sleep_until(until));
        std::future::poll_fn(|context| {
            let mut server = lock(&self.world.server);
            if self.take_in(&mut server) {
                return Poll::Ready(true);
            }
            server.waiting.retain(|(id, _)| *id != self.id);
            let is_over = timer.as_mut().poll(context).is_ready();
            if !is_over {
                server.waiting.push((self.id, context.waker().clone()));
            }
            if is_over {
                Poll::Ready(false)
            } else {
                Poll::Pending
            }
        })
        .await
    }

    fn take_in(&self, server: &mut Server) -> bool {
        server.holder = server.holder.or(Some(self.id));
        self.has_it(server)
    }

    fn free(&self) {
        let mut server = lock(&self.world.server);
        assert_eq!(server.holder.take(), Some(self.id), "it has the lock");
        if !server.waiting.is_empty() {
            let (id, waker) = server.waiting.remove(0);
            server.holder = Some(id);
            self.world.watch.settle();
            drop(server);
            waker.wake();
        }
    }

    /// Releases the lock in another process, so that no waiter of this one is woken.
    fn release_elsewhere(self) {
        self.free();
    }

    fn release(self) {
        pause(TRIP / 2);
        self.free();
        pause(TRIP / 2);
        self.world.watch.owe();
        wake_oldest(&LOCK);
    }
}

/// A dropped future leaves the release to a task, which first reads the reply.
impl Drop for Session {
    fn drop(&mut self) {
        let waits_until = self.waits_until.take();
        let has_it = self.has_it(&lock(&self.world.server));
        if std::thread::panicking() || !has_it && waits_until.is_none() {
            return;
        }
        let session = Self {
            world: self.world.clone(),
            id: self.id,
            waits_until: None,
        };
        spawn(move || {
            if has_it || waits_until.is_some_and(|until| block_on(session.wait(until))) {
                session.release();
            }
        });
    }
}

/// A newly refused waiter must be the oldest, or a place was left behind.
fn assert_no_place_is_left() {
    let mut turns = Turns::new(None);
    turns.note_refusal(LOCK, DATABASE, Instant::now());
    assert!(turns.slice().is_some(), "a place is left in the queue");
}

/// How a waiter gives up.
#[derive(Debug, Clone, Copy)]
pub(crate) enum End {
    Never,
    Deadline(Duration),
    /// The future is dropped after this many polls.
    DroppedAfter(u32),
    /// The future is dropped at a time.
    DroppedAt(Duration),
}

impl End {
    /// Waits until the operation succeeds, or until this end.
    pub(crate) fn wait<T, A: Future<Output = Option<T>>, B: Future<Output = Option<T>>>(
        self,
        is_async: bool,
        wait_async: impl FnOnce(Option<Instant>) -> A,
        wait_blocking: impl FnOnce(Option<Instant>) -> B,
    ) -> Option<T> {
        let now = Instant::now();
        let wait = |deadline, polls, end| match is_async {
            true => run_until(wait_async(deadline), polls, end).flatten(),
            false => block_on(wait_blocking(deadline)),
        };
        match self {
            Self::Never => wait(None, u32::MAX, None),
            Self::Deadline(timeout) => wait(Some(now + timeout), u32::MAX, None),
            Self::DroppedAfter(polls) => wait(None, polls, None),
            Self::DroppedAt(time) => wait(None, u32::MAX, Some(now + time)),
        }
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
        if let Some(session) = acquired {
            pause(hold);
            session.release();
        } else {
            assert!(!matches!(end, End::Never), "it waits until it has the lock");
        }
    });
}

fn hold_elsewhere(world: &World, hold: Duration) {
    let session = world.session();
    assert!(session.take());
    spawn(move || {
        pause(hold);
        session.release_elsewhere();
    });
}

fn finish() {
    crate::clock::join();
    assert_no_place_is_left();
}

pub(crate) fn any_end(longest: u32) -> (bool, End) {
    let mut any = thread_rng();
    match any.gen_range(0..4) {
        0 => (any.r#gen(), End::Never),
        1 => (
            any.r#gen(),
            End::Deadline(MS / 2 * any.gen_range(0..2 * longest)),
        ),
        2 => (true, End::DroppedAt(MS / 2 * any.gen_range(0..2 * longest))),
        _ => (true, End::DroppedAfter(any.gen_range(1..12))),
    }
}

/// Three or four waiters of either half that wait for ever, give up or are dropped. At first, another
/// process holds the lock.
fn crowd(can_spare: bool) {
    let world = World::new(can_spare);
    hold_elsewhere(&world, MS * thread_rng().gen_range(0..20));
    for _ in 0..thread_rng().gen_range(3..5) {
        let mut any = thread_rng();
        let (is_async, end) = any_end(30);
        let (begin, hold) = (any.gen_range(0..6), any.gen_range(0..3));
        start(&world, is_async, MS / 2 * begin, end, MS * hold);
    }
    finish();
}

#[test]
fn locks_of_a_crowd_on_the_server() {
    explore(|| crowd(true));
}

#[test]
fn locks_of_a_crowd_that_polls() {
    explore(|| crowd(false));
}

/// The second waiter tries, too, after a second. The oldest gives up when the second is refused, or
/// shortly before or after that.
fn give_up(can_spare: bool) {
    let world = World::new(can_spare);
    hold_elsewhere(&world, MS * 1400);
    let (refused, any) = (MS * 1001 + 2 * TRIP, thread_rng().gen_range(0..3));
    let time = refused + MS / 2 * any - MS / 2;
    let (is_async, end) = match thread_rng().gen_range(0..3) {
        0 => (
            thread_rng().r#gen(),
            End::Deadline(time + TRIP.mul_f64(2.5)),
        ),
        _ => (true, End::DroppedAt(time)),
    };
    start(&world, is_async, Duration::ZERO, end, MS);
    for begin in [MS, 3 * MS / 2] {
        start(&world, thread_rng().r#gen(), begin, End::Never, MS);
    }
    finish();
}

#[test]
fn locks_as_the_oldest_gives_up_on_the_server() {
    explore(|| give_up(true));
}

#[test]
fn locks_as_the_oldest_gives_up_where_all_poll() {
    explore(|| give_up(false));
}

/// While the oldest waits, the others sleep: the n-th tries after n - 1 seconds.
#[test]
fn locks_of_a_crowd_that_sends_little_more_than_its_oldest() {
    explore(|| {
        let world = World::new(true);
        hold_elsewhere(&world, MS * 3400);
        for _ in 0..8 {
            start(
                &world,
                thread_rng().r#gen(),
                Duration::ZERO,
                End::Never,
                Duration::ZERO,
            );
        }
        pause(MS * 3300);
        // The holder, and the first tries; those of the second, third and fourth; slices.
        let most = 1 + 8 + (3 + 1 + 1) + 17;
        let sent = lock(&world.server).last;
        assert!(sent <= most, "{sent} tries");
        finish();
    });
}

/// The oldest was refused, and does nothing more: its pool is empty, or nobody polls it.
#[test]
fn locks_behind_one_who_does_nothing() {
    explore(|| {
        let world = World {
            watch: Watch::new(1010 * MS, Duration::from_secs(1)),
            ..World::new(true)
        };
        hold_elsewhere(&world, MS * thread_rng().gen_range(2..30));
        let mut turns = Turns::new(None);
        turns.note_refusal(LOCK, DATABASE, Instant::now());
        let waiting = world.watch.wait();
        for _ in 0..3 {
            let (is_async, end) = (thread_rng().r#gen(), End::Never);
            start(&world, is_async, Duration::ZERO, end, MS);
        }
        pause(Duration::from_secs(4));
        assert_eq!(lock(&world.server).holder, None, "the others have had it");
        drop((turns, waiting));
        finish();
    });
}
