//! How axum sends what was refused or went wrong.

use axum::Json;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use booking::AppError;

/// What a handler returns instead of a success: an [`AppError`] that axum can send.
pub struct Failure(AppError);

impl From<AppError> for Failure {
    fn from(error: AppError) -> Self {
        Self(error)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let refusal = self.0.refusal();
        let status =
            StatusCode::from_u16(refusal.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(refusal.body)).into_response();
        if let Some(seconds) = refusal.retry_after {
            response
                .headers_mut()
                .insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// A body that is not what the handler takes.
impl From<JsonRejection> for Failure {
    fn from(rejection: JsonRejection) -> Self {
        AppError::Rejected(rejection.status().as_u16(), rejection.body_text()).into()
    }
}

/// A query string that is not what the handler takes.
impl From<QueryRejection> for Failure {
    fn from(rejection: QueryRejection) -> Self {
        AppError::Rejected(rejection.status().as_u16(), rejection.body_text()).into()
    }
}
