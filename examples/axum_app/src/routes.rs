//! The routes. Each handler takes its request apart and hands the work to a thread that may block.

use std::time::Duration;

use axum::extract::{FromRequest, FromRequestParts, State};
use axum::http::StatusCode;
use axum::response::Html;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::{DefaultMakeSpan, DefaultOnResponse, TraceLayer};
use tracing::Level;

use crate::app::App;
use crate::error::AppError;
use crate::reports::Report;
use crate::reservations::NewReservation;
use crate::{admin, cache, chaos, reports, reservations};

/// The whole application as a service.
pub fn router(app: App) -> Router {
    let mut router = Router::new()
        .route("/reservations", post(reserve))
        .route("/reports/nightly", post(write_report))
        .route("/cache/rebuild", post(rebuild_cache))
        .route("/geocode", get(geocode))
        .route("/admin/locks", get(locks));
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

/// A body, or an [`AppError`] that says what is wrong with it.
#[derive(FromRequest)]
#[from_request(via(Json), rejection(AppError))]
struct Body<T>(T);

/// A query string, or an [`AppError`] that says what is wrong with it.
#[derive(FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(AppError))]
struct Query<T>(T);

async fn reserve(
    State(app): State<App>,
    Body(wanted): Body<NewReservation>,
) -> Result<(StatusCode, Json<Value>), AppError> {
    let id = app
        .block(move |app, _| reservations::reserve(app, &wanted))
        .await?;
    Ok((StatusCode::CREATED, Json(json!({ "id": id }))))
}

async fn write_report(State(app): State<App>) -> Result<(StatusCode, Json<Report>), AppError> {
    let report = app.block(reports::write).await?;
    Ok((StatusCode::CREATED, Json(report)))
}

async fn rebuild_cache(State(app): State<App>) -> Result<(StatusCode, Json<Value>), AppError> {
    let grant = app.block(|app, _| cache::rebuild(app)).await?;
    Ok((
        StatusCode::ACCEPTED,
        Json(json!({ "due_again": grant.until })),
    ))
}

#[derive(Debug, Deserialize)]
struct Question {
    q: String,
}

async fn geocode(
    State(app): State<App>,
    Query(Question { q }): Query<Question>,
) -> Result<Json<Value>, AppError> {
    if q.trim().is_empty() || q.len() > 200 {
        return Err(AppError::Invalid("q must have 1 to 200 bytes".to_owned()));
    }
    let question = q.clone();
    let place = app
        .block(move |app, _| app.geocoder.locate(app, &question))
        .await?;
    Ok(Json(json!({ "q": q, "place": place })))
}

async fn locks(State(app): State<App>) -> Result<Html<String>, AppError> {
    app.block(|app, _| admin::page(app)).await.map(Html)
}

async fn panic(State(app): State<App>) -> Result<(), AppError> {
    app.block(|app, _| chaos::panic(app)).await
}
