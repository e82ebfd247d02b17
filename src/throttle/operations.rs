//! What an attempt sends, on a blocking or an asynchronous session.

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::sql::{ATTEMPT_KEY_NEEDS, ATTEMPT_NEEDS, Attempt, Attempted};
use super::{Decision, Throttle, ThrottledResource};
use crate::error::{Error, Misplaced, Result, Schema};
use crate::events::{self, Subject};
use crate::installed::{self, Needs};
use crate::session::{Session, is_serialization_failure, one_at_read_committed};
use crate::transaction;

/// Attempts the throttle in one round trip.
pub(super) async fn attempt<S, R>(session: &mut S, throttle: &Throttle<R>) -> Result<Decision>
where
    S: Session,
    R: ThrottledResource,
{
    observed(throttle, send(session, throttle)).await
}

/// Attempts the throttle where the grant is committed when it is returned.
pub(super) async fn attempt_committed<S, R>(
    session: &mut S,
    throttle: &Throttle<R>,
) -> Result<Decision>
where
    S: Session,
    R: ThrottledResource,
{
    observed(throttle, send_committed(session, throttle)).await
}

/// Records what an attempt returned.
pub(super) async fn observed<R: ThrottledResource>(
    throttle: &Throttle<R>,
    attempt: impl Future<Output = Result<Decision>>,
) -> Result<Decision> {
    let subject = Subject::Throttle {
        resource: throttle.resource.label(),
        key: throttle.key.as_ref().and_then(Option::as_deref),
    };
    events::observe("attempt", subject, attempt, Decision::outcome).await
}

pub(super) async fn send_committed<S, R>(
    session: &mut S,
    throttle: &Throttle<R>,
) -> Result<Decision>
where
    S: Session,
    R: ThrottledResource,
{
    transaction::refuse_open(session.transaction(), Misplaced::GrantInTransaction)?;
    send(session, throttle).await
}

async fn send<S, R>(session: &mut S, throttle: &Throttle<R>) -> Result<Decision>
where
    S: Session,
    R: ThrottledResource,
{
    let checked = throttle.checked_with_details(|key| session.name(key))?;
    let (label, details) = (checked.label, checked.details);
    let key = checked.key.as_ref().map(|key| key.as_str());
    let (reply, needs) = match key {
        None => {
            let attempt = Attempt::<false> {
                label,
                key: "",
                details,
            };
            let reply = one_at_read_committed(session, attempt).await;
            (reply, ATTEMPT_NEEDS)
        }
        Some(key) => {
            let attempt = Attempt::<true> {
                label,
                key,
                details,
            };
            let reply = one_at_read_committed(session, attempt).await;
            (reply, ATTEMPT_KEY_NEEDS)
        }
    };
    match reply {
        Ok(row) => Ok(Attempted::into(row)),
        Err(error) => Err(explain(session, error, needs, label).await),
    }
}

/// Returns what the error of an attempt means. Queries the catalogue where that is still possible.
async fn explain<S: Session>(
    session: &mut S,
    error: DieselError,
    needs: &Needs,
    label: &str,
) -> Error {
    if is_serialization_failure(&error) {
        return Error::StrictIsolation;
    }
    if let DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, information) = &error {
        // Empty details and keys were refused before.
        if information.constraint_name() == Some("diesel_interlock_unknown_resource") {
            let label = label.to_owned();
            return Schema::UnknownResource { label }.into();
        }
    }
    installed::explain(session, error, needs, Some(label)).await
}
