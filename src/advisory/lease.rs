//! The connection that a lock is pinned to, and what becomes of it when it cannot be trusted.

use std::collections::BTreeSet;
use std::ops::DerefMut;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::mode::LockMode;
use super::query::IsHeld;
use crate::events::{self, Event, Outcome, Subject};
use crate::key::LockId;
use crate::session::sent as send;
use crate::transaction::{self, Transaction};

/// How a guard has its connection: taken out of a pool, or lent by the caller.
///
/// Sealed: `PooledPgConnection` and `&mut PgConnection` are all there is. Any other pool or wrapper
/// lends a `&mut PgConnection`.
pub trait Lease: DerefMut<Target = PgConnection> + sealed::Sealed {}

mod sealed {
    pub trait Sealed {
        /// Whether dropping the lease gives the connection back to a pool, which discards it if it
        /// is marked as broken.
        const POOLED: bool;
    }
}

impl sealed::Sealed for &mut PgConnection {
    const POOLED: bool = false;
}
impl Lease for &mut PgConnection {}

#[cfg(feature = "r2d2")]
impl sealed::Sealed for crate::pool::PooledPgConnection {
    const POOLED: bool = true;
}
#[cfg(feature = "r2d2")]
impl Lease for crate::pool::PooledPgConnection {}

/// A leased connection that remembers whether it can be trusted, and that takes the consequence
/// when it is dropped: on every way out, be it an error, an early return or a panic.
#[derive(Debug)]
pub(super) struct Pinned<C: Lease> {
    lease: C,
    doubt: Option<Doubt>,
}

/// Why the session may hold a lock that no guard accounts for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Doubt {
    /// A statement that takes this lock was sent, and its answer did not arrive.
    Acquiring(LockId, LockMode),
    /// A statement that releases this lock was sent, to the session with this pid, and its answer
    /// did not arrive.
    Releasing(LockId, LockMode, i32),
    /// The connection, whose session has this pid, cannot be trusted, and there is nothing to ask: another
    /// session replies on it, it is closed, or somebody marked it before.
    Certain(i32),
}

impl<C: Lease> Pinned<C> {
    pub(super) const POOLED: bool = C::POOLED;

    pub(super) fn new(lease: C) -> Self {
        Self { lease, doubt: None }
    }

    pub(super) fn conn(&mut self) -> &mut PgConnection {
        &mut self.lease
    }

    pub(super) fn doubt(&mut self, doubt: Doubt) {
        self.doubt = Some(doubt);
    }

    pub(super) fn trust(&mut self) {
        self.doubt = None;
    }
}

impl<C: Lease> Drop for Pinned<C> {
    fn drop(&mut self) {
        let Some(doubt) = self.doubt else { return };
        let conn = &mut *self.lease;
        if C::POOLED {
            if let Some(pid) = doubt.pid() {
                distrusted::forget(pid);
            }
        } else {
            // Diesel's instrumentation is the caller's code and runs with every statement.
            match catch_unwind(AssertUnwindSafe(|| settle(conn, doubt))) {
                Ok(Settled::Well) => return,
                Ok(Settled::Ended) => {}
                Ok(Settled::InDoubt) | Err(_) => {
                    if let Some(pid) = doubt.pid() {
                        distrusted::remember(pid);
                    }
                }
            }
        }
        // After the last statement, since the next one that succeeds would take the mark back; and before
        // the event, since a subscriber is the caller's code and may panic, here perhaps while unwinding.
        transaction::mark_broken(conn);
        let _ = catch_unwind(|| {
            let connection = Subject::Connection { pooled: C::POOLED };
            events::record(&Event::new("discard", connection, Outcome::Discarded));
        });
    }
}

impl Doubt {
    /// The pid of the session that is in doubt, where it is known.
    fn pid(self) -> Option<i32> {
        match self {
            Doubt::Acquiring(..) => None,
            Doubt::Releasing(_, _, pid) | Doubt::Certain(pid) => Some(pid),
        }
    }
}

/// What became of a borrowed connection that was in doubt.
enum Settled {
    /// Its session holds nothing that it should not.
    Well,
    /// Its session was ended.
    Ended,
    /// Its session may hold the lock.
    InDoubt,
}

/// Does what can be done for a borrowed connection, which cannot be discarded.
fn settle(conn: &mut PgConnection, doubt: Doubt) -> Settled {
    let (Doubt::Acquiring(id, mode) | Doubt::Releasing(id, mode, _)) = doubt else {
        return Settled::InDoubt;
    };
    match transaction::of(conn) {
        // A mark, if there is one, is that of the statement in doubt.
        Transaction::None | Transaction::Broken => match is_held(conn, id, mode) {
            Ok(false) => {
                // A transaction that keeps the mark alive is the caller's.
                transaction::clear_mark(conn);
                Settled::Well
            }
            // Aborted by the caller, whose transaction it is; or closed.
            Err(_) if transaction::is_marked(conn) => Settled::InDoubt,
            // Held by the statement in doubt or by a guard further out: PostgreSQL keeps the count to
            // itself.
            Ok(true) | Err(_) => {
                end_session(conn);
                Settled::Ended
            }
        },
        // An error has aborted the test, and with it the statement.
        Transaction::Test if matches!(doubt, Doubt::Acquiring(..)) => Settled::Well,
        Transaction::Test | Transaction::Open => Settled::InDoubt,
    }
}

/// Not prepared, since it may be the prepared statements that are gone.
fn is_held(conn: &mut PgConnection, id: LockId, mode: LockMode) -> QueryResult<bool> {
    let locator = id.into();
    let (_, held): (i32, bool) = send(conn, |conn| {
        let question = IsHeld {
            locator: &locator,
            mode,
            prepared: false,
        };
        question.get_result(conn)
    })?;
    Ok(held)
}

/// Only the end of the session surely ends what it holds. Where the role may not end its own, all
/// its locks are released: a guard further out then reports that it lost its own.
fn end_session(conn: &mut PgConnection) {
    let ended =
        conn.batch_execute("SELECT pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())");
    let refused = ended.is_ok() || transaction::of(conn) != Transaction::Broken;
    if refused {
        let _ = conn.batch_execute("SELECT pg_catalog.pg_advisory_unlock_all()");
    }
}

/// The sessions on which a lock is still held that no guard accounts for, by pid.
///
/// A guard on a borrowed connection that cannot unlock, since the caller's transaction is aborted,
/// marks the connection as broken. Diesel takes the mark back with the next successful statement;
/// should a guard further out pin the same session in a pool, it reads here what the mark no longer
/// tells, and discards it. A pid that the server uses again costs one needless reconnect.
pub(super) mod distrusted {
    use super::*;

    static PIDS: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());

    pub(super) fn remember(pid: i32) {
        pids().insert(pid);
    }

    pub(super) fn forget(pid: i32) {
        pids().remove(&pid);
    }

    pub(in crate::advisory) fn contains(pid: i32) -> bool {
        pids().contains(&pid)
    }

    fn pids() -> std::sync::MutexGuard<'static, BTreeSet<i32>> {
        PIDS.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::distrusted;

    #[test]
    fn a_session_that_ends_is_distrusted_no_more() {
        distrusted::remember(-7);
        assert!(distrusted::contains(-7));
        distrusted::forget(-7);
        assert!(!distrusted::contains(-7));
    }
}
