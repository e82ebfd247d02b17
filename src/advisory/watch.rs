//! Watching a session lock over another connection.

use std::sync::Arc;
use std::time::Duration;

use super::operations::HeldLock;
use super::watched::{PATIENCE, Watched};
use crate::background::{Background, Chore};
use crate::error::Result;
use crate::pool::{PgPool, PooledPgConnection};
use crate::session::{Blocking, now};

/// A watch tells, without a round trip, whether a session lock was lost. A background thread of this crate queries the server at an
/// interval, over a connection from the pool, which it holds only during the query.
///
/// [`AdvisoryLockGuard::watch`](crate::AdvisoryLockGuard::watch) creates it. Clone it into the threads that do the work. The
/// queries end when the guard releases the lock, when the lock is lost, or when all clones are dropped. A second later, the watch
/// keeps neither the thread nor the pool alive.
///
/// # Busy pools
///
/// A query waits for a connection for a second at most, and is then repeated. So a watch over a pool that is exhausted for longer
/// confirms nothing, for example over a pool of one, whose connection the guard holds.
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
#[must_use = "a watch ends when it is dropped"]
pub struct Watch {
    handle: Arc<Handle>,
}

/// Ends the queries when the last clone of a [`Watch`] is dropped.
#[derive(Debug)]
struct Handle(Arc<Watched>);

static WATCHERS: Background<Watched> = Background::new("lock watcher");

impl Watch {
    pub(super) fn begin(
        session: &mut Blocking<'_>,
        pool: &PgPool,
        held: &HeldLock,
        every: Duration,
    ) -> Result<Self> {
        let watched = now(Watched::begin(session, held, every))?;
        if !watched.is_over() {
            WATCHERS.start(pool, None, Arc::clone(&watched));
        }
        Ok(Self {
            handle: Arc::new(Handle(watched)),
        })
    }

    pub(super) fn watched(&self) -> &Arc<Watched> {
        &self.handle.0
    }

    /// Returns whether the lock was lost: a query found it not held, although the guard did not release it. No round trip.
    pub fn is_lost(&self) -> bool {
        self.watched().is_lost()
    }

    /// Returns how long ago a query last found the lock held. The time grows while no query succeeds: the pool is exhausted,
    /// or the network is cut. No round trip.
    ///
    /// This machine's monotonic clock and wall clock measure the time, and the larger result counts, because the monotonic
    /// clock stops while the machine is suspended.
    pub fn last_confirmed(&self) -> Duration {
        self.watched().last_confirmed()
    }

    /// Returns whether a query found the lock held at most `time` ago, and the lock was neither lost nor released since. No round
    /// trip.
    pub fn is_held_within(&self, time: Duration) -> bool {
        self.watched().is_held_within(time)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        stop(&self.0);
    }
}

/// Ends the queries, and drops their pool.
pub(super) fn stop(watched: &Arc<Watched>) {
    WATCHERS.stop(watched);
}

impl Chore for Watched {
    fn patience(&self) -> Duration {
        PATIENCE
    }

    fn pause(&self) -> Duration {
        self.pause()
    }

    fn is_over(&self) -> bool {
        self.is_over()
    }

    fn attend(&self, mut conn: PooledPgConnection) -> bool {
        now(self.query(&mut Blocking::pooled(&mut conn)));
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
