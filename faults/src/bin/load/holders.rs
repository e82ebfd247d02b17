//! The tasks that want locks.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use diesel_interlock::asynchronous::{AdvisoryLock, Pool};
use diesel_interlock::{Error, LockKey};

use crate::options::Options;

/// Longer waits are counted as this long.
const LONGEST: usize = 120_000;

/// The locks, and what the tasks saw. Its size does not depend on how long they work.
pub(crate) struct Holders {
    locks: Vec<(AdvisoryLock, AtomicU32)>,
    hold: Duration,
    /// How many waits took so many milliseconds.
    waits: Vec<AtomicU64>,
    errors: AtomicU64,
    /// How often a holder was not alone.
    doubles: AtomicU64,
}

impl Holders {
    pub(crate) fn of(options: Options) -> Self {
        let lock = |number: usize| {
            let key = LockKey::parts(["load", &number.to_string()]);
            (AdvisoryLock::new(key), AtomicU32::new(0))
        };
        Self {
            locks: (0..options.locks).map(lock).collect(),
            hold: options.hold,
            waits: (0..=LONGEST).map(|_| AtomicU64::new(0)).collect(),
            errors: AtomicU64::new(0),
            doubles: AtomicU64::new(0),
        }
    }

    /// Takes a lock again and again until the time is over, and the last time after it. Returns how often it took it in time.
    pub(crate) async fn work<P: Pool>(&self, task: usize, pool: &P, is_over: &AtomicBool) -> u64 {
        let (lock, inside) = &self.locks[task % self.locks.len()];
        let mut times = 0;
        while !is_over.load(Ordering::Relaxed) {
            if let Err(error) = self.hold_once(lock, inside, pool).await
                && self.errors.fetch_add(1, Ordering::Relaxed) == 0
            {
                eprintln!("{error}");
            }
            times += u64::from(!is_over.load(Ordering::Relaxed));
        }
        times
    }

    async fn hold_once<P: Pool>(
        &self,
        lock: &AdvisoryLock,
        inside: &AtomicU32,
        pool: &P,
    ) -> Result<(), Error> {
        let began = Instant::now();
        let guard = lock.acquire(pool).await?;
        let waited = began.elapsed().as_millis() as usize;
        self.waits[waited.min(LONGEST)].fetch_add(1, Ordering::Relaxed);
        if inside.fetch_add(1, Ordering::SeqCst) != 0 {
            self.doubles.fetch_add(1, Ordering::Relaxed);
        }
        if !self.hold.is_zero() {
            tokio::time::sleep(self.hold.mul_f64(2.0 * fastrand::f64())).await;
        }
        inside.fetch_sub(1, Ordering::SeqCst);
        guard.release().await
    }

    /// How many locks were taken.
    pub(crate) fn times(&self) -> u64 {
        let counts = self.waits.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// The wait that this share of the waits does not exceed, to the millisecond.
    pub(crate) fn wait(&self, share: f64) -> Duration {
        let rank = (share * self.times() as f64).ceil() as u64;
        let mut seen = 0;
        let at = self.waits.iter().position(|count| {
            seen += count.load(Ordering::Relaxed);
            seen >= rank.max(1)
        });
        Duration::from_millis(at.unwrap_or(0) as u64)
    }

    pub(crate) fn errors(&self) -> u64 {
        self.errors.load(Ordering::Relaxed)
    }

    pub(crate) fn doubles(&self) -> u64 {
        self.doubles.load(Ordering::Relaxed)
    }
}
