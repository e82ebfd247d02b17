//! Waiters that are futures: nobody polls some of them, and others are polled or dropped inside a
//! waker.

use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use tokio::time::timeout;
use workbench::{Database, RoundTrips, runtime};

use crate::half::{
    AdvisoryLock, AdvisoryLockGuard, PgPool, Pool, Result, make_pool, on_one, pool, wait,
};
use crate::support::{assert_pool_whole, eventually, foreign_holder};

static LOCK: AdvisoryLock = AdvisoryLock::named("waiting futures");

const MINUTE: Duration = Duration::from_secs(60);

type Waiter = Pin<Box<dyn Future<Output = Result<AdvisoryLockGuard>> + Send>>;

/// A waiter, its pool of one, and the proxy between the pool and the server.
type Refused = (Waiter, PgPool, RoundTrips);

/// Creates a waiter, and polls it until its first try was refused and it pauses.
fn refused_waiter(database: &Database, waker: &Waker) -> Refused {
    let proxy = RoundTrips::in_front_of(database);
    let pool = make_pool(&proxy.url(), 1, MINUTE);
    let waiting = pool.clone();
    let mut waiter: Waiter = Box::pin(async move { LOCK.acquire(&waiting).await });
    eventually("the waiter was refused, and pauses", || {
        poll(&mut waiter, waker);
        // More round trips than it takes to open the connection and to try once.
        proxy.round_trips() > 8 && pool.idle() == 1
    });
    (waiter, pool, proxy)
}

#[track_caller]
fn poll(waiter: &mut Waiter, waker: &Waker) {
    let _entered = runtime().enter();
    let polled = waiter.as_mut().poll(&mut Context::from_waker(waker));
    assert!(polled.is_pending(), "the lock is held by another session");
}

#[test]
fn a_waiter_behind_another_that_nobody_polls_gets_the_lock() {
    let database = Database::new();
    let holder = foreign_holder(&database, LOCK.lock_key());
    let (mut oldest, its_pool, _proxy) = refused_waiter(&database, Waker::noop());
    let pool = pool(&database, 2);
    thread::scope(|scope| {
        let second = scope.spawn(|| wait(wait(LOCK.acquire(&pool)).unwrap().release()));
        drop(holder);
        second.join().unwrap().unwrap();
    });
    // A release wakes the oldest waiter, which nobody polls, so the second one must not depend on
    // it.
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| wait(wait(LOCK.acquire(&pool)).unwrap().release()));
        wait(guard.release()).unwrap();
        second.join().unwrap().unwrap();
    });
    wait(wait(&mut oldest).unwrap().release()).unwrap();
    assert_eq!(its_pool.idle(), 1);
    assert_pool_whole(&pool, &database);
}

/// Some tries are dropped while the pool checks a connection for them, and others while they wait
/// for that connection.
#[test]
fn tries_that_are_dropped_in_a_crowd_cost_no_connection() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 2, MINUTE);
    // How long a dropped call waits for its reply. A longer round proves nothing.
    const PATIENCE: Duration = Duration::from_secs(2);
    let (mut round, mut rounds) = (0, 0);
    while round < 12 {
        rounds += 1;
        assert!(rounds < 200, "hardly any round was quick");
        // All calls of the round before have given their connections back.
        proxy.set_delay(Duration::ZERO, Duration::ZERO);
        on_one(&pool, |_| on_one(&pool, |_| ()));
        let connections = proxy.connections();
        proxy.set_delay(Duration::from_millis(10), Duration::ZERO);
        let began = Instant::now();
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let (pool, limit) = (pool.clone(), Duration::from_millis(5 * (round + task)));
                runtime().spawn(async move {
                    let tried = timeout(limit, LOCK.try_acquire(&pool)).await;
                    tried.map_or(Ok(()), |tried| tried.map(drop))
                })
            })
            .collect();
        for task in tasks {
            wait(task).unwrap().unwrap();
        }
        // Not `drain`, which would wait for the drops of all tests of this process.
        eventually("both connections are back", || {
            pool.idle() == 2 || began.elapsed() > PATIENCE
        });
        let opened = proxy.connections() - connections;
        if began.elapsed() < PATIENCE {
            assert_eq!(opened, 0);
            round += 1;
        }
    }
    proxy.set_delay(Duration::ZERO, Duration::ZERO);
    assert_pool_whole(&pool, &database);
}

/// A waker that an application might write: it drops one waiter, polls another, and begins to wait
/// itself.
struct Meddler {
    pool: PgPool,
    dropped: Mutex<Option<Refused>>,
    polled: Mutex<Option<Refused>>,
    begun: Mutex<Vec<Waiter>>,
    woken: AtomicUsize,
}

impl Wake for Meddler {
    fn wake(self: Arc<Self>) {
        let _entered = runtime().enter();
        let woken = self.woken.fetch_add(1, Ordering::SeqCst);
        drop(self.dropped.lock().unwrap().take());
        let mut context = Context::from_waker(Waker::noop());
        if let Ok(mut polled) = self.polled.try_lock() {
            let is_ready = |it: &mut Refused| it.0.as_mut().poll(&mut context).is_ready();
            // If the waiter acquires the lock, its guard is dropped at once.
            if polled.as_mut().is_some_and(is_ready) {
                *polled = None;
            }
        }
        if woken < 3 {
            let pool = self.pool.clone();
            let mut waiter: Waiter = Box::pin(async move { LOCK.acquire(&pool).await });
            if waiter.as_mut().poll(&mut context).is_pending() {
                self.begun.lock().unwrap().push(waiter);
            }
        }
    }
}

#[test]
fn a_waker_may_itself_wait_poll_and_drop_waiters() {
    let (done, is_done) = mpsc::channel();
    // Not a scoped thread: after a deadlock the scope would wait for ever.
    for end in [0, 1, 3] {
        let done = done.clone();
        thread::spawn(move || {
            let database = Database::new();
            let pool = pool(&database, 2);
            meddle(&database, &pool, end);
            wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
            done.send(()).unwrap();
        });
    }
    for _ in 0..3 {
        let done = is_done.recv_timeout(2 * MINUTE);
        done.expect("no code of a caller runs while a mutex is locked");
    }
}

/// Runs the waker of a waiter where another thread releases the lock, or where another waiter gives
/// up.
fn meddle(database: &Database, pool: &PgPool, end: usize) {
    let guard = wait(LOCK.acquire(pool)).unwrap();
    let meddler = Arc::new(Meddler {
        pool: make_pool(&database.url(), 2, MINUTE),
        dropped: Mutex::default(),
        polled: Mutex::default(),
        begun: Mutex::default(),
        woken: AtomicUsize::new(0),
    });
    let waker = Waker::from(Arc::clone(&meddler));
    let mut waiters = [(); 4].map(|()| refused_waiter(database, Waker::noop()));
    // A release wakes the oldest waiter; if the oldest gives up, the second one is woken.
    poll(&mut waiters[usize::from(end == 3)].0, &waker);
    let [oldest, second, third, fourth] = waiters;
    *meddler.dropped.lock().unwrap() = Some(third);
    *meddler.polled.lock().unwrap() = Some(fourth);
    let before = meddler.woken.load(Ordering::SeqCst);
    let _entered = runtime().enter();
    let (mut oldest, mut guard) = (Some(oldest), Some(guard));
    match end {
        0 => drop(thread::scope(|scope| {
            let guard = guard.take().unwrap();
            scope.spawn(|| wait(guard.release()).unwrap()).join()
        })),
        1 => drop(guard.take()),
        _ => drop(oldest.take()),
    }
    eventually("a waiter is woken", || {
        meddler.woken.load(Ordering::SeqCst) > before
    });
    drop((oldest, second, guard));
    drop(meddler.polled.lock().unwrap().take());
    meddler.begun.lock().unwrap().clear();
}
