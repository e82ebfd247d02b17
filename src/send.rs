//! Sending a statement where the caller may have left libpq in the middle of a `COPY`.
//!
//! Diesel does not read libpq to the end of a `COPY TO`, even where the caller read all of its rows. A panic in
//! the closure of `copy_from` leaves a `COPY FROM` open likewise. libpq then refuses to send a prepared
//! statement, or one with parameters, with the error that it also reports for a closed connection.

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

use crate::transaction::{self, Transaction};

/// Makes a call whose first statement libpq may refuse to send. In that case nothing was sent: this ends the
/// `COPY`, and makes the call once more. A connection that is closed fails again.
///
/// The one more round trip is taken only after such a refusal. It reads what is left of a `COPY TO`, and
/// cancels a `COPY FROM`, which aborts the transaction around it.
pub(crate) fn send<T>(
    conn: &mut PgConnection,
    mut call: impl FnMut(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    match call(conn) {
        Err(error) if is_unsent(&error) => {
            let was_marked = transaction::of(conn) == Transaction::Broken;
            // Without parameters libpq ends the COPY before it sends. Whether this succeeds, as it does not in
            // an aborted transaction, is no matter.
            let _ = conn.batch_execute("SELECT 1");
            if was_marked {
                // The statement took the mark back, by which the call may find an open transaction.
                transaction::mark_broken(conn);
            }
            call(conn)
        }
        answer => answer,
    }
}

fn is_unsent(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::UnableToSendCommand, _)
    )
}
