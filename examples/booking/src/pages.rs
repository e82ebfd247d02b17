//! The pages for a browser.

use askama::Template;

use crate::error::AppError;
use crate::quotas::Quotas;
use crate::status::Status;

/// The page at `/`, where everything can be tried. It asks for all that it shows: `/status`.
pub const ROOT: &str = include_str!("../templates/index.html");

/// The page for operators, which needs no script.
#[derive(Debug, Template)]
#[template(path = "locks.html")]
struct Locks {
    status: Status,
}

/// The page for operators about rate limits, which needs no script.
#[derive(Debug, Template)]
#[template(path = "limits.html")]
struct Limits {
    quotas: Quotas,
}

/// Writes the page about rate limits.
pub fn limits(quotas: Quotas) -> Result<String, AppError> {
    Ok(Limits { quotas }.render()?)
}

/// Writes the page for operators.
pub fn locks(status: Status) -> Result<String, AppError> {
    Ok(Locks { status }.render()?)
}
