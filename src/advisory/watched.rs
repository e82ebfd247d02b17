//! What a [`Watch`](crate::Watch) and its queries share, blocking or asynchronous.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use diesel::data_types::PgTimestamp;
use diesel::result::QueryResult;
#[cfg(feature = "async")]
use tokio::sync::Notify;

use super::operations::HeldLock;
use super::sql;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::key::LockKey;
use crate::panics::lock;
use crate::session::Session;

/// The shortest time between two queries.
const SHORTEST: Duration = Duration::from_millis(10);

/// The pause after a query that failed.
const RETRY: Duration = Duration::from_millis(100);

/// How long a query may wait for a connection. Without waiting it would never get one from a busy pool, whose users hand each
/// connection to the next one who waits.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// A lock that is watched: which session holds it, and what the last query found.
#[derive(Debug)]
pub(super) struct Watched {
    key: LockKey,
    row: sql::LockRow,
    pid: i32,
    /// The server may reuse the pid. `None` if the role may not see it.
    session_start: Option<PgTimestamp>,
    every: Duration,
    status: Mutex<Status>,
    /// Told of each change of the state.
    #[cfg(feature = "async")]
    changed: Notify,
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

impl Watched {
    /// Queries whether the session holds the lock now. If not, it is lost from the beginning.
    pub(super) async fn begin<S: Session>(
        session: &mut S,
        held: &HeldLock,
        every: Duration,
    ) -> Result<Arc<Self>> {
        let row = held.lock.into();
        let confirmed = Moment::now();
        let reply: QueryResult<(i32, Option<PgTimestamp>, bool)> =
            session.one(sql::WatchFrom { row }).await;
        let (replied_by, session_start, is_held) = match reply {
            // The session has ended, and its locks with it.
            Err(error) if session.has_ended(&error).await => (0, None, false),
            reply => reply?,
        };
        let watched = Self {
            key: held.key.clone(),
            row,
            pid: held.pid,
            session_start,
            every: every.max(SHORTEST),
            status: Mutex::new(Status {
                state: State::Held,
                confirmed,
            }),
            #[cfg(feature = "async")]
            changed: Notify::new(),
        };
        if !is_held || replied_by != held.pid {
            watched.lose();
        }
        Ok(Arc::new(watched))
    }

    /// Queries, on any session, whether the lock is still held. A query that fails changes nothing.
    pub(super) async fn query<S: Session>(&self, session: &mut S) {
        let sent_at = Moment::now();
        let query = sql::HeldBy {
            row: self.row,
            pid: self.pid,
            session_start: self.session_start,
        };
        let reply: QueryResult<bool> = session.one(query).await;
        match reply {
            Ok(true) => lock(&self.status).confirmed = sent_at,
            Ok(false) => self.lose(),
            Err(_) => {}
        }
    }

    /// How long to pause before the next query. After one that did not confirm the lock in time, or for which the pool had no
    /// connection, the pause is shorter: the pool may just have replaced idle connections that were closed, and would find the new
    /// ones closed after a longer pause.
    pub(super) fn pause(&self) -> Duration {
        if self.last_confirmed() < self.every {
            self.every
        } else {
            self.every.min(RETRY)
        }
    }

    /// Returns whether the lock is lost or released, after which no query follows.
    pub(super) fn is_over(&self) -> bool {
        self.read(|status| status.state != State::Held)
    }

    pub(super) fn is_lost(&self) -> bool {
        self.read(|status| status.state == State::Lost)
    }

    pub(super) fn last_confirmed(&self) -> Duration {
        self.read(|status| status.confirmed.elapsed())
    }

    pub(super) fn is_held_within(&self, time: Duration) -> bool {
        self.read(|status| status.state == State::Held && status.confirmed.elapsed() <= time)
    }

    /// The guard is about to release the lock, or nobody reads the watch any more.
    pub(super) fn end(&self) {
        self.change(State::Held, State::Released);
    }

    fn read<T>(&self, read: impl FnOnce(&Status) -> T) -> T {
        read(&lock(&self.status))
    }

    /// Changes the state. Returns whether it was `from`.
    fn change(&self, from: State, to: State) -> bool {
        let mut status = lock(&self.status);
        let changes = status.state == from;
        if changes {
            status.state = to;
            #[cfg(feature = "async")]
            self.changed.notify_waiters();
        }
        changes
    }

    fn lose(&self) {
        if self.change(State::Held, State::Lost) {
            events::record(&Event::new(
                "watch",
                Subject::Lock(self.key.shown()),
                Outcome::Lost,
            ));
        }
    }

    /// Waits until the state is as expected.
    #[cfg(feature = "async")]
    pub(super) async fn until(&self, is_expected: impl Fn(&Self) -> bool) {
        let mut changed = std::pin::pin!(self.changed.notified());
        loop {
            // A change between the look and the wait is not missed.
            changed.as_mut().enable();
            if is_expected(self) {
                return;
            }
            changed.as_mut().await;
            changed.set(self.changed.notified());
        }
    }
}

/// The watches over the lock of a guard.
#[derive(Debug, Default)]
pub(super) struct Watches(Vec<Weak<Watched>>);

impl Watches {
    pub(super) fn add(&mut self, watched: &Arc<Watched>) {
        self.0.retain(|other| other.strong_count() > 0);
        self.0.push(Arc::downgrade(watched));
    }

    /// Tells them that the lock is about to be released: from now on a query may find it not held. Then stops each of them.
    pub(super) fn releasing(&self, stop: impl Fn(&Arc<Watched>)) {
        for watched in self.0.iter().filter_map(Weak::upgrade) {
            watched.end();
            stop(&watched);
        }
    }

    /// Tells them the result of the release.
    pub(super) fn released(&self, released: &Result<()>) {
        if matches!(released, Err(Error::LockLost { .. })) {
            for watched in self.0.iter().filter_map(Weak::upgrade) {
                watched.change(State::Released, State::Lost);
            }
        }
    }
}
