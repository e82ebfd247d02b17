//! Calls that take one round trip at READ COMMITTED, whatever the session's default level is.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::send::send;
use crate::transaction::{self, Transaction};

/// Makes the call, and makes it again in a READ COMMITTED transaction if a stricter level fails
/// it. Not inside a transaction, whose level is the caller's.
pub(crate) fn repeat<T>(
    conn: &mut PgConnection,
    call: impl Fn(&mut PgConnection) -> QueryResult<T>,
) -> QueryResult<T> {
    match send(conn, &call) {
        Err(error)
            if is_serialization_failure(&error) && transaction::of(conn) == Transaction::None =>
        {
            conn.build_transaction().read_committed().run(call)
        }
        answer => answer,
    }
}

pub(crate) fn is_serialization_failure(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::SerializationFailure, _)
    )
}
