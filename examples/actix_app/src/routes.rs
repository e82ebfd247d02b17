//! The routes. Each handler takes its request apart and hands the work to a thread that may block.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::{Next, from_fn};
use actix_web::rt::time::timeout;
use actix_web::web::{
    self, Data, Form, FormConfig, Html, Json, JsonConfig, Query, QueryConfig, Redirect,
    ServiceConfig,
};
use actix_web::{Error, HttpRequest, HttpResponse, get, post};
use booking::blocking::{App, cache, chaos, geocoder, quotas, reports, reservations, status};
use booking::burst::{self, Burst, Response};
use booking::geocoder::{Located, Question};
use booking::quotas::{self as limits, Left};
use booking::reservations::NewReservation;
use booking::status::Status;
use booking::{AppError, pages};
use diesel_interlock::Attempt;
use tracing::Instrument;

use crate::blocking::block;
use crate::failure::Failure;
use crate::limit::{client, limit};

/// Adds the routes.
pub fn configure(service: &mut ServiceConfig, chaos: bool) {
    service
        .app_data(JsonConfig::default().error_handler(|error, _| Failure::from(error).into()))
        .app_data(FormConfig::default().error_handler(|error, _| Failure::from(error).into()))
        .app_data(QueryConfig::default().error_handler(|error, _| Failure::from(error).into()))
        .service(root)
        .service(show_status)
        .service(send_burst)
        .service(show_locks)
        .service(show_limit)
        .service(show_limits)
        .service(change_limit)
        .service(reserve)
        .service(write_report)
        .service(rebuild_cache)
        .service(geocode)
        .default_service(web::to(nothing_here));
    if chaos {
        service.route("/chaos/panic", web::post().to(panic));
    }
}

/// Tells of each request, and drops what takes too long, which cancels its work.
pub async fn each_request(
    app: Data<App>,
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let _waited_for = app.in_progress();
    let span = tracing::info_span!("request", method = %request.method(), uri = %request.uri());
    let limit = app.config.request_timeout;
    let returned = timeout(limit, next.call(request))
        .instrument(span.clone())
        .await;
    let response = returned.unwrap_or_else(|_| {
        let message = "the request timed out".to_owned();
        Err(Failure::from(AppError::Rejected(504, message)).into())
    });
    let status = match &response {
        Ok(response) => response.status(),
        Err(error) => error.as_response_error().status_code(),
    };
    span.in_scope(|| tracing::info!(status = status.as_u16(), "responded"));
    response
}

/// A handler with a guard. The guard stays on the blocking thread, so a client that hangs up drops the
/// response and not the guard.
#[post("/reports/nightly")]
async fn write_report(app: Data<App>) -> Result<HttpResponse, Failure> {
    let report = block(App::clone(&app), |app, stop| {
        let Attempt::Acquired(mut guard) = reports::NIGHTLY.try_acquire(&app.pool)? else {
            return Err(reports::already_running(app));
        };
        let report = reports::write(app, &mut guard, stop)?;
        guard.release()?; // an error if the lock was lost on the way
        Ok(report)
    })
    .await?;
    Ok(HttpResponse::Created().json(report))
}

#[post("/reservations", wrap = "from_fn(limit)")]
async fn reserve(app: Data<App>, wanted: Json<NewReservation>) -> Result<HttpResponse, Failure> {
    let reservation = block(App::clone(&app), move |app, _| {
        reservations::reserve(app, &wanted)
    })
    .await?;
    Ok(HttpResponse::Created().json(reservation))
}

#[post("/cache/rebuild")]
async fn rebuild_cache(app: Data<App>) -> Result<HttpResponse, Failure> {
    let rebuild = block(App::clone(&app), |app, _| cache::rebuild(app)).await?;
    Ok(HttpResponse::Accepted().json(rebuild))
}

#[get("/geocode", wrap = "from_fn(limit)")]
async fn geocode(app: Data<App>, question: Query<Question>) -> Result<Json<Located>, Failure> {
    let question = question.into_inner();
    let located = block(App::clone(&app), |app, _| geocoder::locate(app, question)).await?;
    Ok(Json(located))
}

#[get("/")]
async fn root() -> Html {
    Html::new(pages::ROOT)
}

#[get("/status")]
async fn show_status(app: Data<App>) -> Result<Json<Status>, Failure> {
    let status = block(App::clone(&app), |app, _| status::status(app)).await?;
    Ok(Json(status))
}

#[post("/burst")]
async fn send_burst(app: Data<App>, burst: Json<Burst>) -> Result<Json<Vec<Response>>, Failure> {
    let responses = block(App::clone(&app), move |app, _| burst::send(app, &burst)).await?;
    Ok(Json(responses))
}

#[get("/admin/locks")]
async fn show_locks(app: Data<App>) -> Result<Html, Failure> {
    let page = block(App::clone(&app), |app, _| {
        pages::locks(status::status(app)?)
    })
    .await?;
    Ok(Html::new(page))
}

#[get("/limit")]
async fn show_limit(app: Data<App>, request: HttpRequest) -> Result<Json<Left>, Failure> {
    let client = client(&request)?;
    let left = block(App::clone(&app), move |app, _| quotas::left(app, &client)).await?;
    Ok(Json(left))
}

#[get("/admin/limits")]
async fn show_limits(app: Data<App>) -> Result<Html, Failure> {
    let page = block(App::clone(&app), |app, _| {
        pages::limits(quotas::quotas(app)?)
    })
    .await?;
    Ok(Html::new(page))
}

#[post("/admin/limits")]
async fn change_limit(app: Data<App>, form: Form<limits::Form>) -> Result<Redirect, Failure> {
    block(App::clone(&app), move |app, _| quotas::change(app, &form)).await?;
    Ok(Redirect::to("/admin/limits").see_other())
}

async fn nothing_here() -> Result<HttpResponse, Failure> {
    Err(AppError::NotFound.into())
}

async fn panic(app: Data<App>) -> Result<HttpResponse, Failure> {
    block(App::clone(&app), |app, _| chaos::panic(app)).await?;
    Ok(HttpResponse::NoContent().finish())
}
