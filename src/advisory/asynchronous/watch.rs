//! Watching a session lock over another connection.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::runtime::Handle as Runtime;
use tokio::time::sleep;

use crate::advisory::operations::HeldLock;
use crate::advisory::watched::{PATIENCE, Watched};
use crate::error::Result;
use crate::panics::{caught, caught_while_awaited};
use crate::pool::asynchronous::{self as pool, CheckedOut, Pool, PoolConnection};
use crate::session::{Asynchronous, Session};

/// A watch tells, without a round trip, whether a session lock was lost. A task queries the server at an interval, over a
/// connection from the pool, which it holds only during the query.
///
/// [`AdvisoryLockGuard::watch`](crate::asynchronous::AdvisoryLockGuard::watch) creates it. Clone it into the tasks that do the
/// work. Each call of `watch` has a task and a query of its own, so call it once for each guard, and share the clones.
///
/// The task ends when the guard releases the lock, when the lock is lost, or when all clones are dropped. While a query hangs, the
/// lock is not confirmed. A query waits at most a second for a connection that is in use, and is then repeated. So a watch over a
/// pool that is exhausted for longer confirms nothing.
///
/// A lock that its guard releases is not lost, as with the [`Watch`](crate::Watch) of the blocking half, which has the same methods
/// except [`lost`](Self::lost).
#[derive(Debug, Clone)]
#[must_use = "a watch ends when it is dropped"]
pub struct Watch {
    handle: Arc<Handle>,
}

/// Ends the queries when the last clone of a [`Watch`] is dropped.
#[derive(Debug)]
struct Handle(Arc<Watched>);

impl Watch {
    pub(super) async fn begin<S: Session, P: Pool>(
        session: &mut S,
        runtime: &Runtime,
        pool: &P,
        held: &HeldLock,
        every: Duration,
    ) -> Result<Self> {
        let watched = Watched::begin(session, held, every).await?;
        let handle = Arc::new(Handle(Arc::clone(&watched)));
        if !watched.is_over() {
            runtime.spawn(watch(watched, pool.clone()));
        }
        Ok(Self { handle })
    }

    pub(super) fn watched(&self) -> &Arc<Watched> {
        &self.handle.0
    }

    /// Waits until the lock is lost, that is, until a query finds it not held although the guard did not release it. After a
    /// release it does not return.
    pub async fn lost(&self) {
        self.watched().until(Watched::is_lost).await;
    }

    /// Returns whether the lock was lost: a query found it not held, although the guard did not release it. No round trip.
    pub fn is_lost(&self) -> bool {
        self.watched().is_lost()
    }

    /// Returns how long ago a query last found the lock held. The time grows while no query succeeds: the pool is exhausted,
    /// the network is cut, or nobody drives the runtime. No round trip.
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
        self.0.end();
    }
}

/// Returns what a future returns. `None` if the watch is over before.
async fn unless_over<T>(watched: &Watched, future: impl Future<Output = T>) -> Option<T> {
    let mut is_over = pin!(watched.until(Watched::is_over));
    let mut future = pin!(future);
    poll_fn(|context| match is_over.as_mut().poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => future.as_mut().poll(context).map(Some),
    })
    .await
}

/// Waits in the queue of the pool for a limited time, but as long as it takes to open a connection.
async fn check_out<P: Pool>(pool: &P) -> Option<CheckedOut<P::Connection>> {
    match pool::try_check_out(pool).await {
        Some(conn) => Some(conn),
        None => pool::check_out(pool, Some(PATIENCE)).await.ok(),
    }
}

/// Queries at the interval until the watch is over. Without a connection it tries again soon. The first query of the watch was that
/// of the guard.
async fn watch<P: Pool>(watched: Arc<Watched>, pool: P) {
    loop {
        if unless_over(&watched, sleep(watched.pause()))
            .await
            .is_none()
        {
            return;
        }
        // A panic of the caller's pool or instrumentation ends no watch.
        let check_out = caught_while_awaited(check_out(&pool));
        let Some(checked_out) = unless_over(&watched, check_out).await else {
            return;
        };
        if let Some(mut conn) = checked_out.flatten() {
            let session = &mut Asynchronous::pooled(&mut conn);
            let queried = caught_while_awaited(watched.query(session)).await;
            caught(|| match queried {
                Some(()) => drop(conn),
                None => conn.into_inner().discard(),
            });
        }
    }
}
