//! The connection that a lock is pinned to, and the one place where such a connection is discarded.

use std::ops::DerefMut;

use diesel::pg::PgConnection;

use super::doubt::{Doubt, distrusted, record_discard};
use super::operations;
use crate::panics::caught;
use crate::session::{Blocking, Session, now};
use crate::transaction::{self, Transaction};

/// A connection that a guard can have: one out of a pool, or one that the caller lends.
///
/// Sealed: the only implementations are `PooledPgConnection` and `&mut PgConnection`. Every other pool or wrapper lends a
/// `&mut PgConnection`.
pub trait GuardConnection: DerefMut<Target = PgConnection> + sealed::Sealed {}

mod sealed {
    pub trait Sealed {
        /// Whether the connection goes back to a pool when it is dropped. The pool discards it if it is marked as broken.
        const IS_POOLED: bool;
    }
}

impl sealed::Sealed for &mut PgConnection {
    const IS_POOLED: bool = false;
}
impl GuardConnection for &mut PgConnection {}

#[cfg(feature = "r2d2")]
impl sealed::Sealed for crate::pool::PooledPgConnection {
    const IS_POOLED: bool = true;
}
#[cfg(feature = "r2d2")]
impl GuardConnection for crate::pool::PooledPgConnection {}

/// A connection, and whether its session may hold a lock that no guard accounts for. If so, dropping it discards the
/// connection, on every way out: an error, an early return, or a panic.
#[derive(Debug)]
pub(super) struct PinnedConnection<C: GuardConnection> {
    /// `None` once the drop has it.
    conn: Option<C>,
    doubt: Option<Doubt>,
}

impl<C: GuardConnection> PinnedConnection<C> {
    pub(super) fn new(conn: C) -> Self {
        Self {
            conn: Some(conn),
            doubt: None,
        }
    }

    pub(super) fn conn(&mut self) -> &mut PgConnection {
        pinned(&mut self.conn)
    }

    /// Ends the doubt: the session holds nothing that no guard accounts for.
    pub(super) fn trust(&mut self) {
        self.doubt = None;
    }

    /// The session of the connection, and the doubt, for an operation.
    pub(super) fn session(&mut self) -> (Blocking<'_>, &mut Option<Doubt>) {
        let conn = pinned(&mut self.conn);
        (Blocking::new(conn, C::IS_POOLED), &mut self.doubt)
    }
}

fn pinned<C: GuardConnection>(conn: &mut Option<C>) -> &mut PgConnection {
    match conn {
        Some(conn) => conn,
        None => unreachable!("only the drop takes the connection"),
    }
}

impl<C: GuardConnection> Drop for PinnedConnection<C> {
    fn drop(&mut self) {
        let Some(mut conn) = self.conn.take() else {
            return;
        };
        if let Some(doubt) = self.doubt {
            discard::<C>(&mut conn, doubt);
        }
        // A handler of the pool may panic, while another panic unwinds.
        caught(|| drop(conn));
    }
}

/// Discards a connection in doubt: a pool closes it, which ends its session and so frees its locks. A borrowed connection
/// cannot be closed, so it is repaired where that is certain, and otherwise marked as broken.
fn discard<C: GuardConnection>(conn: &mut PgConnection, doubt: Doubt) {
    if C::IS_POOLED {
        if let Some(pid) = doubt.pid() {
            let _ = distrusted::forget(pid);
        }
    } else {
        match caught(|| repair(&mut Blocking::lent(conn), doubt)) {
            Some(Repair::Clean) => return,
            Some(Repair::SessionEnded) => {}
            Some(Repair::StillInDoubt) | None => {
                if let Some(pid) = doubt.pid() {
                    distrusted::remember(pid);
                }
            }
        }
    }
    // After the last statement, because the next one that succeeds would clear the mark. Before the event, because its
    // subscriber may panic.
    transaction::mark_broken(conn);
    record_discard(C::IS_POOLED, false);
}

/// The result of repairing a borrowed connection.
enum Repair {
    /// The session holds nothing that no guard accounts for.
    Clean,
    SessionEnded,
    /// The session may hold the lock.
    StillInDoubt,
}

fn repair(session: &mut Blocking<'_>, doubt: Doubt) -> Repair {
    let (Doubt::Acquiring(lock) | Doubt::Releasing(lock, _)) = doubt else {
        return Repair::StillInDoubt;
    };
    match session.transaction() {
        // A mark, if there is one, is that of the statement in doubt.
        Transaction::None | Transaction::Broken => match now(operations::holds(session, lock)) {
            Ok(false) => {
                // Only a transaction of the caller's can have kept the mark.
                session.clear_mark();
                Repair::Clean
            }
            // The caller's transaction is aborted, or the connection is closed.
            Err(_) if session.transaction() == Transaction::Broken => Repair::StillInDoubt,
            // Either the statement in doubt or an outer guard holds it. PostgreSQL does not expose the count.
            Ok(true) | Err(_) => {
                now(operations::end_session(session));
                Repair::SessionEnded
            }
        },
        Transaction::Test if matches!(doubt, Doubt::Acquiring(_)) => {
            match now(operations::holds(session, lock)) {
                // As after a panic of the caller's instrumentation.
                Ok(true) => {
                    now(operations::end_session(session));
                    Repair::SessionEnded
                }
                // An error has aborted the test transaction, in which nothing can be queried. A lock that a cancelled statement
                // took stays until the session of the test ends.
                Ok(false) | Err(_) => Repair::Clean,
            }
        }
        Transaction::Test | Transaction::Open => Repair::StillInDoubt,
    }
}

#[cfg(all(test, feature = "r2d2"))]
mod tests {
    use diesel::pg::PgConnection;
    use diesel::r2d2::event::CheckinEvent;
    use diesel::r2d2::{ConnectionManager, HandleEvent, Pool};

    use crate::AdvisoryLock;

    #[derive(Debug)]
    struct Panics;

    impl HandleEvent for Panics {
        fn handle_checkin(&self, _: CheckinEvent) {
            panic!("in the handler");
        }
    }

    #[test]
    fn a_pool_whose_handler_panics_does_not_make_a_drop_panic() {
        let database = workbench::Database::new();
        let pool = Pool::builder()
            .max_size(1)
            .event_handler(Box::new(Panics))
            .test_on_check_out(false)
            .build(ConnectionManager::<PgConnection>::new(database.url()))
            .unwrap();
        drop(AdvisoryLock::named("handler").acquire(&pool).unwrap());
    }
}
