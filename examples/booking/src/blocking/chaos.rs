//! What should never happen, for the tests: `CHAOS=true`.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel_interlock::Semaphore;

use super::App;
use super::reports::NIGHTLY;
use crate::error::AppError;

/// Panics with a lock, a slot and an open transaction.
pub fn panic(app: &App) -> Result<(), AppError> {
    static CHAOS: Semaphore = Semaphore::named("chaos", 1000, Duration::from_secs(60));

    let _permit = CHAOS.try_acquire(&app.pool)?;
    let mut guard = NIGHTLY.acquire(&app.pool)?;
    guard.conn().batch_execute("BEGIN")?;
    // Without the message of `panic!`, which would read like a failure of the tests.
    std::panic::resume_unwind(Box::new("as it was asked for"))
}
