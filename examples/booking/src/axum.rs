//! What the two applications on axum share: what surrounds their routes, responses, and the server.

mod limit;

use std::any::Any;
use std::future::IntoFuture;
use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::rejection::{FormRejection, JsonRejection, QueryRejection};
use axum::extract::{FromRequest, FromRequestParts};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use tokio::net::TcpListener;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::{DefaultMakeSpan, DefaultOnResponse, TraceLayer};
use tracing::Level;

use crate::app::App;
use crate::config::Config;
use crate::error::AppError;
use crate::startup;

pub use self::limit::{ClientOf, client, limit};

/// How long clients may take to let go of their connections when the application is to end.
const GRACE: Duration = Duration::from_secs(10);

/// Serves the routes until Ctrl-C or SIGTERM, and waits for the end of all work.
pub async fn serve<P>(listener: TcpListener, app: App<P>, routes: Router) -> anyhow::Result<()> {
    let ended = startup::end_asked_for()?;
    tokio::spawn({
        let stop = app.stop.clone();
        async move {
            ended.await;
            stop.cancel();
        }
    });

    startup::announce(&app);
    let routes = surrounded(routes, &app.config);
    // The limit of a client without a key is that of its address.
    let routes = routes.into_make_service_with_connect_info::<SocketAddr>();
    let server = axum::serve(listener, routes)
        .with_graceful_shutdown(app.stop.clone().cancelled_owned())
        .into_future();
    tokio::select! {
        served = server => served?,
        () = after(GRACE, &app) => tracing::warn!("some clients did not let go"),
    }
    app.finish().await;
    tracing::info!("ended");
    Ok(())
}

async fn after<P>(grace: Duration, app: &App<P>) {
    app.stop.cancelled().await;
    tokio::time::sleep(grace).await;
}

/// Each route, with what is common to all.
fn surrounded(routes: Router, config: &Config) -> Router {
    routes
        .fallback(async || AppError::NotFound)
        .layer(CatchPanicLayer::custom(panicked))
        .layer(time_limit(config.request_timeout))
        .layer(
            TraceLayer::new_for_http()
                .make_span_with(DefaultMakeSpan::new().level(Level::INFO))
                .on_response(DefaultOnResponse::new().level(Level::INFO))
                .on_failure(()), // a refusal with Retry-After is none, and AppError tells of the others
        )
}

/// Drops what takes longer, which cancels its work.
fn time_limit(limit: Duration) -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, limit)
}

/// The response of a handler that panicked.
fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let message = panic.downcast_ref::<&str>().copied().map(str::to_owned);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned());
    AppError::Panicked(message.unwrap_or_default()).into_response()
}

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        let refusal = self.refusal();
        let status =
            StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(refusal.body)).into_response();
        for (name, value) in refusal.fields {
            append(&mut response, name, &value);
        }
        response
    }
}

/// Adds a header field, beside others of its name. The library's are ASCII, so each of them is a value.
fn append(response: &mut Response, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        response.headers_mut().append(name, value);
    }
}

/// A body, or an [`AppError`] that says what is wrong with it.
#[derive(Debug, FromRequest)]
#[from_request(via(Json), rejection(AppError))]
pub struct Body<T>(pub T);

/// A query string, or an [`AppError`] that says what is wrong with it.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(AppError))]
pub struct Query<T>(pub T);

/// The body of a form, or an [`AppError`] that says what is wrong with it.
#[derive(Debug, FromRequest)]
#[from_request(via(axum::Form), rejection(AppError))]
pub struct Form<T>(pub T);

/// A body that is not what the handler takes.
impl From<JsonRejection> for AppError {
    fn from(rejection: JsonRejection) -> Self {
        Self::Rejected(rejection.status().as_u16(), rejection.body_text())
    }
}

/// A form that is not what the handler takes.
impl From<FormRejection> for AppError {
    fn from(rejection: FormRejection) -> Self {
        Self::Rejected(rejection.status().as_u16(), rejection.body_text())
    }
}

/// A query string that is not what the handler takes.
impl From<QueryRejection> for AppError {
    fn from(rejection: QueryRejection) -> Self {
        Self::Rejected(rejection.status().as_u16(), rejection.body_text())
    }
}
