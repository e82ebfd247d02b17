//! What Diesel knows of the transaction on a connection, and the mark by which it tells a pool
//! not to take a connection back.
//!
//! None of this costs a round trip. It is the one place that uses Diesel's transaction manager
//! below its stable interface (`transaction_manager_status_mut` is hidden from its documentation),
//! which is why this crate is pinned to Diesel's minor version.

use diesel::connection::{AnsiTransactionManager, TransactionManager, TransactionManagerStatus};
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use crate::error::{Error, Misplaced, Result};

/// The transaction on a connection, as far as Diesel opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transaction {
    /// None. A `BEGIN` sent as plain SQL is invisible to Diesel.
    None,
    /// That of `begin_test_transaction`, which stands for no transaction at all.
    Test,
    /// One that the caller opened.
    Open,
    /// Unknown: the connection is broken, or marked as such.
    Broken,
}

pub(crate) fn of(conn: &mut PgConnection) -> Transaction {
    let Ok(depth) = status(conn).transaction_depth() else {
        return Transaction::Broken;
    };
    match depth.map(|depth| depth.get()) {
        None => Transaction::None,
        // Diesel calls any open transaction broken, unless it is a test transaction.
        Some(1) if !is_marked(conn) => Transaction::Test,
        Some(_) => Transaction::Open,
    }
}

/// Refuses what commits as it goes inside any transaction, a test transaction included.
pub(crate) fn refuse_any(conn: &mut PgConnection) -> Result<()> {
    match of(conn) {
        Transaction::None => Ok(()),
        Transaction::Test | Transaction::Open => {
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        }
        Transaction::Broken => Err(DieselError::BrokenTransactionManager.into()),
    }
}

/// Marks the connection as broken, so that a pool discards it.
///
/// The mark does not stick: Diesel takes it back with the first answer of the server that reports
/// no open transaction. A connection that is to be discarded is therefore marked last of all.
///
/// That same behaviour makes a probe of it. Marked *before* a statement, a connection is clean
/// again after it if, and only if, the server says that no transaction is open: the one way to see
/// a transaction that the caller opened behind Diesel's back, at no round trip.
pub(crate) fn mark_broken(conn: &mut PgConnection) {
    status(conn).set_in_error();
}

/// Makes a call, and tells whether a transaction is open on the connection that Diesel does not know of.
///
/// If so, the connection is left marked. It also is where the call failed before the server reported on a
/// transaction: a `PREPARE` failed, or the connection is closed.
pub(crate) fn probed<T>(
    conn: &mut PgConnection,
    call: impl FnOnce(&mut PgConnection) -> T,
) -> (T, bool) {
    if of(conn) != Transaction::None {
        return (call(conn), false);
    }
    mark_broken(conn);
    let answer = call(conn);
    (answer, is_marked(conn))
}

/// Makes a call on a connection out of a pool, and refuses what was done in a transaction that
/// somebody had left open there. Then, and where the call failed in a way that leaves the state of the
/// connection in doubt, it stays marked, so that the pool discards it.
#[cfg(feature = "r2d2")]
pub(crate) fn refuse_left_open<T>(
    conn: &mut PgConnection,
    call: impl FnOnce(&mut PgConnection) -> Result<T>,
) -> Result<T> {
    match probed(conn, call) {
        (Ok(_), true) => Err(Error::TransactionInPool),
        (answer, _) => answer,
    }
}

/// Takes the mark back, where it is known that only a transaction of the caller's kept it alive.
pub(crate) fn clear_mark(conn: &mut PgConnection) {
    *status(conn) = TransactionManagerStatus::default();
}

/// Answers whether a pool would discard the connection.
pub(crate) fn is_marked(conn: &mut PgConnection) -> bool {
    <AnsiTransactionManager as TransactionManager<PgConnection>>::is_broken_transaction_manager(
        conn,
    )
}

fn status(conn: &mut PgConnection) -> &mut TransactionManagerStatus {
    <AnsiTransactionManager as TransactionManager<PgConnection>>::transaction_manager_status_mut(
        conn,
    )
}
