//! Watching a session lock over another connection.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use diesel::data_types::PgTimestamp;

use super::operations::HeldLock;
use super::rules;
use super::sql;
use crate::background::{Background, Chore};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::key::LockKey;
use crate::panics::lock;
use crate::pool::{PgPool, PooledPgConnection};
use crate::session::{Blocking, Session, now};

/// The shortest time between two queries.
const SHORTEST: Duration = Duration::from_millis(10);

/// Returns, without a round trip, whether a session lock was lost. A background thread of this crate queries the server at
/// an interval, over a connection from the pool, which it holds only during the query.
///
/// [`AdvisoryLockGuard::watch`](crate::AdvisoryLockGuard::watch) creates it. Clone it into the threads that do the work. The
/// queries end when the guard releases the lock, when the lock is lost, or when all clones are dropped. From then on the
/// watch keeps neither the thread nor the pool alive.
///
/// # Release
///
/// A lock that its guard releases is not lost. [`is_lost`](Self::is_lost) stays false, and
/// [`is_held_within`](Self::is_held_within) is false from the beginning of the release on. Only if the release itself reports
/// [`Error::LockLost`](crate::Error::LockLost) does `is_lost` become true.
///
/// # Servers that hang
///
/// Each pool whose locks are watched has its own thread, so a server that hangs delays no watch over another pool. The
/// watches over one pool share its thread. While one of their queries hangs, none of them is confirmed. The connection
/// string's `tcp_user_timeout` and `keepalives_*` settings limit how long a query can hang.
///
/// # Scope
///
/// A watch limits how long the work continues after its session has ended, by a kill, a cut network or a failover. It cannot
/// protect a write between two queries. For that use a [`Fence`](crate::Fence), or write in a transaction on the guard's own
/// connection.
#[derive(Debug, Clone)]
pub struct Watch {
    handle: Arc<Handle>,
}

/// Ends the queries when the last clone of a [`Watch`] is dropped.
#[derive(Debug)]
struct Handle(Arc<Watched>);

/// The watches over the lock of a guard.
#[derive(Debug, Default)]
pub(super) struct Watches(Vec<Weak<Handle>>);

/// What the watch and the thread share.
#[derive(Debug)]
struct Watched {
    key: LockKey,
    row: sql::LockRow,
    pid: i32,
    /// The server may reuse the pid. `None` if the role may not see it.
    session_start: Option<PgTimestamp>,
    every: Duration,
    status: Mutex<Status>,
}

#[derive(Debug)]
struct Status {
    state: State,
    /// When the latest query was sent that found the lock held.
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
        session: &mut Blocking<'_>,
        pool: &PgPool,
        held: &HeldLock,
        every: Duration,
    ) -> Result<Self> {
        let row = held.lock.into();
        let confirmed = Moment::now();
        let (replied_by, session_start, is_held): (i32, Option<PgTimestamp>, bool) =
            match now(session.one(sql::WatchFrom { row })) {
                // The session has ended, and its locks with it.
                Err(error) if rules::is_closed(&error) => (0, None, false),
                reply => reply?,
            };
        let watched = Arc::new(Watched {
            key: held.key.clone(),
            row,
            pid: held.pid,
            session_start,
            every: every.max(SHORTEST),
            status: Mutex::new(Status {
                state: State::Held,
                confirmed,
            }),
        });
        if is_held && replied_by == held.pid {
            WATCHERS.start(pool, None, Arc::clone(&watched));
        } else {
            watched.lose();
        }
        Ok(Self {
            handle: Arc::new(Handle(watched)),
        })
    }

    /// Returns whether the lock was lost: a query found it not held, although the guard did not release it. No round trip.
    pub fn is_lost(&self) -> bool {
        self.read(|status| status.state == State::Lost)
    }

    /// Returns how long ago a query last found the lock held. The time grows while no query succeeds: the pool is exhausted,
    /// or the network is cut. No round trip.
    ///
    /// This machine's monotonic clock and wall clock measure the time, and the larger result counts, because the monotonic
    /// clock stops while the machine is suspended.
    pub fn last_confirmed(&self) -> Duration {
        self.read(|status| status.confirmed.elapsed())
    }

    /// Returns whether a query found the lock held within that time, and the lock was neither lost nor released since. No
    /// round trip.
    pub fn is_held_within(&self, time: Duration) -> bool {
        self.read(|status| status.state == State::Held && status.confirmed.elapsed() <= time)
    }

    fn read<T>(&self, read: impl FnOnce(&Status) -> T) -> T {
        read(&lock(&self.handle.0.status))
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

    /// Tells them that the lock is about to be released: from now on a query may find it not held.
    pub(super) fn releasing(&self) {
        for handle in self.0.iter().filter_map(Weak::upgrade) {
            handle.0.change(State::Held, State::Released);
            WATCHERS.stop(&handle.0);
        }
    }

    /// Tells them the result of the release.
    pub(super) fn released(&self, released: &Result<()>) {
        if matches!(released, Err(Error::LockLost { .. })) {
            for handle in self.0.iter().filter_map(Weak::upgrade) {
                handle.0.change(State::Released, State::Lost);
            }
        }
    }
}

impl Watched {
    /// Changes the state. Returns whether it was `from`.
    fn change(&self, from: State, to: State) -> bool {
        let mut status = lock(&self.status);
        let changes = status.state == from;
        if changes {
            status.state = to;
        }
        changes
    }

    fn lose(&self) {
        if self.change(State::Held, State::Lost) {
            events::record(&Event::new(
                "watch",
                Subject::Lock(&self.key),
                Outcome::Lost,
            ));
        }
    }
}

impl Chore for Watched {
    /// Uses an idle connection, or none.
    const PATIENCE: Duration = Duration::ZERO;

    fn pause(&self) -> Duration {
        self.every
    }

    fn is_over(&self) -> bool {
        lock(&self.status).state != State::Held
    }

    fn attend(&self, mut conn: PooledPgConnection) -> bool {
        let sent_at = Moment::now();
        let query = sql::HeldBy {
            row: self.row,
            pid: self.pid,
            session_start: self.session_start,
        };
        match now(Blocking::pooled(&mut conn).one(query)) {
            Ok(true) => lock(&self.status).confirmed = sent_at,
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
        // The thread that queries has its own clock here, so it must have no connection.
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
