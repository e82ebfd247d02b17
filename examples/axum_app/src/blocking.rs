//! Work that blocks, in an asynchronous handler.

use booking::AppError;
use booking::blocking::App;
use tokio_util::sync::CancellationToken;

/// Does the work of a request on a thread that may block, because Diesel and the guards do.
///
/// The work runs to its end, so it releases what it holds on every way out: an early `?`, a panic, or a
/// response that nobody waits for any more. Long work polls its token and stops when it is cancelled,
/// because the client hung up, the request timed out, or the application is to end.
pub async fn block<T, F>(app: App, work: F) -> Result<T, AppError>
where
    T: Send + 'static,
    F: FnOnce(&App, &CancellationToken) -> Result<T, AppError> + Send + 'static,
{
    let stop = app.stop.child_token();
    let _cancels_when_dropped = stop.clone().drop_guard();
    let job = app.in_progress();
    let span = tracing::Span::current();
    let result = tokio::task::spawn_blocking(move || {
        let _until_the_end = job;
        span.in_scope(|| work(&app, &stop))
    });
    result
        .await
        .map_err(|panic| AppError::Panicked(panic.to_string()))?
}
