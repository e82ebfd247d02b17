//! The routes. A handler is dropped where it waits if its client hangs up or its request times out.

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::response::{Html, Redirect};
use axum::routing::{get, post};
use axum::{Json, Router};
use booking::asynchronous::{
    App, cache, chaos, geocoder, joined, quotas, reports, reservations, status,
};
use booking::axum::{Body, ClientOf, Form, Query, client, limit};
use booking::burst::{self, Burst, Response};
use booking::cache::Rebuild;
use booking::geocoder::{Located, Question};
use booking::quotas::{self as limits, Left};
use booking::reports::Report;
use booking::reservations::{NewReservation, Reservation};
use booking::status::Status;
use booking::{AppError, pages};
use diesel_interlock::Attempt;

/// The routes of the application.
pub fn router(app: App) -> Router {
    let limit = from_fn_with_state((app.clone(), client as ClientOf), limit);
    let limited = Router::new()
        .route("/reservations", post(reserve))
        .route("/geocode", get(geocode))
        .route_layer(limit);
    let mut router = limited
        .route("/", get(root))
        .route("/status", get(show_status))
        .route("/burst", post(burst))
        .route("/limit", get(show_limit))
        .route("/admin/locks", get(show_locks))
        .route("/admin/limits", get(show_limits).post(change_limit))
        .route("/reports/nightly", post(write_report))
        .route("/cache/rebuild", post(rebuild_cache));
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

async fn show_limit(State(app): State<App>, request: Request) -> Result<Json<Left>, AppError> {
    let client = client(&request)?;
    Ok(Json(quotas::left(&app, &client).await?))
}

async fn show_limits(State(app): State<App>) -> Result<Html<String>, AppError> {
    let page = pages::limits(quotas::quotas(&app).await?)?;
    Ok(Html(page))
}

async fn change_limit(
    State(app): State<App>,
    Form(form): Form<limits::Form>,
) -> Result<Redirect, AppError> {
    quotas::change(&app, &form).await?;
    Ok(Redirect::to("/admin/limits"))
}

async fn panic(State(app): State<App>) -> Result<(), AppError> {
    chaos::panic(&app).await
}
