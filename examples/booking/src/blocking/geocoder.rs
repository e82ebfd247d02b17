//! Calls to the geocoder.

use diesel_interlock::Admission;

use super::App;
use crate::error::AppError;
use crate::geocoder::{Located, Question};

/// Asks the service, if it can take one more call.
///
/// The call is made to its end, or to that of its permit, also if the client hangs up: the service
/// does not notice that nobody waits any more, so neither may the permit.
pub fn locate(app: &App, question: Question) -> Result<Located, AppError> {
    let question = question.checked()?;
    let permit = match app.geocoder.semaphore.try_acquire(&app.pool)? {
        Admission::Admitted(permit) => permit,
        Admission::Full(full) => return Err(AppError::Full(full)),
    };
    let located = app.geocoder.ask(question, permit.remaining());
    if let Err(AppError::BackendTimedOut) = located {
        // The service may still work on the call, so the slot stays taken until its timeout.
        let _nobodys = permit.into_claim();
        return Err(AppError::BackendTimedOut);
    }
    permit.release()?;
    located
}
