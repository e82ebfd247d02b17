//! A connection that the caller lends, and the message that is queued on it when a future or a guard is dropped.

// Nobody outside this crate can name what the sealed trait uses.
#![allow(private_interfaces)]

use std::time::Instant;

use diesel::connection::InstrumentationEvent;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};

use super::pinned::{GuardConnection, sealed};
use crate::advisory::doubt::{Doubt, distrusted, record_discard};
use crate::advisory::operations::{self, HeldLock};
use crate::advisory::sql::{self, Condition};
use crate::advisory::waiter::LocalHold;
use crate::advisory::watched::Watches;
use crate::panics::caught;
use crate::session::{Asynchronous, Lent, Session, started};

/// A connection that the caller lends.
pub struct Borrowed<'conn> {
    conn: &'conn mut AsyncPgConnection,
    doubt: Option<Doubt>,
    is_waiting: bool,
    /// Whether a statement failed, and what it did is unknown.
    has_failed: bool,
    /// The value to restore if a release is dropped.
    idle_session_timeout: Option<String>,
    lent: Lent,
    /// Dropped last.
    local: Option<LocalHold>,
}

impl<'conn> Borrowed<'conn> {
    pub(super) fn new(conn: &'conn mut AsyncPgConnection) -> Self {
        Self {
            conn,
            doubt: None,
            is_waiting: false,
            has_failed: false,
            idle_session_timeout: None,
            lent: Lent::default(),
            local: None,
        }
    }

    /// Queues a message behind what was sent. Inside an aborted transaction it fails, and nobody reads the reply. So a guard
    /// that has the session pinned out of a pool has to know.
    fn queue(&mut self, message: &str, pid: Option<i32>) {
        distrust(pid);
        let is_queued = caught(|| started(self.conn.batch_execute(message)));
        if is_queued.is_none() {
            // The caller's instrumentation panicked before the message was queued, and would do so again.
            self.conn
                .set_instrumentation(|_: InstrumentationEvent<'_>| {});
            caught(|| started(self.conn.batch_execute(message)));
        }
    }
}

fn distrust(pid: Option<i32>) {
    if let Some(pid) = pid {
        distrusted::remember(pid);
    }
}

impl GuardConnection for Borrowed<'_> {}

impl sealed::Sealed for Borrowed<'_> {
    fn conn(&mut self) -> &mut AsyncPgConnection {
        self.conn
    }

    #[cfg(feature = "migrations")]
    fn conn_ref(&self) -> &AsyncPgConnection {
        self.conn
    }

    fn session(&mut self) -> (Asynchronous<'_>, &mut Option<Doubt>) {
        (
            Asynchronous::noted(self.conn, &mut self.lent),
            &mut self.doubt,
        )
    }

    fn set_waiting(&mut self, is_waiting: bool) {
        self.is_waiting = is_waiting;
    }

    fn holds(&mut self, held: &HeldLock) {
        self.local = Some(LocalHold::of_guard(held.lock.id, held.pid));
    }

    fn failed(&mut self) {
        self.has_failed = true;
        if let Some(Doubt::Releasing(_, pid)) = self.doubt {
            if self.lent.is_nested {
                // The hold of the outer guard must not be released instead.
                self.doubt = Some(Doubt::Certain(pid));
            }
        }
    }

    async fn repair(&mut self) {
        let Some(Doubt::Acquiring(lock)) = self.doubt else {
            return;
        };
        let session = &mut Asynchronous::lent(self.conn);
        if let Ok(true) = operations::holds(session, lock).await {
            operations::end_session(session).await;
            session.mark_broken();
            record_discard(false, false);
        }
        // Otherwise the session does not hold the lock, or has ended. Or the transaction of the caller is aborted, in which nothing
        // can be asked. A connection whose transaction was aborted before must stay usable, so it is not marked.
        self.doubt = None;
    }

    fn releasing(&mut self, held: &HeldLock) {
        self.idle_session_timeout = held.idle_session_timeout.clone();
        self.lent.is_nested = LocalHold::is_nested(held.lock.id, held.pid);
    }

    fn release_later(&mut self, held: HeldLock, since: Instant, _: Watches) {
        let timeout = held.idle_session_timeout.as_deref();
        let message = sql::release_if(Condition::Session(held.pid), held.lock, timeout);
        self.queue(&message, Some(held.pid));
        held.record_deferral(since);
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        let Some(doubt) = self.doubt else { return };
        let (condition, lock) = match doubt {
            Doubt::Certain(pid) => {
                distrust(Some(pid));
                Asynchronous::lent(self.conn).mark_broken();
                record_discard(false, false);
                return;
            }
            Doubt::Acquiring(lock) if self.is_waiting => (Condition::None, lock),
            Doubt::Acquiring(lock) => match &self.lent.sent {
                Some(number) => (Condition::Ran(number), lock),
                None => return,
            },
            Doubt::Releasing(lock, pid) => match &self.lent.sent {
                Some(number) => (Condition::DidNotRun(number, pid), lock),
                None => (Condition::Session(pid), lock),
            },
        };
        let timeout = self.idle_session_timeout.as_deref();
        let message = sql::release_if(condition, lock, timeout);
        self.queue(&message, doubt.pid());
        if self.has_failed {
            Asynchronous::lent(self.conn).mark_broken();
            record_discard(false, false);
        }
    }
}

impl std::fmt::Debug for Borrowed<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Borrowed")
            .field("doubt", &self.doubt)
            .finish_non_exhaustive()
    }
}
