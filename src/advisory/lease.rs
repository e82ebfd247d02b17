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
use crate::events;
use crate::key::LockId;
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
    /// The connection cannot be trusted, and there is nothing to ask: another session answers on
    /// it, or somebody marked it before.
    Certain,
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
            if let Doubt::Releasing(_, _, pid) = doubt {
                distrusted::forget(pid);
            }
        } else {
            // Diesel's instrumentation is the caller's code and runs with every statement.
            let settled = catch_unwind(AssertUnwindSafe(|| settle(conn, doubt)));
            if settled.unwrap_or(false) {
                return;
            }
        }
        events::discarded(C::POOLED);
        // Last of all: the next successful statement would take the mark back.
        transaction::mark_broken(conn);
    }
}

/// Does what can be done for a borrowed connection, which cannot be discarded. Answers whether
/// all is well with it.
fn settle(conn: &mut PgConnection, doubt: Doubt) -> bool {
    match (doubt, transaction::of(conn)) {
        (Doubt::Certain, _) => false,
        (Doubt::Acquiring(id, mode) | Doubt::Releasing(id, mode, _), Transaction::None) => {
            match is_held(conn, id, mode) {
                Ok(false) => true,
                // By the statement in doubt or by a guard further out: PostgreSQL keeps the count to
                // itself.
                Ok(true) | Err(_) => {
                    end_session(conn);
                    false
                }
            }
        }
        // An error has aborted the test, and with it the statement.
        (Doubt::Acquiring(..), Transaction::Test) => true,
        (Doubt::Acquiring(..), _) => false,
        (Doubt::Releasing(_, _, pid), _) => {
            distrusted::remember(pid);
            false
        }
    }
}

/// Not prepared, since it may be the prepared statements that are gone.
fn is_held(conn: &mut PgConnection, id: LockId, mode: LockMode) -> QueryResult<bool> {
    let locator = id.into();
    let question = IsHeld {
        locator: &locator,
        mode,
        prepared: false,
    };
    question
        .get_result::<(i32, bool)>(conn)
        .map(|(_, held)| held)
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
