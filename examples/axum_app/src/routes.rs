//! The routes. Each handler takes its request apart and hands the work to a thread that may block.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Html;
use axum::routing::{get, post};
use axum::{Json, Router};
use booking::axum::{Body, Query};
use booking::blocking::{App, cache, chaos, geocoder, reports, reservations, status};
use booking::burst::{self, Burst, Response};
use booking::cache::Rebuild;
use booking::geocoder::{Located, Question};
use booking::reports::Report;
use booking::reservations::{NewReservation, Reservation};
use booking::status::Status;
use booking::{AppError, pages};
use diesel_interlock::Attempt;

use crate::blocking::block;

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

/// A handler with a guard. The guard stays on the blocking thread, so a client that hangs up drops the
/// response and not the guard.
async fn write_report(State(app): State<App>) -> Result<(StatusCode, Json<Report>), AppError> {
    let report = block(app, |app, stop| {
        let Attempt::Acquired(mut guard) = reports::NIGHTLY.try_acquire(&app.pool)? else {
            return Err(reports::already_running(app));
        };
        let report = reports::write(app, &mut guard, stop)?;
        guard.release()?; // an error if the lock was lost on the way
        Ok(report)
    })
    .await?;
    Ok((StatusCode::CREATED, Json(report)))
}

async fn reserve(
    State(app): State<App>,
    Body(wanted): Body<NewReservation>,
) -> Result<(StatusCode, Json<Reservation>), AppError> {
    let reservation = block(app, move |app, _| reservations::reserve(app, &wanted)).await?;
    Ok((StatusCode::CREATED, Json(reservation)))
}

async fn rebuild_cache(State(app): State<App>) -> Result<(StatusCode, Json<Rebuild>), AppError> {
    let rebuild = block(app, |app, _| cache::rebuild(app)).await?;
    Ok((StatusCode::ACCEPTED, Json(rebuild)))
}

async fn geocode(
    State(app): State<App>,
    Query(question): Query<Question>,
) -> Result<Json<Located>, AppError> {
    let located = block(app, |app, _| geocoder::locate(app, question)).await?;
    Ok(Json(located))
}

async fn root() -> Html<&'static str> {
    Html(pages::ROOT)
}

async fn show_status(State(app): State<App>) -> Result<Json<Status>, AppError> {
    let status = block(app, |app, _| status::status(app)).await?;
    Ok(Json(status))
}

async fn burst(
    State(app): State<App>,
    Body(burst): Body<Burst>,
) -> Result<Json<Vec<Response>>, AppError> {
    let responses = block(app, move |app, _| burst::send(app, &burst)).await?;
    Ok(Json(responses))
}

async fn show_locks(State(app): State<App>) -> Result<Html<String>, AppError> {
    let page = block(app, |app, _| pages::locks(status::status(app)?)).await?;
    Ok(Html(page))
}

async fn panic(State(app): State<App>) -> Result<(), AppError> {
    block(app, |app, _| chaos::panic(app)).await
}
