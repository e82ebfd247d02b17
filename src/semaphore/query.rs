//! The statements behind the semaphore, one round trip each, for any connection to PostgreSQL.

use diesel::data_types::PgInterval;
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::query_builder::{AstPass, Query, QueryFragment, QueryId};
use diesel::result::Error as DieselError;
use diesel::sql_types::{BigInt, Integer, Interval, Nullable, SmallInt, Text, Timestamptz};

use crate::error::Error;
use crate::functions::{complete_service_request, renew_service_request};
use crate::installed;
use crate::read_committed::{self, is_serialization_failure};
use crate::time::Timestamp;

/// Claims a slot; answers the claim, or when the first of those in flight expires.
#[derive(Debug)]
pub(super) struct ClaimRequest<'a> {
    pub(super) service: &'a str,
    pub(super) slots: i32,
    pub(super) timeout: PgInterval,
    pub(super) details: &'a str,
}

/// A null `id` is a full semaphore, of which `next_expiry` tells when its first request expires.
#[derive(Debug, Queryable)]
pub(super) struct Answer {
    pub(super) id: Option<i64>,
    pub(super) slot: Option<i16>,
    pub(super) created_at: Option<Timestamp>,
    pub(super) expires_at: Option<Timestamp>,
    pub(super) answered_at: Timestamp,
    pub(super) next_expiry: Option<Timestamp>,
}

impl Query for ClaimRequest<'_> {
    type SqlType = (
        Nullable<BigInt>,
        Nullable<SmallInt>,
        Nullable<Timestamptz>,
        Nullable<Timestamptz>,
        Timestamptz,
        Nullable<Timestamptz>,
    );
}

impl QueryId for ClaimRequest<'_> {
    type QueryId = ClaimRequest<'static>;
    const HAS_STATIC_QUERY_ID: bool = true;
}

impl<Conn> RunQueryDsl<Conn> for ClaimRequest<'_> {}

impl QueryFragment<Pg> for ClaimRequest<'_> {
    fn walk_ast<'b>(&'b self, mut out: AstPass<'_, 'b, Pg>) -> QueryResult<()> {
        out.push_sql(
            "SELECT id, slot, created_at, expires_at, answered_at, next_expiry \
             FROM resource_control.admit_service_request(",
        );
        out.push_bind_param::<Text, _>(self.service)?;
        out.push_sql(", ");
        out.push_bind_param::<Integer, _>(&self.slots)?;
        out.push_sql(", ");
        out.push_bind_param::<Interval, _>(&self.timeout)?;
        out.push_sql(", ");
        out.push_bind_param::<Text, _>(self.details)?;
        out.push_sql(")");
        Ok(())
    }
}

/// Answers whether the request was ended by this.
pub(super) fn complete(conn: &mut PgConnection, id: i64) -> Result<bool, Error> {
    read_committed::repeat(conn, |conn| {
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
    read_committed::repeat(conn, |conn| {
        diesel::select(renew_service_request(id, timeout)).get_result(conn)
    })
    .map_err(|error| explain(conn, error))
}

/// What an error means. Asks the database where it can still be asked.
pub(super) fn explain(conn: &mut PgConnection, error: DieselError) -> Error {
    if is_serialization_failure(&error) {
        return Error::StrictIsolation;
    }
    installed::explain(conn, error, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_is_one_call() {
        let query = ClaimRequest {
            service: "geocoder",
            slots: 4,
            timeout: PgInterval::from_microseconds(30_000_000),
            details: "web-3",
        };
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT id, slot, created_at, expires_at, answered_at, next_expiry \
             FROM resource_control.admit_service_request($1, $2, $3, $4) \
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
