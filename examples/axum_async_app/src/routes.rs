//! The routes. A handler is dropped where it waits if its client hangs up or its request times out.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Html;
use axum::routing::{get, post};
use axum::{Json, Router};
use booking::asynchronous::{App, cache, chaos, geocoder, joined, reports, reservations, status};
use booking::axum::{Body, Query};
use booking::burst::{self, Burst, Response};
use booking::cache::Rebuild;
use booking::geocoder::{Located, Question};
use booking::reports::Report;
use booking::reservations::{NewReservation, Reservation};
use booking::status::Status;
use booking::{AppError, pages};
use diesel_interlock::Attempt;

/// The routes of the application.
pub fn router(app: App) -> Router {
    let mut router = Router::new()
        .route("/", get(root))
        .route("/status", get(show_status))
        .route("/burst", post(burst))
        .route("/admin/locks", get(show_locks))
        .route("/reservations", post(reserve))
        .route("/reports/nightly", post(write_report))
        .route("/cache/rebuild", post(rebuild_cache))
        .route("/geocode", get(geocode));
    if app.config.chaos {
        router = router.route("/chaos/panic", post(panic));
    }
    router.with_state(app)
}

/// A handler with a guard. If it is dropped, a task releases the lock.
async fn write_report(State(app): State<App>) -> Result<(StatusCode, Json<Report>), AppError> {
    let Attempt::Acquired(mut guard) = reports::NIGHTLY.try_acquire(&app.pool).await? else {
        return Err(reports::already_running(&app).await);
    };
    let report = reports::write(&app, &mut guard).await?;
    guard.release().await?; // an error if the lock was lost on the way
    Ok((StatusCode::CREATED, Json(report)))
}

async fn reserve(
    State(app): State<App>,
    Body(wanted): Body<NewReservation>,
) -> Result<(StatusCode, Json<Reservation>), AppError> {
    let reservation = reservations::reserve(&app, &wanted).await?;
    Ok((StatusCode::CREATED, Json(reservation)))
}

async fn rebuild_cache(State(app): State<App>) -> Result<(StatusCode, Json<Rebuild>), AppError> {
    let rebuild = cache::rebuild(&app).await?;
    Ok((StatusCode::ACCEPTED, Json(rebuild)))
}

async fn geocode(
    State(app): State<App>,
    Query(question): Query<Question>,
) -> Result<Json<Located>, AppError> {
    let located = geocoder::locate(&app, question).await?;
    Ok(Json(located))
}

async fn root() -> Html<&'static str> {
    Html(pages::ROOT)
}

async fn show_status(State(app): State<App>) -> Result<Json<Status>, AppError> {
    Ok(Json(status::status(&app).await?))
}

async fn burst(
    State(app): State<App>,
    Body(burst): Body<Burst>,
) -> Result<Json<Vec<Response>>, AppError> {
    let sender = app.clone();
    let responses = app.spawn_blocking(move || burst::send(&sender, &burst));
    Ok(Json(joined(responses.await)?))
}

async fn show_locks(State(app): State<App>) -> Result<Html<String>, AppError> {
    let page = pages::locks(status::status(&app).await?)?;
    Ok(Html(page))
}

async fn panic(State(app): State<App>) -> Result<(), AppError> {
    chaos::panic(&app).await
}
