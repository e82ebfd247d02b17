//! Many tasks over few connections, whose futures are dropped at random.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use diesel_async::SimpleAsyncConnection;
use diesel_interlock::asynchronous::{AdvisoryLock, Pool};
use diesel_interlock::{Attempt, Error, LockKey};
use workbench::Database;

use crate::dropping::{KEY, NOBODY, Observer, assert_full_strength, poll_times};
use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::bigint(KEY));

const TASKS: u64 = 32;
const SIZE: u32 = 8;

/// How many holders of the lock are at work.
#[derive(Debug, Default)]
struct Inside {
    now: AtomicI32,
    entered: AtomicU64,
}

struct Entered<'a>(&'a Inside);

impl Inside {
    fn enter(&self) -> Entered<'_> {
        assert_eq!(self.now.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
        self.entered.fetch_add(1, Ordering::Relaxed);
        Entered(self)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn micros(&mut self, limit: u64) -> Duration {
        Duration::from_micros(self.below(limit))
    }
}

/// Takes the lock and drops futures at random until the end. The pauses are part of this workload: nothing waits for anything in
/// them.
async fn work<P: Pool>(pool: P, inside: &'static Inside, mut random: Random, end: Instant) {
    while Instant::now() < end {
        let polls = random.below(12) as usize;
        let wait = Duration::from_millis(300);
        let attempt = match random.below(8) {
            0 | 1 => poll_times(LOCK.try_acquire(&pool), polls).await,
            2 => poll_times(LOCK.acquire_timeout(&pool, wait), polls).await,
            3 => {
                let limit = random.micros(3000);
                let timed = tokio::time::timeout(limit, LOCK.acquire_timeout(&pool, wait));
                timed.await.ok()
            }
            4 => {
                let lock = LOCK.acquire_timeout(&pool, wait);
                tokio::select! {
                    attempt = lock => Some(attempt),
                    () = tokio::time::sleep(random.micros(2000)) => None,
                }
            }
            5 => {
                let pool = pool.clone();
                let task = tokio::spawn(async move {
                    if let Ok(Attempt::Acquired(_guard)) = LOCK.acquire_timeout(&pool, wait).await {
                        let _entered = inside.enter();
                        tokio::time::sleep(Duration::from_micros(200)).await;
                    }
                });
                tokio::time::sleep(random.micros(3000)).await;
                task.abort();
                assert!(!task.await.is_err_and(|error| error.is_panic()));
                None
            }
            6 => {
                let mut conn = pool.check_out().await.unwrap();
                conn.batch_execute("SELECT 1").await.unwrap();
                None
            }
            _ => Some(LOCK.try_acquire(&pool).await),
        };
        let mut guard = match attempt {
            Some(Ok(Attempt::Acquired(guard))) => guard,
            // The time was over before the pool had a connection.
            Some(Err(Error::Pool(_)) | Ok(Attempt::Busy)) | None => {
                tokio::task::yield_now().await;
                continue;
            }
            Some(Err(error)) => panic!("{error}"),
        };
        let entered = inside.enter();
        match random.below(6) {
            0 => {
                drop(entered);
                drop(guard);
            }
            1 => {
                drop(entered);
                let _ = poll_times(guard.release(), random.below(4) as usize).await;
            }
            2 => {
                let sleep = guard.conn().batch_execute("SELECT pg_sleep(0.03)");
                let _ = tokio::time::timeout(Duration::from_millis(2), sleep).await;
                drop(entered);
                drop(guard);
            }
            _ => {
                guard.conn().batch_execute("SELECT 1").await.unwrap();
                tokio::time::sleep(random.micros(300)).await;
                drop(entered);
                guard.release().await.unwrap();
            }
        }
    }
}

async fn chaos<P: Pool>(database: Database, pool: P) {
    let seconds = std::env::var("DIESEL_INTERLOCK_CHAOS_SECONDS");
    let seconds = seconds.map_or(3, |seconds| seconds.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let inside: &'static Inside = Box::leak(Box::default());
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let random = Random(0x9E37_79B9_7F4A_7C15_u64.wrapping_mul(task + 7));
            tokio::spawn(work(pool.clone(), inside, random, end))
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_full_strength(&pool, SIZE as usize).await;
    let observer = &mut Observer::of(&database);
    tokio::task::block_in_place(|| observer.until(NOBODY, Duration::from_secs(30)));
    let entered = inside.entered.load(Ordering::Relaxed);
    println!("held {entered} times");
    assert!(entered > 50, "held {entered} times");
}

#[test]
fn never_two_are_inside_and_nothing_is_left_with_deadpool() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(SIZE);
        chaos(database, pool).await;
    });
}

#[test]
fn never_two_are_inside_and_nothing_is_left_with_bb8() {
    run(async {
        let database = Database::new();
        let pool = database.bb8(SIZE);
        chaos(database, pool).await;
    });
}
