//! What should never happen, for the tests: `CHAOS=true`.

use std::time::Duration;

use diesel_async::SimpleAsyncConnection;
use diesel_interlock::asynchronous::Semaphore;

use super::App;
use super::reports::NIGHTLY;
use crate::error::AppError;

/// Panics with a lock, a slot and an open transaction.
pub async fn panic(app: &App) -> Result<(), AppError> {
    static CHAOS: Semaphore = Semaphore::named("chaos", 1000, Duration::from_secs(60));

    let _permit = CHAOS.try_acquire(&app.pool).await?;
    let mut guard = NIGHTLY.acquire(&app.pool).await?;
    guard.conn().batch_execute("BEGIN").await?;
    // Without the message of `panic!`, which would read like a failure of the tests.
    std::panic::resume_unwind(Box::new("as it was asked for"))
}
