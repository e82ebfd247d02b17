//! Calls to the geocoder.

use std::sync::Arc;

use diesel_interlock::Admission;
use diesel_interlock::asynchronous::{Permit, Semaphore};
use tokio::task::spawn_blocking;

use super::{App, PgPool, joined};
use crate::error::AppError;
use crate::geocoder::{Geocoder, Located, Question};

/// Asks the service, if it can take one more call. No connection is held while the call is made.
///
/// A client that hangs up drops this future, but the service does not notice that nobody waits any more.
/// So the call is a task of its own, which has the permit, and is made to its end or to that of the permit.
pub async fn locate(app: &App, question: Question) -> Result<Located, AppError> {
    let question = question.checked()?;
    let semaphore = Semaphore::from(app.geocoder.semaphore.clone());
    let permit = match semaphore.try_acquire(&app.pool).await? {
        Admission::Admitted(permit) => permit,
        Admission::Full(full) => return Err(AppError::Full(full)),
    };
    joined(
        app.spawn(call(app.geocoder.clone(), question, permit))
            .await,
    )
}

async fn call(
    geocoder: Arc<Geocoder>,
    question: String,
    permit: Permit<PgPool>,
) -> Result<Located, AppError> {
    let at_most = permit.remaining();
    // The HTTP client is that of the blocking applications, so the call has a thread that may block.
    let located = joined(spawn_blocking(move || geocoder.ask(question, at_most)).await);
    if let Err(AppError::BackendTimedOut) = located {
        // The service may still work on the call, so the slot stays taken until its timeout.
        let _nobodys = permit.into_claim();
        return Err(AppError::BackendTimedOut);
    }
    permit.release().await?;
    located
}
