//! The transaction on a connection, as far as Diesel knows, and the mark that makes a pool discard the connection.
//!
//! None of this takes a round trip. This is the only file that uses the transaction manager of a blocking connection below its
//! stable interface (`transaction_manager_status_mut` is hidden from Diesel's documentation). Because of it this crate is pinned
//! to a minor version of Diesel. `session/asynchronous.rs` does the same with that of diesel-async.

#[cfg(feature = "postgres")]
use diesel::connection::{AnsiTransactionManager, TransactionManager, TransactionManagerStatus};
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use crate::error::{Error, Misplaced, Result};

/// The transaction on a connection, as far as Diesel opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transaction {
    /// None. Diesel does not know of a `BEGIN` that was sent as plain SQL.
    None,
    /// The transaction of `begin_test_transaction`, which counts as none.
    Test,
    /// A transaction that the caller opened.
    Open,
    /// Unknown, because the connection is broken, or marked as broken.
    Broken,
}

#[cfg(feature = "postgres")]
pub(crate) fn of(conn: &mut PgConnection) -> Transaction {
    let Ok(depth) = status(conn).transaction_depth() else {
        return Transaction::Broken;
    };
    match depth.map(|depth| depth.get()) {
        None => Transaction::None,
        // Diesel reports every open transaction as broken, except a test transaction.
        Some(1) if !is_marked(conn) => Transaction::Test,
        Some(_) => Transaction::Open,
    }
}

/// Returns how deep transactions are nested. 0 on a connection that is broken, or marked as broken.
#[cfg(feature = "postgres")]
pub(crate) fn depth(conn: &mut PgConnection) -> u32 {
    let depth = status(conn).transaction_depth();
    depth.ok().flatten().map_or(0, |depth| depth.get())
}

/// Refuses an operation that commits as it goes inside any transaction, including a test transaction.
pub(crate) fn refuse_any(transaction: Transaction) -> Result<()> {
    match transaction {
        Transaction::None => Ok(()),
        Transaction::Test | Transaction::Open => {
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        }
        Transaction::Broken => Err(DieselError::BrokenTransactionManager.into()),
    }
}

/// Refuses a transaction that the caller opened. A test transaction counts as none.
pub(crate) fn refuse_open(transaction: Transaction, misplaced: Misplaced) -> Result<()> {
    match transaction {
        Transaction::None | Transaction::Test => Ok(()),
        Transaction::Open => Err(misplaced.into()),
        Transaction::Broken => Err(DieselError::BrokenTransactionManager.into()),
    }
}

/// Requires a transaction. That of a test is one, too.
pub(crate) fn require_open(transaction: Transaction, misplaced: Misplaced) -> Result<()> {
    match transaction {
        Transaction::Open | Transaction::Test => Ok(()),
        Transaction::None => Err(misplaced.into()),
        Transaction::Broken => Err(DieselError::BrokenTransactionManager.into()),
    }
}

/// Marks the connection as broken, so that a pool discards it.
///
/// The mark does not last: Diesel clears it with the first reply of the server that reports no open transaction. So a
/// connection that is to be discarded is marked after its last statement.
///
/// For the same reason the mark is a probe. If a connection is marked *before* a statement, the mark is cleared after it if,
/// and only if, the server reports that no transaction is open. Only this detects, without a round trip, a transaction that
/// the caller opened without Diesel's knowledge.
#[cfg(feature = "postgres")]
pub(crate) fn mark_broken(conn: &mut PgConnection) {
    status(conn).set_in_error();
}

/// Makes a call, and also returns whether a transaction is open on the connection that Diesel does not know of.
///
/// If so, the connection is left marked. It is also left marked if the call failed before the server reported on a
/// transaction, because a `PREPARE` failed or the connection is closed.
#[cfg(feature = "postgres")]
pub(crate) fn probed<T>(
    conn: &mut PgConnection,
    call: impl FnOnce(&mut PgConnection) -> T,
) -> (T, bool) {
    if matches!(of(conn), Transaction::Test | Transaction::Open) {
        return (call(conn), false);
    }
    mark_broken(conn);
    let reply = call(conn);
    (reply, is_marked(conn))
}

/// Clears the mark, if it is known that only a transaction of the caller kept it.
#[cfg(feature = "postgres")]
pub(crate) fn clear_mark(conn: &mut PgConnection) {
    *status(conn) = TransactionManagerStatus::default();
}

/// Returns whether a pool would discard the connection.
#[cfg(feature = "postgres")]
pub(crate) fn is_marked(conn: &mut PgConnection) -> bool {
    <AnsiTransactionManager as TransactionManager<PgConnection>>::is_broken_transaction_manager(
        conn,
    )
}

#[cfg(feature = "postgres")]
fn status(conn: &mut PgConnection) -> &mut TransactionManagerStatus {
    <AnsiTransactionManager as TransactionManager<PgConnection>>::transaction_manager_status_mut(
        conn,
    )
}

#[cfg(test)]
mod tests {
    use super::Transaction::{Broken, None as Outside, Open, Test};
    use super::*;

    #[test]
    fn an_operation_is_refused_in_the_wrong_transaction() {
        const WRONG: Misplaced = Misplaced::ClaimInTransaction;
        let refused = |checked: Result<()>| match checked {
            Ok(()) => None,
            Err(Error::Misplaced(misplaced)) => Some(Ok(misplaced)),
            Err(Error::Database(DieselError::BrokenTransactionManager)) => Some(Err(())),
            Err(other) => panic!("{other}"),
        };
        for (transaction, outside, inside) in [
            (Outside, None, Some(Ok(WRONG))),
            (Test, None, None),
            (Open, Some(Ok(WRONG)), None),
            (Broken, Some(Err(())), Some(Err(()))),
        ] {
            assert_eq!(refused(refuse_open(transaction, WRONG)), outside);
            assert_eq!(refused(require_open(transaction, WRONG)), inside);
        }
    }
}
