//! What goes wrong or is refused, and how a client is told.

use diesel_interlock::{Denial, Error, Full, Headers, Limited};
use serde_json::{Value, json};

use crate::reports::Running;

/// Everything that a handler returns instead of a success.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The framework refused the request with this status.
    #[error("{1}")]
    Rejected(u16, String),
    #[error("there is nothing at this address: the page to try everything is at /")]
    NotFound,
    #[error("{0}")]
    Invalid(String),
    #[error("there is no such server")]
    UnknownServer,
    #[error("the server is reserved in that period")]
    Reserved,
    #[error("the nightly report is being written")]
    ReportRunning(Running),
    #[error("the resource was taken a moment ago, or is being taken: retry later")]
    Throttled(Denial),
    #[error("the service has as many calls in flight as it can take: retry later")]
    Full(Full),
    #[error("the rate limit of this client is used up: retry later")]
    Limited(Limited),
    #[error("the rate limit cannot be checked, because the database is away: retry later")]
    NotChecked(#[source] Error),
    #[error("timed out waiting for other reservations of this server: retry")]
    Busy,
    #[error("the work was given up, because its client hung up or the application ends: retry")]
    Stopped,
    #[error("the service did not reply before the call timed out")]
    BackendTimedOut,
    #[error("the call to the service failed")]
    Backend(#[source] ureq::Error),
    #[error("a panic: {0}")]
    Panicked(String),
    #[error("the page could not be written")]
    Page(#[from] askama::Error),
    #[error(transparent)]
    Interlock(#[from] Error),
}

/// An HTTP response to what was refused or went wrong, in no framework's types.
#[derive(Debug)]
pub struct Refusal {
    pub status: u16,
    /// Header fields: `Retry-After`, and those of a rate limit or a semaphore.
    pub fields: Vec<(&'static str, String)>,
    /// JSON.
    pub body: Value,
}

impl AppError {
    /// What the client is told. Logs what is nobody's business but ours.
    pub fn refusal(&self) -> Refusal {
        let status = self.status();
        let mut body = json!({ "error": self.to_string() });
        if status == 500 {
            tracing::error!(error = self as &dyn std::error::Error);
            body = json!({ "error": "internal error: the log of the application has the details" });
        }
        if let Self::ReportRunning(running) = self {
            body["running"] = json!(running);
        }
        Refusal {
            status,
            fields: self.fields(),
            body,
        }
    }

    /// Logs the failure of work that no request waits for.
    pub fn log(&self, what: &str) {
        tracing::error!(error = self as &dyn std::error::Error, "{what} failed");
    }

    /// The status.
    pub fn status(&self) -> u16 {
        match self {
            // The refusals and errors of the library.
            Self::ReportRunning(_) => 409,
            Self::Throttled(_) | Self::Limited(_) => 429,
            Self::Full(_) | Self::NotChecked(_) => 503,
            Self::Interlock(Error::Pool(_)) => 503,
            Self::Interlock(Error::TimedOut { .. }) => 504,
            Self::Interlock(_) => 500,
            // Our own.
            Self::Rejected(status, _) => *status,
            Self::Invalid(_) => 422,
            Self::UnknownServer | Self::NotFound => 404,
            Self::Reserved => 409,
            Self::Busy | Self::Stopped => 503,
            Self::BackendTimedOut => 504,
            Self::Backend(_) => 502,
            Self::Panicked(_) | Self::Page(_) => 500,
        }
    }

    fn fields(&self) -> Vec<(&'static str, String)> {
        let owned = |headers: Headers| {
            let fields = headers.fields();
            fields
                .map(|(name, value)| (name, value.to_owned()))
                .collect()
        };
        let retry_after = |seconds: u64| vec![("Retry-After", seconds.to_string())];
        match self {
            Self::Limited(limited) => owned(limited.headers()),
            Self::Full(full) => owned(full.headers()),
            Self::Throttled(denial) => retry_after(denial.retry_after_secs()),
            Self::NotChecked(_) | Self::Busy | Self::Stopped => retry_after(1),
            Self::Interlock(Error::Pool(_)) => retry_after(1),
            _ => Vec::new(),
        }
    }
}

/// For `?` on Diesel's queries, in transactions and out of them.
impl From<diesel::result::Error> for AppError {
    fn from(error: diesel::result::Error) -> Self {
        Self::Interlock(error.into())
    }
}

impl From<ureq::Error> for AppError {
    fn from(error: ureq::Error) -> Self {
        match error {
            ureq::Error::Timeout(_) => Self::BackendTimedOut,
            error => Self::Backend(error),
        }
    }
}
