//! What a semaphore sends, on a blocking or an asynchronous session.

use chrono::{DateTime, Utc};
use diesel::data_types::PgInterval;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};

use super::admission::Claimed;
use super::rules;
use super::sql;
use super::{Admission, Claim, Semaphore};
use crate::error::{Error, Misplaced, Result, Schema};
use crate::events::{self, Outcome, Subject};
use crate::installed::{self, Needs};
use crate::session::{
    Session, is_serialization_failure, one_at_read_committed, probe_at_read_committed,
};
use crate::time::Timestamp;
use crate::transaction;

/// Records what a claim returned.
pub(super) fn observed<T: Claimed>(
    semaphore: &Semaphore,
    claim: impl Future<Output = Result<T>>,
) -> impl Future<Output = Result<T>> {
    let subject = |id| Subject::Semaphore {
        service: &semaphore.service,
        id,
    };
    let outcome = |result: &T| match result.claimed() {
        Ok(_) => Outcome::Acquired,
        Err(full) => Outcome::Full {
            retry_after: full.retry_after,
        },
    };
    let admitted = move |result: &Result<T>| {
        let claim = result.as_ref().ok().and_then(|it| it.claimed().ok());
        subject(claim.map(|claim| claim.id))
    };
    events::observe_more("acquire", subject(None), claim, outcome, admitted)
}

/// Claims a slot in one round trip, unless a transaction is open, which would hide the claim from other instances until
/// it commits. A test transaction counts as none.
pub(super) async fn claim<S: Session>(
    session: &mut S,
    semaphore: &Semaphore,
) -> Result<Admission<Claim>> {
    let request = semaphore.checked(|service| session.name(service))?;
    transaction::refuse_open(session.transaction(), Misplaced::ClaimInTransaction)?;
    let (reply, in_transaction) = probe_at_read_committed(session, sql::claim(&request)).await;
    let admission = match reply {
        Ok(row) => rules::admission(row, semaphore),
        Err(error) => return Err(explain(session, error, sql::CLAIM_NEEDS).await),
    };
    if in_transaction {
        return Err(undo(session, admission).await);
    }
    Ok(admission)
}

/// Undoes what was claimed in a transaction that Diesel does not know of, and returns why.
async fn undo<S: Session>(session: &mut S, admission: Admission<Claim>) -> Error {
    if session.is_pooled() {
        // An earlier user left the transaction open. The connection is marked, so the pool discards it, and the server
        // rolls the claim back.
        return Error::TransactionInPool;
    }
    // The caller's transaction goes on, so the claim is completed in it.
    session.clear_mark();
    if let Admission::Admitted(claim) = admission {
        if let Err(error) = complete(session, claim.id).await {
            return error;
        }
    }
    Misplaced::ClaimInTransaction.into()
}

/// Ends a request in one round trip. Returns whether this call ended it.
pub(super) async fn complete<S: Session>(session: &mut S, id: i64) -> Result<bool> {
    match one_at_read_committed(session, sql::complete(id)).await {
        Ok(completed) => Ok(completed),
        Err(error) => Err(explain(session, error, sql::COMPLETE_NEEDS).await),
    }
}

/// Extends a request in one round trip. Returns when it expires, or `None` if it has ended.
pub(super) async fn renew<S: Session>(
    session: &mut S,
    id: i64,
    timeout: PgInterval,
) -> Result<Option<DateTime<Utc>>> {
    let renewed: QueryResult<Option<Timestamp>> =
        one_at_read_committed(session, sql::renew(id, timeout)).await;
    match renewed {
        Ok(expires_at) => Ok(expires_at.map(rules::expiry)),
        Err(error) => Err(explain(session, error, sql::RENEW_NEEDS).await),
    }
}

/// Returns what an error means. Queries the catalogue where that is still possible.
async fn explain<S: Session>(session: &mut S, error: DieselError, needs: &Needs) -> Error {
    if is_serialization_failure(&error) {
        return Error::StrictIsolation;
    }
    if let DieselError::DatabaseError(DatabaseErrorKind::UniqueViolation, information) = &error {
        // Another request has the id that the sequence returned.
        if information.constraint_name() == Some("service_request_pkey") {
            return Schema::SequenceBehind.into();
        }
    }
    installed::explain(session, error, needs, None).await
}
