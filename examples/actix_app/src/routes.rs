//! The routes. Each handler takes its request apart and hands the work to a thread that may block.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::middleware::Next;
use actix_web::rt::time::timeout;
use actix_web::web::{self, Data, Html, Json, JsonConfig, Query, QueryConfig, ServiceConfig};
use actix_web::{Error, HttpResponse, get, post};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument;

use crate::app::App;
use crate::error::AppError;
use crate::reservations::NewReservation;
use crate::{admin, cache, chaos, reports, reservations};

/// Adds the routes.
pub fn configure(service: &mut ServiceConfig, chaos: bool) {
    service
        .app_data(JsonConfig::default().error_handler(|error, _| AppError::from(error).into()))
        .app_data(QueryConfig::default().error_handler(|error, _| AppError::from(error).into()))
        .service(reserve)
        .service(write_report)
        .service(rebuild_cache)
        .service(geocode)
        .service(locks);
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
    let answered = timeout(limit, next.call(request))
        .instrument(span.clone())
        .await;
    let response = answered.unwrap_or_else(|_| {
        let message = "it took too long".to_owned();
        Err(AppError::Rejected(StatusCode::GATEWAY_TIMEOUT, message).into())
    });
    let status = match &response {
        Ok(response) => response.status(),
        Err(error) => error.as_response_error().status_code(),
    };
    span.in_scope(|| tracing::info!(status = status.as_u16(), "answered"));
    response
}

#[post("/reservations")]
async fn reserve(app: Data<App>, wanted: Json<NewReservation>) -> Result<HttpResponse, AppError> {
    let id = app
        .block(move |app, _| reservations::reserve(app, &wanted))
        .await?;
    Ok(HttpResponse::Created().json(json!({ "id": id })))
}

#[post("/reports/nightly")]
async fn write_report(app: Data<App>) -> Result<HttpResponse, AppError> {
    let report = app.block(reports::write).await?;
    Ok(HttpResponse::Created().json(report))
}

#[post("/cache/rebuild")]
async fn rebuild_cache(app: Data<App>) -> Result<HttpResponse, AppError> {
    let grant = app.block(|app, _| cache::rebuild(app)).await?;
    Ok(HttpResponse::Accepted().json(json!({ "due_again": grant.until })))
}

#[derive(Debug, Deserialize)]
struct Question {
    q: String,
}

#[get("/geocode")]
async fn geocode(app: Data<App>, question: Query<Question>) -> Result<Json<Value>, AppError> {
    let q = question.into_inner().q;
    if q.trim().is_empty() || q.len() > 200 {
        return Err(AppError::Invalid("q must have 1 to 200 bytes".to_owned()));
    }
    let question = q.clone();
    let place = app
        .block(move |app, _| app.geocoder.locate(app, &question))
        .await?;
    Ok(Json(json!({ "q": q, "place": place })))
}

#[get("/admin/locks")]
async fn locks(app: Data<App>) -> Result<Html, AppError> {
    app.block(|app, _| admin::page(app)).await.map(Html::new)
}

async fn panic(app: Data<App>) -> Result<HttpResponse, AppError> {
    app.block(|app, _| chaos::panic(app)).await?;
    Ok(HttpResponse::NoContent().finish())
}
