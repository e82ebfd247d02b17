//! Watching over a session lock from another connection.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use diesel::data_types::PgTimestamp;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::mode::LockMode;
use super::query::{HeldBy, Locator, SessionStart};
use crate::background::Background;
use crate::error::Result;
use crate::events;
use crate::key::LockKey;
use crate::pool::{self, PgPool};

/// The shortest time between two questions.
const SHORTEST: Duration = Duration::from_millis(10);

/// Tells, without a round trip, whether a session lock was lost: a thread of this crate asks the server
/// now and then, over a connection out of the pool, which it has only while it asks.
///
/// Made by [`AdvisoryLockGuard::watch`](crate::AdvisoryLockGuard::watch). Clone it into the threads that do
/// the work; the asking ends when all clones are gone.
///
/// # What it protects from
///
/// From working on for long after the session ended: killed, cut off, failed over. It cannot protect
/// what was written between two questions: that takes a [`Fence`](crate::Fence), or the transaction that
/// writes on the guard's own connection.
#[derive(Debug, Clone)]
pub struct Watch {
    watched: Arc<Watched>,
}

#[derive(Debug)]
struct Watched {
    pool: PgPool,
    key: LockKey,
    locator: Locator,
    mode: LockMode,
    pid: i32,
    /// The server may use the pid again. `None` where it is hidden.
    session_start: Option<PgTimestamp>,
    every: Duration,
    /// When the watch began, which is a confirmation.
    began: Instant,
    /// Milliseconds from then to the latest confirmation.
    confirmed: AtomicU64,
    lost: AtomicBool,
}

static WATCHER: Background<Weak<Watched>> = Background::new("lock watcher", run);

impl Watch {
    pub(super) fn begin(
        conn: &mut PgConnection,
        pool: &PgPool,
        key: &LockKey,
        mode: LockMode,
        pid: i32,
        every: Duration,
    ) -> Result<Self> {
        let locator = key.id()?.into();
        let began = Instant::now();
        let (answered_by, session_start) = SessionStart
            .get_result::<(i32, Option<PgTimestamp>)>(conn)
            .map_err(crate::Error::from)?;
        let watched = Arc::new(Watched {
            pool: pool.clone(),
            key: key.clone(),
            locator,
            mode,
            pid,
            session_start,
            every: every.max(SHORTEST),
            began,
            confirmed: AtomicU64::new(0),
            lost: AtomicBool::new(answered_by != pid),
        });
        WATCHER.send(Arc::downgrade(&watched));
        Ok(Self { watched })
    }

    /// Answers whether the server has said that the lock is not held any more. No round trip.
    pub fn is_lost(&self) -> bool {
        self.watched.lost.load(Ordering::Relaxed)
    }

    /// How long ago the server last said that the lock is held. Grows while it cannot be asked: the pool
    /// is exhausted, or the network is cut. No round trip.
    pub fn last_confirmed(&self) -> Duration {
        let confirmed = Duration::from_millis(self.watched.confirmed.load(Ordering::Relaxed));
        self.watched.began.elapsed().saturating_sub(confirmed)
    }

    /// Answers whether the server said so within that time, and has not said otherwise since. No round
    /// trip.
    pub fn is_held_within(&self, time: Duration) -> bool {
        !self.is_lost() && self.last_confirmed() <= time
    }
}

impl Watched {
    /// Asks once; answers whether there is something left to ask.
    fn ask(&self) -> bool {
        let asked = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        // Unlike a plain try, this makes the pool open one more, up to its size.
        let Ok(mut conn) = pool::check_out(&self.pool, Some(Duration::ZERO)) else {
            return true;
        };
        let question = HeldBy {
            locator: &self.locator,
            mode: self.mode,
            pid: self.pid,
            session_start: self.session_start,
        };
        match question.get_result::<bool>(&mut *conn) {
            Ok(true) => {
                self.confirmed.store(asked, Ordering::Relaxed);
                true
            }
            Ok(false) => {
                self.lost.store(true, Ordering::Relaxed);
                events::lock_lost(&self.key);
                false
            }
            Err(_) => true,
        }
    }
}

fn run(receiver: &Receiver<Weak<Watched>>) {
    let mut watches: Vec<(Instant, Weak<Watched>)> = Vec::new();
    loop {
        let next = watches.iter().map(|(when, _)| *when).min();
        let begun = match next {
            None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(next) => receiver.recv_timeout(next.saturating_duration_since(Instant::now())),
        };
        match begun {
            Ok(watched) => watches.push((Instant::now(), watched)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        watches.retain_mut(|(when, watched)| {
            let Some(watched) = watched.upgrade() else {
                return false;
            };
            if *when > Instant::now() {
                return true;
            }
            // A panic is the caller's instrumentation's.
            let goes_on = catch_unwind(AssertUnwindSafe(|| watched.ask())).unwrap_or(true);
            *when = Instant::now() + watched.every;
            goes_on
        });
    }
}
