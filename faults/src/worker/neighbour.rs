//! Another server, which hangs now and then. What is done there must not delay what is done on the first one.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, Error, LockKey, PgPool, Watch};

use super::RESTING;

/// Watches over a lock there, again and again. Nothing is expected of it.
pub(super) fn work(pool: &PgPool) {
    let lock = AdvisoryLock::new(LockKey::pair(79, std::process::id() as i32));
    while !RESTING.load(Ordering::Relaxed) {
        let _ = watch_there(&lock, pool);
        thread::sleep(Duration::from_millis(20));
    }
}

fn watch_there(lock: &AdvisoryLock, pool: &PgPool) -> Result<(), Error> {
    if let Some(mut guard) = lock.try_acquire(pool)?.acquired() {
        let _watch = guard.watch(pool, Duration::from_millis(10))?;
        thread::sleep(Duration::from_millis(300));
        guard.release()?;
    }
    Ok(())
}

/// Whether a watch here is late, though the pool that it asks over gives connections all the time, and they answer.
#[derive(Debug)]
pub(super) struct Lateness {
    /// Since when the pool has answered without an interruption.
    answering_since: Option<Instant>,
    asked: Instant,
}

/// A confirmation that is older than this is looked into.
pub(super) const LATE: Duration = Duration::from_millis(200);

/// How long the pool has to answer before it is the watch's fault. A question that hangs on the other server lasts two
/// seconds.
const TOO_LATE: Duration = Duration::from_secs(1);

const BETWEEN_QUESTIONS: Duration = Duration::from_millis(50);

/// A question, or a pause between two, that lasts longer shows that the server or this process was stopped.
const STOPPED: Duration = Duration::from_millis(250);

impl Lateness {
    pub(super) fn new() -> Self {
        Self {
            answering_since: None,
            asked: Instant::now(),
        }
    }

    /// Looks whether it is too late.
    pub(super) fn is_too_late(&mut self, watch: &Watch, pool: &PgPool) -> bool {
        let before = Instant::now();
        let since_last = before.duration_since(self.asked);
        if watch.is_lost() || watch.last_confirmed() < LATE || since_last > STOPPED {
            self.answering_since = None;
        } else if since_last < BETWEEN_QUESTIONS {
            return false;
        } else if answers(pool) && before.elapsed() < STOPPED {
            let since = *self.answering_since.get_or_insert(before);
            self.asked = Instant::now();
            return since.elapsed() > TOO_LATE;
        } else {
            self.answering_since = None;
        }
        self.asked = Instant::now();
        false
    }
}

fn answers(pool: &PgPool) -> bool {
    let conn = pool.get_timeout(BETWEEN_QUESTIONS);
    conn.is_ok_and(|mut conn| diesel::sql_query("SELECT 1").execute(&mut conn).is_ok())
}
