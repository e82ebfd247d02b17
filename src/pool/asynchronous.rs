//! The pools of asynchronous connections, and the connections that a guard can have.

use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;
use tokio::runtime::Handle;

use crate::error::{Error, Result};
use crate::runtime::{self, DroppedInside};
use crate::session::{Asynchronous, Session};
use crate::transaction::Transaction;

/// A pool of [`AsyncPgConnection`]s: deadpool's with the feature `deadpool`, and bb8's with the feature `bb8`.
///
/// Implement it for any other pool.
pub trait Pool: Clone + Send + Sync + 'static {
    /// A connection out of this pool.
    type Connection: PoolConnection + 'static;

    /// Takes a connection. Waits as long as the pool's own settings allow.
    ///
    /// A pool that has none in time returns [`Error::Pool`].
    fn check_out(&self) -> impl Future<Output = Result<Self::Connection>> + Send;

    /// Takes a connection if one is idle, without waiting for another user to give one back. Also called by waits whose time is
    /// over, for their last try.
    fn try_check_out(&self) -> impl Future<Output = Option<Self::Connection>> + Send;

    /// Returns how many connections the pool may have open. A pool that does not expose it returns how many it has open now, as
    /// bb8 does. Waits for session locks occupy at most half of that, and at least one connection.
    fn size(&self) -> u32;

    /// Returns whether users of the pool wait for a connection. Waits for session locks then occupy at most an eighth of the
    /// pool. Defaults to `false`.
    fn is_contended(&self) -> bool {
        false
    }

    /// Returns whether the pool was closed, so that it will never have a connection again. A wait ends then with the error of
    /// the check-out. Defaults to `false`.
    fn is_closed(&self) -> bool {
        false
    }
}

/// A connection that a guard can have: one out of a [`Pool`].
pub trait PoolConnection: DerefMut<Target = AsyncPgConnection> + Send {
    /// Ends the session. The connection does not go back to its pool.
    fn discard(self);

    /// Returns when the connection was opened, by which this crate remembers whether its session is its own. `None` if the pool
    /// does not expose it. In that case [`probe_sessions`](crate::asynchronous::probe_sessions) is the only check for a pooler in
    /// transaction mode.
    fn opened_at(&self) -> Option<Instant> {
        None
    }
}

/// A connection out of a pool. Dropping it gives it back, or ends its session if it is marked as broken, on every way out.
/// deadpool would keep such a session, and the locks of a transaction that is open there, until it is checked out again.
pub(crate) struct CheckedOut<C: PoolConnection> {
    conn: Option<C>,
    /// Entered by the drop, which may run outside of it, because the pool may spawn a task that opens another connection.
    runtime: Option<Handle>,
}

impl<C: PoolConnection> CheckedOut<C> {
    fn new(conn: C) -> Self {
        Self {
            conn: Some(conn),
            runtime: Handle::try_current().ok(),
        }
    }

    pub(crate) fn opened_at(&self) -> Option<Instant> {
        self.conn.as_ref().and_then(C::opened_at)
    }

    /// The connection, for an owner that decides by itself what becomes of it.
    pub(crate) fn into_inner(mut self) -> C {
        match self.conn.take() {
            Some(conn) => conn,
            None => unreachable!("only this function and the drop take it"),
        }
    }
}

impl<C: PoolConnection> Deref for CheckedOut<C> {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        match &self.conn {
            Some(conn) => conn,
            None => unreachable!("only `into_inner` and the drop take it"),
        }
    }
}

impl<C: PoolConnection> DerefMut for CheckedOut<C> {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        match &mut self.conn {
            Some(conn) => conn,
            None => unreachable!("only `into_inner` and the drop take it"),
        }
    }
}

impl<C: PoolConnection> Drop for CheckedOut<C> {
    fn drop(&mut self) {
        if let Some(mut conn) = self.conn.take() {
            runtime::drop_inside(self.runtime.as_ref(), || {
                if Asynchronous::pooled(&mut conn).transaction() == Transaction::Broken {
                    conn.discard();
                } else {
                    drop(conn);
                }
            });
        }
    }
}

/// Takes a connection from the pool. Waits as long as the pool's own settings allow, but no longer than `limit`.
pub(crate) async fn check_out<P: Pool>(
    pool: &P,
    limit: Option<Duration>,
) -> Result<CheckedOut<P::Connection>> {
    let conn = match limit {
        None => checking_out(pool).await,
        // A check of an idle connection is not aborted at once, because that would cost the pool the connection.
        Some(Duration::ZERO) => {
            match tokio::time::timeout(LONGEST_CHECK, trying(pool)).await {
                Ok(Some(conn)) => Ok(conn),
                // Fails at once, with the error of the pool.
                _ if pool.is_closed() => checking_out(pool).await,
                _ => Err(timed_out()),
            }
        }
        Some(limit) => match tokio::time::timeout(limit, checking_out(pool)).await {
            Ok(checked_out) => checked_out,
            Err(_) => Err(timed_out()),
        },
    };
    conn.map(CheckedOut::new)
}

/// How long a caller who does not wait may wait for the check of an idle connection, or for a new one.
const LONGEST_CHECK: Duration = Duration::from_secs(1);

fn timed_out() -> Error {
    Error::Pool("timed out waiting for connection".into())
}

/// Takes a connection from the pool if one is idle.
pub(crate) async fn try_check_out<P: Pool>(pool: &P) -> Option<CheckedOut<P::Connection>> {
    trying(pool).await.map(CheckedOut::new)
}

fn checking_out<P: Pool>(pool: &P) -> impl Future<Output = Result<P::Connection>> + Send {
    DroppedInside::new(pool.check_out())
}

fn trying<P: Pool>(pool: &P) -> impl Future<Output = Option<P::Connection>> + Send {
    DroppedInside::new(pool.try_check_out())
}

#[cfg(feature = "deadpool")]
mod with_deadpool {
    use diesel_async::pooled_connection::deadpool::{Object, Pool as DeadPool};

    use super::*;

    impl Pool for DeadPool<AsyncPgConnection> {
        type Connection = Object<AsyncPgConnection>;

        async fn check_out(&self) -> Result<Self::Connection> {
            self.get().await.map_err(|error| Error::Pool(error.into()))
        }

        async fn try_check_out(&self) -> Option<Self::Connection> {
            let mut timeouts = self.timeouts();
            timeouts.wait = Some(Duration::ZERO);
            self.timeout_get(&timeouts).await.ok()
        }

        fn size(&self) -> u32 {
            u32::try_from(self.status().max_size).unwrap_or(u32::MAX)
        }

        fn is_contended(&self) -> bool {
            self.status().waiting > 0
        }

        fn is_closed(&self) -> bool {
            DeadPool::is_closed(self)
        }
    }

    impl PoolConnection for Object<AsyncPgConnection> {
        fn discard(self) {
            drop(Object::take(self));
        }

        fn opened_at(&self) -> Option<Instant> {
            Some(Object::metrics(self).created)
        }
    }
}

#[cfg(feature = "bb8")]
mod with_bb8 {
    use diesel_async::pooled_connection::bb8::{Pool as Bb8Pool, PooledConnection};
    use diesel_async::{AnsiTransactionManager, TransactionManager};

    use super::*;

    const MOMENT: Duration = Duration::from_millis(50);

    impl Pool for Bb8Pool<AsyncPgConnection> {
        type Connection = PooledConnection<'static, AsyncPgConnection>;

        async fn check_out(&self) -> Result<Self::Connection> {
            (self.get_owned().await).map_err(|error| Error::Pool(error.into()))
        }

        /// bb8 has no such method, and does not tell whether it may open one more connection. So this waits for a moment, in
        /// which a connection is opened, or another user gives one back.
        async fn try_check_out(&self) -> Option<Self::Connection> {
            let checked_out = tokio::time::timeout(MOMENT, self.get_owned()).await;
            checked_out.ok()?.ok()
        }

        fn size(&self) -> u32 {
            self.state().connections
        }

        /// bb8 does not tell how many wait, so it is enough that no connection is idle.
        fn is_contended(&self) -> bool {
            self.state().idle_connections == 0
        }
    }

    impl PoolConnection for PooledConnection<'static, AsyncPgConnection> {
        /// bb8 closes a connection that is marked as broken when it is given back.
        fn discard(mut self) {
            let status = AnsiTransactionManager::transaction_manager_status_mut(&mut *self);
            status.set_in_error();
        }
    }
}
