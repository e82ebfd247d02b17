//! The routes. Each handler takes its request apart and hands the work to a thread that may block.

use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, State};
use axum::http::StatusCode;
use axum::response::Html;
use axum::routing::{get, post};
use axum::{Json, Router};
use booking::burst::{self, Burst, Response};
use booking::cache::{self, Rebuild};
use booking::geocoder::{Located, Question};
use booking::reports::{self, Report};
use booking::reservations::{self, NewReservation, Reservation};
use booking::status::{self, Status};
use booking::{App, AppError, chaos, pages};
use diesel_interlock::Attempt;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::{DefaultMakeSpan, DefaultOnResponse, TraceLayer};
use tracing::Level;

use crate::blocking::block;
use crate::failure::Failure;

/// The whole application as a service.
pub fn router(app: App) -> Router {
    let mut router = Router::new()
        .route("/", get(root))
        .route("/status", get(show_status))
        .route("/burst", post(burst))
        .route("/admin/locks", get(show_locks))
        .route("/reservations", post(reserve))
        .route("/reports/nightly", post(write_report))
        .route("/cache/rebuild", post(rebuild_cache))
        .route("/geocode", get(geocode))
        .fallback(nothing_here);
    if app.config.chaos {
        router = router.route("/chaos/panic", post(panic));
    }
    router
        .layer(CatchPanicLayer::new())
        .layer(time_limit(app.config.request_timeout))
        .layer(
            TraceLayer::new_for_http()
                .make_span_with(DefaultMakeSpan::new().level(Level::INFO))
                .on_response(DefaultOnResponse::new().level(Level::INFO))
                .on_failure(()), // a refusal with Retry-After is none, and AppError tells of the others
        )
        .with_state(app)
}

/// Drops what takes longer, which cancels its work.
fn time_limit(limit: Duration) -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, limit)
}

/// A body, or a [`Failure`] that says what is wrong with it.
#[derive(FromRequest)]
#[from_request(via(Json), rejection(Failure))]
struct Body<T>(T);

/// A query string, or a [`Failure`] that says what is wrong with it.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Failure))]
struct Query<T>(T);

/// A handler with a guard. The guard stays on the blocking thread, so a client that hangs up drops the
/// response and not the guard.
async fn write_report(State(app): State<App>) -> Result<(StatusCode, Json<Report>), Failure> {
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
) -> Result<(StatusCode, Json<Reservation>), Failure> {
    let reservation = block(app, move |app, _| reservations::reserve(app, &wanted)).await?;
    Ok((StatusCode::CREATED, Json(reservation)))
}

async fn rebuild_cache(State(app): State<App>) -> Result<(StatusCode, Json<Rebuild>), Failure> {
    let rebuild = block(app, |app, _| cache::rebuild(app)).await?;
    Ok((StatusCode::ACCEPTED, Json(rebuild)))
}

async fn geocode(
    State(app): State<App>,
    Query(question): Query<Question>,
) -> Result<Json<Located>, Failure> {
    let located = block(app, |app, _| app.geocoder.locate(app, question)).await?;
    Ok(Json(located))
}

async fn root() -> Html<&'static str> {
    Html(pages::ROOT)
}

async fn show_status(State(app): State<App>) -> Result<Json<Status>, Failure> {
    let status = block(app, |app, _| status::status(app)).await?;
    Ok(Json(status))
}

async fn burst(
    State(app): State<App>,
    Body(burst): Body<Burst>,
) -> Result<Json<Vec<Response>>, Failure> {
    let responses = block(app, move |app, _| burst::send(app, &burst)).await?;
    Ok(Json(responses))
}

async fn show_locks(State(app): State<App>) -> Result<Html<String>, Failure> {
    let page = block(app, |app, _| pages::locks(app)).await?;
    Ok(Html(page))
}

async fn nothing_here() -> Failure {
    AppError::NotFound.into()
}

async fn panic(State(app): State<App>) -> Result<(), Failure> {
    Ok(block(app, |app, _| chaos::panic(app)).await?)
}
