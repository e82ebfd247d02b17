//! The statements of a semaphore, which call stored functions.
//!
//! **An advisory lock around a key's first attempt, and around each slot that is claimed.** A row
//! that does not exist yet cannot be locked, and `INSERT … ON CONFLICT` waits for the other
//! transaction. For slots the lock also keeps the ids in order: if an id were drawn before the slot
//! is held, it could be committed after a larger one.
//!
//! **A claim begins at a random slot and tries the slots that follow.** Listing all slots and
//! sorting them by `random()` was a sixth of the server's work for a claim and its release with 64
//! slots, and three quarters of that work with 1,000. Only if three quarters of the slots are
//! taken, a query lists the free ones.
//!
//! **A semaphore keeps its log.** One row per slot would be faster and would not grow. But the log
//! says who used the service, and other clients write it, too.

use std::time::Duration;

use diesel::data_types::PgInterval;
use diesel::sql_types::{BigInt, Bool, Integer, Interval, Nullable};

use crate::call::BATCH;
use crate::input::interval;
use crate::lease::Row;
use crate::statement::{Statement, database};

/// The id of the request, or when to try again; and the database.
pub(super) type Claimed = (Option<i64>, Option<PgInterval>, i32);

pub(super) fn claim(
    service: &str,
    slots: i32,
    timeout: Duration,
    details: &str,
    claim: i64,
) -> Statement<(Nullable<BigInt>, Nullable<Interval>, Integer)> {
    Statement::new(
        concat!(
            "SELECT id, retry_after, ",
            database!(),
            " AS database FROM resource_control.claim_service_request($1, $2, $3, $4, $5)"
        ),
        [
            service.into(),
            slots.into(),
            interval(timeout).into(),
            details.into(),
            claim.into(),
        ],
    )
}

/// Completes a request, and returns whether it was in flight. The commit does not wait for the
/// disk: if a crash of the server loses it, the slot is free after the timeout anyway.
pub(super) fn complete(row: &Row) -> Statement<Bool> {
    Statement::new(
        "SELECT resource_control.complete_service_request($1, $2, true, $3)",
        [(&*row.name).into(), row.token.into(), row.claim.into()],
    )
}

/// Completes a request of another process. This process does not know the number of the claim.
pub(super) fn complete_of_another(service: &str, id: i64) -> Statement<Bool> {
    Statement::new(
        "SELECT resource_control.complete_service_request($1, $2, true)",
        [service.into(), id.into()],
    )
}

/// Renews a request, and returns whether it was in flight.
pub(super) fn renew(row: &Row, timeout: Duration) -> Statement<Bool> {
    Statement::new(
        "SELECT resource_control.renew_service_request($1, $2, $3, $4)",
        [
            (&*row.name).into(),
            row.token.into(),
            interval(timeout).into(),
            row.claim.into(),
        ],
    )
}

/// Renews a request of another process. This process does not know the number of the claim.
pub(super) fn renew_of_another(service: &str, id: i64, timeout: Duration) -> Statement<Bool> {
    Statement::new(
        "SELECT resource_control.renew_service_request($1, $2, $3)",
        [service.into(), id.into(), interval(timeout).into()],
    )
}

/// Deletes a batch of old requests, and returns how many.
pub(crate) fn prune(older_than: Duration) -> Statement<BigInt> {
    Statement::new(
        "SELECT resource_control.prune_service_requests($1, $2::integer)::bigint",
        [interval(older_than).into(), BATCH.into()],
    )
}
