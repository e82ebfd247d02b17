//! Watching over a session lock from another connection.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use diesel::data_types::PgTimestamp;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::guard::is_closed;
use super::mode::LockMode;
use super::query::{HeldBy, Locator, WatchedFrom};
use crate::background::{Background, Chore};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::key::LockKey;
use crate::panics::lock;
use crate::pool::{PgPool, PooledPgConnection};
use crate::session::sent as send;

/// The shortest time between two questions.
const SHORTEST: Duration = Duration::from_millis(10);

/// Tells, without a round trip, whether a session lock was lost: a thread of this crate asks the server
/// now and then, over a connection out of the pool, which it has only while it asks.
///
/// Made by [`AdvisoryLockGuard::watch`](crate::AdvisoryLockGuard::watch). Clone it into the threads that do
/// the work. The asking ends when the guard releases the lock, when the lock is lost, or when all clones
/// are gone; the watch then keeps neither the thread nor the pool.
///
/// # Release
///
/// A lock that its guard releases is not lost: [`is_lost`](Self::is_lost) stays false, and
/// [`is_held_within`](Self::is_held_within) is false from the beginning of the release on. Only where
/// the release itself reports [`Error::LockLost`](crate::Error::LockLost) does `is_lost` turn true.
///
/// # Servers that hang
///
/// Each pool that locks are watched over has a thread of its own, so a server that hangs delays no watch
/// over another pool. The watches over one pool share its thread: while one of their questions hangs,
/// none of them is confirmed. How long a question may hang is set by `tcp_user_timeout` and
/// `keepalives_*` in the connection string.
///
/// # What it protects from
///
/// From working on for long after the session ended: killed, cut off, failed over. It cannot protect
/// what was written between two questions: that takes a [`Fence`](crate::Fence), or the transaction that
/// writes on the guard's own connection.
#[derive(Debug, Clone)]
pub struct Watch {
    handle: Arc<Handle>,
}

/// Ends the asking when the last clone of a [`Watch`] is gone.
#[derive(Debug)]
struct Handle(Arc<Watched>);

/// The watches over the lock of a guard.
#[derive(Debug, Default)]
pub(super) struct Watches(Vec<Weak<Handle>>);

/// What the watch and the thread share.
#[derive(Debug)]
struct Watched {
    key: LockKey,
    locator: Locator,
    mode: LockMode,
    pid: i32,
    /// The server may use the pid again. `None` where it is hidden.
    session_start: Option<PgTimestamp>,
    every: Duration,
    heard: Mutex<Heard>,
}

#[derive(Debug)]
struct Heard {
    state: State,
    /// When the latest question was sent that the server has confirmed.
    confirmed: Moment,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// As far as is known.
    Held,
    /// The guard has released it, or is about to.
    Released,
    Lost,
}

static WATCHERS: Background<Watched> = Background::new("lock watcher");

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
        let confirmed = Moment::now();
        let question = |conn: &mut PgConnection| {
            WatchedFrom {
                locator: &locator,
                mode,
            }
            .get_result(conn)
        };
        let (replied_by, session_start, held): (i32, Option<PgTimestamp>, bool) =
            match send(conn, question) {
                // The session has ended, and its locks with it.
                Err(error) if is_closed(&error) => (0, None, false),
                answer => answer?,
            };
        let watched = Arc::new(Watched {
            key: key.clone(),
            locator,
            mode,
            pid,
            session_start,
            every: every.max(SHORTEST),
            heard: Mutex::new(Heard {
                state: State::Held,
                confirmed,
            }),
        });
        if held && replied_by == pid {
            WATCHERS.start(pool, None, Arc::clone(&watched));
        } else {
            watched.lose();
        }
        Ok(Self {
            handle: Arc::new(Handle(watched)),
        })
    }

    /// Returns whether the lock was lost: the server has said that it is not held any more, though the
    /// guard did not release it. No round trip.
    pub fn is_lost(&self) -> bool {
        self.heard(|heard| heard.state == State::Lost)
    }

    /// How long ago the server last said that the lock is held. Grows while it cannot be asked: the pool
    /// is exhausted, or the network is cut. No round trip.
    ///
    /// Time is counted by the monotonic or the wall clock of this machine, whichever says that more has
    /// passed, because the monotonic clock stops while the machine is suspended.
    pub fn last_confirmed(&self) -> Duration {
        self.heard(|heard| heard.confirmed.elapsed())
    }

    /// Returns whether the server said within that time that the lock is held, and it was neither lost
    /// nor released since. No round trip.
    pub fn is_held_within(&self, time: Duration) -> bool {
        self.heard(|heard| heard.state == State::Held && heard.confirmed.elapsed() <= time)
    }

    fn heard<T>(&self, read: impl FnOnce(&Heard) -> T) -> T {
        read(&lock(&self.handle.0.heard))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        WATCHERS.stop(&self.0);
    }
}

impl Watches {
    pub(super) fn add(&mut self, watch: &Watch) {
        self.0.retain(|other| other.strong_count() > 0);
        self.0.push(Arc::downgrade(&watch.handle));
    }

    /// Tells them that the lock is about to be released: from now on the server may say that it is not
    /// held.
    pub(super) fn releasing(&self) {
        for handle in self.0.iter().filter_map(Weak::upgrade) {
            handle.0.turn(State::Held, State::Released);
            WATCHERS.stop(&handle.0);
        }
    }

    /// Tells them what came of the release.
    pub(super) fn released(&self, released: &Result<()>) {
        if matches!(released, Err(Error::LockLost { .. })) {
            for handle in self.0.iter().filter_map(Weak::upgrade) {
                handle.0.turn(State::Released, State::Lost);
            }
        }
    }
}

impl Watched {
    /// Returns whether the state was the one that it is turned from.
    fn turn(&self, from: State, to: State) -> bool {
        let mut heard = lock(&self.heard);
        let turns = heard.state == from;
        if turns {
            heard.state = to;
        }
        turns
    }

    fn lose(&self) {
        if self.turn(State::Held, State::Lost) {
            events::record(&Event::new(
                "watch",
                Subject::Lock(&self.key),
                Outcome::Lost,
            ));
        }
    }
}

impl Chore for Watched {
    /// Takes a connection that is idle, or none.
    const PATIENCE: Duration = Duration::ZERO;

    fn pause(&self) -> Duration {
        self.every
    }

    fn is_over(&self) -> bool {
        lock(&self.heard).state != State::Held
    }

    fn attend(&self, mut conn: PooledPgConnection) -> bool {
        let asked = Moment::now();
        let question = |conn: &mut PgConnection| {
            HeldBy {
                locator: &self.locator,
                mode: self.mode,
                pid: self.pid,
                session_start: self.session_start,
            }
            .get_result::<bool>(conn)
        };
        match send(&mut conn, question) {
            Ok(true) => lock(&self.heard).confirmed = asked,
            Ok(false) => self.lose(),
            Err(_) => {}
        }
        self.is_over()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AdvisoryLock, clock};

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn while_the_machine_is_suspended_nothing_is_confirmed() {
        let database = workbench::Database::new();
        // The thread that asks has a clock of its own here, so it must not.
        let pool = database.pool(1);
        let lock = AdvisoryLock::named("suspended");
        let mut guard = lock.acquire(&pool).unwrap();
        let watch = guard.watch(&pool, MINUTE).unwrap();
        assert!(watch.is_held_within(MINUTE));
        clock::suspend(2 * MINUTE);
        assert!(!watch.is_held_within(MINUTE) && !watch.is_lost());
        assert!(watch.last_confirmed() >= 2 * MINUTE);
        clock::set_back(10 * MINUTE);
        assert!(watch.is_held_within(MINUTE));
        guard.release().unwrap();
    }
}
