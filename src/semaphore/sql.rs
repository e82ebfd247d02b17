//! The statements of a semaphore, and the rows that they return.

use diesel::data_types::PgInterval;

use crate::functions::{admit_service_request, complete_service_request, renew_service_request};
use crate::installed::Needs;
use crate::text::Name;
use crate::time::Timestamp;

/// The arguments of a claim that passed every check that needs no database.
#[derive(Debug)]
pub(super) struct Request<'a> {
    pub(super) service: Name<'a>,
    pub(super) slots: i32,
    pub(super) timeout: PgInterval,
    pub(super) details: &'a str,
}

/// The row of a claim: the request's id and slot, when it was claimed, when it expires, when the server replied, and
/// when enough requests in flight expire for another claim. Without a free slot, the first four are null.
pub(super) type ClaimRow = (
    Option<i64>,
    Option<i16>,
    Option<Timestamp>,
    Option<Timestamp>,
    Timestamp,
    Option<Timestamp>,
);

/// A claim. It returns one value, because the row of a table costs the server more.
pub(super) type ClaimSlot<'a> =
    diesel::dsl::select<admit_service_request<&'a str, i32, PgInterval, &'a str>>;

/// A completion, which returns whether it ended the request.
pub(super) type Complete = diesel::dsl::select<complete_service_request<i64>>;

/// A renewal, which returns when the request expires, or null if it has ended.
pub(super) type Renew = diesel::dsl::select<renew_service_request<i64, PgInterval>>;

pub(super) const CLAIM_NEEDS: &Needs = &[
    ("admit_service_request", "EXECUTE"),
    ("service_request", "SELECT, INSERT, UPDATE"),
];

pub(super) fn claim<'a>(request: &'a Request<'_>) -> ClaimSlot<'a> {
    diesel::select(admit_service_request(
        request.service.as_str(),
        request.slots,
        request.timeout,
        request.details,
    ))
}

pub(super) const COMPLETE_NEEDS: &Needs = &[
    ("complete_service_request", "EXECUTE"),
    ("service_request", "SELECT, UPDATE"),
];

pub(super) fn complete(id: i64) -> Complete {
    diesel::select(complete_service_request(id))
}

pub(super) const RENEW_NEEDS: &Needs = &[
    ("renew_service_request", "EXECUTE"),
    ("service_request", "SELECT, UPDATE"),
];

pub(super) fn renew(id: i64, timeout: PgInterval) -> Renew {
    diesel::select(renew_service_request(id, timeout))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use diesel::pg::Pg;

    use super::*;
    use crate::semaphore::Semaphore;
    use crate::text::Name;

    #[test]
    fn a_claim_is_one_call() {
        let semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30)).details("web-3");
        let request = semaphore.checked(Name::anywhere).unwrap();
        assert_eq!(
            diesel::debug_query::<Pg, _>(&claim(&request)).to_string(),
            "SELECT resource_control.admit_service_request($1, $2, $3, $4) \
             -- binds: [\"geocoder\", 4, PgInterval { microseconds: 30000000, \
             days: 0, months: 0 }, \"web-3\"]"
        );
    }

    #[test]
    fn completion_and_renewal_are_one_call_each() {
        assert_eq!(
            diesel::debug_query::<Pg, _>(&complete(7)).to_string(),
            "SELECT resource_control.complete_service_request($1) -- binds: [7]"
        );
        let renewal = renew(7, PgInterval::from_microseconds(1));
        assert_eq!(
            diesel::debug_query::<Pg, _>(&renewal).to_string(),
            "SELECT resource_control.renew_service_request($1, $2) -- binds: [7, PgInterval { \
             microseconds: 1, days: 0, months: 0 }]"
        );
    }
}
