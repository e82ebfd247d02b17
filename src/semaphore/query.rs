//! The statements behind the semaphore, one round trip each, for any connection to PostgreSQL.

use diesel::data_types::PgInterval;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use crate::error::{Error, Schema};
use crate::functions::{admit_service_request, complete_service_request, renew_service_request};
use crate::installed;
use crate::session::{is_serialization_failure, repeat_at_read_committed};
use crate::time::Timestamp;

/// What a claim returns: a null `id` is a full semaphore, and `next_expiry` is when enough requests will have expired
/// for a claim.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) id: Option<i64>,
    pub(super) slot: Option<i16>,
    pub(super) created_at: Option<Timestamp>,
    pub(super) expires_at: Option<Timestamp>,
    pub(super) answered_at: Timestamp,
    pub(super) next_expiry: Option<Timestamp>,
}

/// Claims a slot. The answer is one value, since to have it as the row of a table costs the server more.
pub(super) fn claim(
    conn: &mut PgConnection,
    service: &str,
    slots: i32,
    timeout: PgInterval,
    details: &str,
) -> Result<Answer, Error> {
    repeat_at_read_committed(conn, |conn| {
        diesel::select(admit_service_request(service, slots, timeout, details)).get_result(conn)
    })
    .map(
        |(id, slot, created_at, expires_at, answered_at, next_expiry)| Answer {
            id,
            slot,
            created_at,
            expires_at,
            answered_at,
            next_expiry,
        },
    )
    .map_err(|error| explain(conn, error))
}

/// Answers whether the request was ended by this.
pub(super) fn complete(conn: &mut PgConnection, id: i64) -> Result<bool, Error> {
    repeat_at_read_committed(conn, |conn| {
        diesel::select(complete_service_request(id)).get_result(conn)
    })
    .map_err(|error| explain(conn, error))
}

/// Answers when the request expires now, unless it has ended.
pub(super) fn renew(
    conn: &mut PgConnection,
    id: i64,
    timeout: PgInterval,
) -> Result<Option<Timestamp>, Error> {
    repeat_at_read_committed(conn, |conn| {
        diesel::select(renew_service_request(id, timeout)).get_result(conn)
    })
    .map_err(|error| explain(conn, error))
}

/// What an error means. Asks the database where it can still be asked.
fn explain(conn: &mut PgConnection, error: DieselError) -> Error {
    if is_serialization_failure(&error) {
        return Error::StrictIsolation;
    }
    if is_duplicate_id(&error) {
        return Error::Schema(Schema::SequenceBehind);
    }
    installed::explain_on(conn, error, None)
}

/// Whether the id that the sequence gave is another request's.
fn is_duplicate_id(error: &DieselError) -> bool {
    matches!(
        error,
        DieselError::DatabaseError(DatabaseErrorKind::UniqueViolation, information)
            if information.constraint_name() == Some("service_request_pkey")
    )
}

#[cfg(test)]
mod tests {
    use diesel::pg::Pg;

    use super::*;

    #[test]
    fn a_claim_is_one_call() {
        let timeout = PgInterval::from_microseconds(30_000_000);
        let claim = diesel::select(admit_service_request("geocoder", 4, timeout, "web-3"));
        assert_eq!(
            diesel::debug_query::<Pg, _>(&claim).to_string(),
            "SELECT resource_control.admit_service_request($1, $2, $3, $4) \
             -- binds: [\"geocoder\", 4, PgInterval { microseconds: 30000000, \
             days: 0, months: 0 }, \"web-3\"]"
        );
    }

    #[test]
    fn completion_and_renewal_are_one_call_each() {
        assert_eq!(
            diesel::debug_query::<Pg, _>(&diesel::select(complete_service_request(7))).to_string(),
            "SELECT resource_control.complete_service_request($1) -- binds: [7]"
        );
        let renewal = renew_service_request(7, PgInterval::from_microseconds(1));
        assert_eq!(
            diesel::debug_query::<Pg, _>(&diesel::select(renewal)).to_string(),
            "SELECT resource_control.renew_service_request($1, $2) -- binds: [7, PgInterval { \
             microseconds: 1, days: 0, months: 0 }]"
        );
    }
}
