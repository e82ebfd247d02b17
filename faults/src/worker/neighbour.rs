//! Another server, which hangs at times. Operations there must not delay operations on the first server.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, Error, LockKey, PgPool, Watch};

use super::RESTING;

/// Watches a lock on that server repeatedly. No result is expected.
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

/// Whether a watch on the first server is late, although its pool gives working connections all the time.
#[derive(Debug)]
pub(super) struct Lateness {
    /// The time since which the pool has given working connections without an interruption.
    answering_since: Option<Instant>,
    asked: Instant,
}

/// A confirmation that is older than this is examined.
pub(super) const LATE: Duration = Duration::from_millis(200);

/// How long the pool must have worked before a late confirmation is a violation. A query that hangs on the other server
/// takes two seconds.
const TOO_LATE: Duration = Duration::from_secs(1);

const BETWEEN_QUESTIONS: Duration = Duration::from_millis(50);

/// A query, or a pause between two, that takes longer shows that the server or this process was stopped.
const STOPPED: Duration = Duration::from_millis(250);

impl Lateness {
    pub(super) fn new() -> Self {
        Self {
            answering_since: None,
            asked: Instant::now(),
        }
    }

    /// Checks whether the watch is too late.
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
