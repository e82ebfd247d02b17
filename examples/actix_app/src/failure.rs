//! How actix-web sends what was refused or went wrong.

use std::fmt;

use actix_web::error::{JsonPayloadError, QueryPayloadError, UrlencodedError};
use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use booking::AppError;

/// What a handler returns instead of a success: an [`AppError`] that actix-web can send.
#[derive(Debug)]
pub struct Failure(AppError);

impl From<AppError> for Failure {
    fn from(error: AppError) -> Self {
        Self(error)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl ResponseError for Failure {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.0.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        let refusal = self.0.refusal();
        let mut response = HttpResponse::build(self.status_code());
        for field in refusal.fields {
            response.append_header(field);
        }
        response.json(refusal.body)
    }
}

/// A body that is not what the handler takes.
impl From<JsonPayloadError> for Failure {
    fn from(error: JsonPayloadError) -> Self {
        AppError::Rejected(error.status_code().as_u16(), error.to_string()).into()
    }
}

/// A form that is not what the handler takes.
impl From<UrlencodedError> for Failure {
    fn from(error: UrlencodedError) -> Self {
        AppError::Rejected(error.status_code().as_u16(), error.to_string()).into()
    }
}

/// A query string that is not what the handler takes.
impl From<QueryPayloadError> for Failure {
    fn from(error: QueryPayloadError) -> Self {
        AppError::Rejected(error.status_code().as_u16(), error.to_string()).into()
    }
}
