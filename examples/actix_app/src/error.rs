//! What goes wrong or is refused, and how a client is told.

use actix_web::error::{JsonPayloadError, QueryPayloadError};
use actix_web::http::StatusCode;
use actix_web::http::header::RETRY_AFTER;
use actix_web::{HttpResponse, ResponseError};
use diesel_interlock::{Denial, Error, Full};
use serde_json::json;

use crate::reports::Running;

/// Everything that a handler answers instead of a success.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    #[error("{1}")]
    Rejected(StatusCode, String),
    #[error("{0}")]
    Invalid(String),
    #[error("there is no such server")]
    UnknownServer,
    #[error("the server is reserved in that period")]
    Reserved,
    #[error("the nightly report is being written")]
    ReportRunning(Running),
    #[error("it was done a moment ago, or is being done")]
    Throttled(Denial),
    #[error("the service has as many calls in flight as it can take")]
    Full(Full),
    #[error("others are at it for too long: come back in a moment")]
    Busy,
    #[error("it was given up, since nobody waits for it or the application ends")]
    Stopped,
    #[error("the service did not answer")]
    Backend(#[from] ureq::Error),
    #[error("a panic: {0}")]
    Panicked(String),
    #[error("the page could not be written")]
    Page(#[from] askama::Error),
    #[error(transparent)]
    Interlock(#[from] Error),
}

impl AppError {
    /// The status, and the seconds of `Retry-After`.
    fn answer(&self) -> (StatusCode, Option<u64>) {
        match self {
            // The refusals and errors of the library.
            Self::ReportRunning(_) => (StatusCode::CONFLICT, None),
            Self::Throttled(denial) => (
                StatusCode::TOO_MANY_REQUESTS,
                Some(denial.retry_after_secs()),
            ),
            Self::Full(full) => (
                StatusCode::SERVICE_UNAVAILABLE,
                Some(full.retry_after_secs()),
            ),
            Self::Interlock(Error::Pool(_)) => (StatusCode::SERVICE_UNAVAILABLE, Some(1)),
            Self::Interlock(Error::TimedOut { .. }) => (StatusCode::GATEWAY_TIMEOUT, None),
            Self::Interlock(_) => (StatusCode::INTERNAL_SERVER_ERROR, None),
            // Our own.
            Self::Rejected(status, _) => (*status, None),
            Self::Invalid(_) => (StatusCode::UNPROCESSABLE_ENTITY, None),
            Self::UnknownServer => (StatusCode::NOT_FOUND, None),
            Self::Reserved => (StatusCode::CONFLICT, None),
            Self::Busy | Self::Stopped => (StatusCode::SERVICE_UNAVAILABLE, Some(1)),
            Self::Backend(_) => (StatusCode::BAD_GATEWAY, None),
            Self::Panicked(_) | Self::Page(_) => (StatusCode::INTERNAL_SERVER_ERROR, None),
        }
    }
}

impl ResponseError for AppError {
    fn status_code(&self) -> StatusCode {
        self.answer().0
    }

    fn error_response(&self) -> HttpResponse {
        let (status, retry_after) = self.answer();
        let mut body = json!({ "error": self.to_string() });
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(error = self as &dyn std::error::Error);
            body = json!({ "error": "something went wrong here" });
        }
        if let Self::ReportRunning(running) = self {
            body["running"] = json!(running);
        }
        let mut response = HttpResponse::build(status);
        if let Some(seconds) = retry_after {
            response.insert_header((RETRY_AFTER, seconds));
        }
        response.json(body)
    }
}

/// For `?` on Diesel's queries, in transactions and out of them.
impl From<diesel::result::Error> for AppError {
    fn from(error: diesel::result::Error) -> Self {
        Self::Interlock(error.into())
    }
}

/// For `?` on `pool.get()`.
impl From<diesel::r2d2::PoolError> for AppError {
    fn from(error: diesel::r2d2::PoolError) -> Self {
        Self::Interlock(error.into())
    }
}

impl From<JsonPayloadError> for AppError {
    fn from(error: JsonPayloadError) -> Self {
        Self::Rejected(error.status_code(), error.to_string())
    }
}

impl From<QueryPayloadError> for AppError {
    fn from(error: QueryPayloadError) -> Self {
        Self::Rejected(error.status_code(), error.to_string())
    }
}
