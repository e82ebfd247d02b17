//! The connection that a lock is pinned to, and what becomes of it when a future or a guard is dropped.
//!
//! A `Drop` cannot await. So a pooled connection is moved to a task that settles what is in doubt, and on a lent connection
//! a message is queued: see `borrowed.rs`.

// Nobody outside this crate can name what the sealed trait uses.
#![allow(private_interfaces)]

use std::pin::pin;
use std::time::{Duration, Instant};

use diesel::result::QueryResult;
use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_postgres::NoTls;

use crate::advisory::doubt::{Doubt, distrusted, record_discard};
use crate::advisory::operations::{self, HeldLock};
use crate::advisory::sql;
use crate::advisory::waiter::LocalHold;
use crate::advisory::watched::Watches;
use crate::panics::caught;
use crate::pool::asynchronous::PoolConnection;
use crate::runtime;
use crate::session::{Asynchronous, Session};
use crate::transaction::Transaction;

/// How long an unlock may remain without a reply before the statement in front of it is cancelled.
///
/// On a slow network it is longer: four times the round trip in which the lock was tried.
const PATIENCE: Duration = Duration::from_millis(20);
const LONGEST_PATIENCE: Duration = Duration::from_secs(1);

/// How often a cancellation is sent. One that arrives before its statement hits nothing. On a busy server a statement begins
/// late, so the pause after each is twice as long as the one before.
const CANCELLATIONS: u32 = 10;

/// A connection that a guard has: one out of a pool, or one that the caller lends.
///
/// Sealed: the only implementations are [`Pooled`] and [`Borrowed`](super::Borrowed).
pub trait GuardConnection: Send + sealed::Sealed {}

pub(super) mod sealed {
    use super::*;

    pub trait Sealed {
        fn conn(&mut self) -> &mut AsyncPgConnection;

        #[cfg(feature = "migrations")]
        fn conn_ref(&self) -> &AsyncPgConnection;

        /// The session of the connection, and the doubt, for an operation.
        fn session(&mut self) -> (Asynchronous<'_>, &mut Option<Doubt>);

        /// Sets whether the session waits for a lock.
        fn set_waiting(&mut self, is_waiting: bool);

        /// Notes that a guard has the lock, and has not lent the connection yet. Releasing the lock and giving the connection back
        /// wakes a waiter in this process.
        fn holds(&mut self, held: &HeldLock);

        /// Notes how long a round trip took.
        fn replied_in(&mut self, _: Duration) {}

        /// Notes that a statement failed. A pooled connection that is in doubt then is discarded, because the error may be
        /// about the connection: prepared statements that some code deallocated, for example.
        fn failed(&mut self) {}

        /// After an error of a take, finds out whether the session of a lent connection holds the lock, and ends the session if it
        /// does, as a lent connection cannot be discarded. A note about what ran does not tell, because it is taken back with
        /// the statement, and a session lock is not.
        fn repair(&mut self) -> impl Future<Output = ()> + Send {
            async {}
        }

        /// How long a release may remain without a reply after the work has failed. `None` for as long as it takes.
        fn patience(&self) -> Option<Duration> {
            None
        }

        /// Notes, before a release is sent, what a drop during the release needs to know.
        fn releasing(&mut self, held: &HeldLock);

        /// Releases the lock of a guard that was dropped, without waiting.
        fn release_later(&mut self, held: HeldLock, since: Instant, watches: Watches);
    }
}

/// A connection out of a pool.
#[derive(Debug)]
pub struct Pooled<C: PoolConnection + 'static> {
    /// `None` once it was moved to a task.
    conn: Option<C>,
    doubt: Option<Doubt>,
    is_waiting: bool,
    /// How long an unlock may remain without a reply before the statement in front of it is cancelled.
    patience: Duration,
    /// Whether a nested guard may have left a lock on the session.
    is_distrusted: bool,
    /// Whether the guard has not lent the connection since it took the lock, so nobody has opened a transaction.
    is_outside_transaction: bool,
    runtime: Handle,
    /// Dropped last.
    local: Option<LocalHold>,
}

impl<C: PoolConnection + 'static> Pooled<C> {
    pub(super) fn new(conn: C, runtime: Handle) -> Self {
        Self {
            conn: Some(conn),
            doubt: None,
            is_waiting: false,
            patience: PATIENCE,
            is_distrusted: false,
            is_outside_transaction: false,
            runtime,
            local: None,
        }
    }
}

impl<C: PoolConnection + 'static> GuardConnection for Pooled<C> {}

impl<C: PoolConnection + 'static> sealed::Sealed for Pooled<C> {
    fn conn(&mut self) -> &mut AsyncPgConnection {
        self.is_outside_transaction = false;
        match &mut self.conn {
            Some(conn) => conn,
            None => unreachable!("only a drop moves the connection"),
        }
    }

    #[cfg(feature = "migrations")]
    fn conn_ref(&self) -> &AsyncPgConnection {
        match &self.conn {
            Some(conn) => conn,
            None => unreachable!("only a drop moves the connection"),
        }
    }

    fn session(&mut self) -> (Asynchronous<'_>, &mut Option<Doubt>) {
        match &mut self.conn {
            Some(conn) => {
                let session =
                    Asynchronous::pooled(conn).outside_transaction(self.is_outside_transaction);
                (session, &mut self.doubt)
            }
            None => unreachable!("only a drop moves the connection"),
        }
    }

    fn set_waiting(&mut self, is_waiting: bool) {
        self.is_waiting = is_waiting;
    }

    fn holds(&mut self, held: &HeldLock) {
        self.local = Some(LocalHold::of_guard(held.lock.id, held.pid));
        self.is_outside_transaction = true;
    }

    fn replied_in(&mut self, time: Duration) {
        self.patience = (4 * time).clamp(PATIENCE, LONGEST_PATIENCE);
    }

    fn failed(&mut self) {
        if let Some(doubt) = self.doubt {
            self.doubt = Some(Doubt::Certain(doubt.pid().unwrap_or_default()));
        }
    }

    fn patience(&self) -> Option<Duration> {
        Some(LONGEST_PATIENCE)
    }

    fn releasing(&mut self, held: &HeldLock) {
        self.is_distrusted |= distrusted::forget(held.pid);
    }

    fn release_later(&mut self, held: HeldLock, since: Instant, watches: Watches) {
        let pinned = Self {
            conn: self.conn.take(),
            doubt: Some(Doubt::Releasing(held.lock, held.pid)),
            is_waiting: false,
            patience: self.patience,
            is_distrusted: self.is_distrusted,
            is_outside_transaction: self.is_outside_transaction,
            runtime: self.runtime.clone(),
            local: self.local.take(),
        };
        runtime::leave_to(&self.runtime, release_dropped(pinned, held, since, watches));
    }
}

impl<C: PoolConnection + 'static> Drop for Pooled<C> {
    fn drop(&mut self) {
        let Some(conn) = self.conn.take() else { return };
        // This may be dropped outside of a runtime.
        let _entered = runtime::entered(&self.runtime);
        match self.doubt {
            // The pool is the caller's code.
            None if !self.is_distrusted => {
                caught(|| drop(conn));
            }
            Some(Doubt::Certain(_)) => discard(conn, false),
            _ => {
                let mut is_expected = false;
                if let Some(Doubt::Acquiring(lock)) = self.doubt {
                    self.local = Some(LocalHold::of(lock.id));
                    is_expected = self.is_waiting && !std::thread::panicking();
                }
                let unsettled = Unsettled {
                    conn: Some(conn),
                    is_expected,
                    _local: self.local.take(),
                };
                let settled = settle(unsettled, self.is_waiting, self.patience);
                runtime::leave_to(&self.runtime, settled);
            }
        }
    }
}

/// Releases a lock. What then is in doubt is settled by the drop of the connection, also if this future is dropped.
pub(super) async fn release<C: GuardConnection>(
    pinned: &mut C,
    held: &HeldLock,
    watches: &Watches,
) -> crate::Result<()> {
    pinned.releasing(held);
    let (mut session, doubt) = pinned.session();
    let released = operations::release(&mut session, doubt, held).await;
    watches.released(&released);
    if released.is_err() {
        pinned.failed();
    }
    released
}

/// Releases the lock of a guard that was dropped.
async fn release_dropped<C: PoolConnection + 'static>(
    mut pinned: Pooled<C>,
    mut held: HeldLock,
    since: Instant,
    watches: Watches,
) {
    let patience = pinned.patience;
    let released = timeout(patience, release(&mut pinned, &held, &watches)).await;
    // Before the connection is back in its pool, because the next guard on this session must not share the token.
    held.fencing_token = None;
    match released {
        Ok(released) => held.record_release(since, &released),
        // A statement of the caller's still runs, whose future was dropped.
        Err(_) => {
            pinned.is_waiting = true;
            held.record_deferral(since);
        }
    }
}

/// A pooled connection in doubt. Unless the doubt ends, dropping this discards the connection.
struct Unsettled<C: PoolConnection + 'static> {
    conn: Option<C>,
    /// Whether the future of a wait was dropped, which costs the connection.
    is_expected: bool,
    /// Dropped last.
    _local: Option<LocalHold>,
}

impl<C: PoolConnection + 'static> Drop for Unsettled<C> {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.take() {
            discard(conn, self.is_expected);
        }
    }
}

fn discard<C: PoolConnection + 'static>(conn: C, is_expected: bool) {
    // That of a pool of the caller's own may panic.
    caught(|| conn.discard());
    record_discard(true, is_expected);
}

/// Releases all locks of the session, and gives the connection back to its pool if nothing else is in doubt.
async fn settle<C: PoolConnection + 'static>(
    mut unsettled: Unsettled<C>,
    is_waiting: bool,
    patience: Duration,
) {
    let Some(conn) = &mut unsettled.conn else {
        return;
    };
    if release_all(conn, is_waiting, patience).await {
        drop(unsettled.conn.take());
    }
}

/// Releases all locks of the session. Returns whether the session can be used again.
async fn release_all(conn: &mut AsyncPgConnection, is_waiting: bool, patience: Duration) -> bool {
    let is_outside = Asynchronous::pooled(conn).transaction() == Transaction::None;
    let token = conn.cancel_token();
    {
        let mut unlocked = pin!(conn.batch_execute(sql::RELEASE_ALL));
        let replied = if is_waiting {
            None
        } else {
            timeout(patience, &mut unlocked).await.ok()
        };
        match replied {
            Some(Ok(())) if is_outside => {}
            // The end of the session ends the transaction, too.
            Some(_) => return false,
            None => {
                // tokio-postgres does not wait until the server has handled a cancellation, which may hit a later statement
                // on the session. So the session is not used again.
                let mut pause = patience;
                for _ in 0..CANCELLATIONS {
                    let _ = timeout(LONGEST_PATIENCE, token.cancel_query(NoTls)).await;
                    if timeout(pause, &mut unlocked).await.is_ok() {
                        break;
                    }
                    pause = LONGEST_PATIENCE.min(2 * pause);
                }
                return false;
            }
        }
    }
    let mut session = Asynchronous::pooled(conn);
    if operations::lifts_idle_session_timeout() {
        // The statement in doubt may have lifted it, and the value to restore was in the reply.
        let is_off: QueryResult<bool> = session.one(sql::IsIdleTimeoutOff {}).await;
        if is_off != Ok(false) {
            return false;
        }
    }
    matches!(session.is_inside_transaction().await, Ok(false))
}
