//! A web application that books servers, in both halves.

pub mod asynchronous;
pub mod blocking;

use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use diesel_interlock::{Check, Error, Quota};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};

/// The application's own migrations.
pub const MIGRATIONS: EmbeddedMigrations = embed_migrations!();

const PER_CUSTOMER: Quota = Quota::per_minute(20).burst(5);
const SLOTS: u32 = 4;
const CALL: Duration = Duration::from_secs(10);
const REBUILD: Duration = Duration::from_secs(15);

/// Books a server if it is free, under its lock.
const BOOK: &str = "INSERT INTO booking (server, customer) SELECT $1, $2
    WHERE NOT EXISTS (SELECT FROM booking WHERE server = $1)";

/// Installs an exporter for Prometheus, and returns its route. Call it before the first operation.
pub fn metrics() -> Result<Router, BuildError> {
    let seconds = [
        0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0,
    ];
    let exporter = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &seconds)?
        .install_recorder()?;
    diesel_interlock::describe_metrics();
    let upkeep = exporter.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(Duration::from_secs(5)).await;
            upkeep.run_upkeep();
        }
    });
    Ok(Router::new().route("/metrics", get(async move || exporter.render())))
}

/// An error as a reply: 503 if the database is away, and 500 for a mistake.
struct Failed(Error);

impl<E: Into<Error>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        eprintln!("{}", self.0);
        if self.0.is_unavailable() {
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        } else {
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// A refusal, with the seconds after which the client may try again.
fn try_again(status: StatusCode, seconds: u64) -> Response {
    (
        status,
        [("retry-after", seconds.to_string())],
        "try again\n",
    )
        .into_response()
}

/// Who asks.
fn customer(request: &Request) -> String {
    let customer = request
        .headers()
        .get("x-customer")
        .and_then(|value| value.to_str().ok());
    customer.unwrap_or("anonymous").to_owned()
}

/// Adds what the check says to a reply.
fn with_headers(check: &Check, mut response: Response) -> Response {
    for (name, value) in check.headers() {
        if let Ok(value) = HeaderValue::from_str(&value) {
            response
                .headers_mut()
                .insert(HeaderName::from_static(name), value);
        }
    }
    response
}

/// What a fragile service returns after a while.
fn street(name: &str) -> String {
    format!("{name} street, 52.5 N 13.4 E\n")
}
