//! A web application that books servers, in both halves.

pub mod asynchronous;
pub mod blocking;

use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use diesel_interlock::monitor::{Lock, RateLimitState, Slot, ThrottleState};
use diesel_interlock::{Admission, Check, Decision, Error, Quota};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder};

/// The application's own migrations.
pub const MIGRATIONS: EmbeddedMigrations = embed_migrations!();

const PER_CUSTOMER: Quota = Quota::per_minute(20).burst(5);
const SLOTS: u32 = 4;
const CALL: Duration = Duration::from_secs(10);
/// How long a call of the fragile service takes.
const SLOW: Duration = Duration::from_millis(20);
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

/// An error as a reply: 400 for bad input, 503 if the database is away, and 500 for a bug.
struct Failed(StatusCode);

impl<E: Into<Error>> From<E> for Failed {
    fn from(error: E) -> Self {
        let error = error.into();
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        eprintln!("{error}{}", cause.unwrap_or_default());
        Self(if matches!(error, Error::Input(_)) {
            StatusCode::BAD_REQUEST
        } else if error.is_unavailable() {
            StatusCode::SERVICE_UNAVAILABLE
        } else {
            StatusCode::INTERNAL_SERVER_ERROR
        })
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        self.0.into_response()
    }
}

/// The reply if a pool or a server gives no connection.
fn no_connection(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Pool(error.into())
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

/// The customer who sends the request.
fn customer(headers: &HeaderMap) -> String {
    let customer = headers.get("x-customer");
    let customer = customer.and_then(|value| value.to_str().ok());
    customer.unwrap_or("anonymous").to_owned()
}

/// The reply to a booking, by the number of inserted rows.
fn booked(rows: usize) -> StatusCode {
    match rows {
        0 => StatusCode::CONFLICT,
        _ => StatusCode::CREATED,
    }
}

fn geocoded(called: Admission<String>) -> Response {
    match called {
        Admission::Admitted(street) => street.into_response(),
        Admission::Full(full) => {
            try_again(StatusCode::SERVICE_UNAVAILABLE, full.retry_after_secs())
        }
    }
}

fn rebuilt(decision: Decision) -> Response {
    match decision {
        Decision::Granted(_) => "rebuilt\n".into_response(),
        Decision::Denied(denied) => {
            try_again(StatusCode::TOO_MANY_REQUESTS, denied.retry_after_secs())
        }
    }
}

/// The status page: holders and waiters of locks, slots in flight, due throttles, used units.
fn shown(
    locks: Vec<Lock>,
    slots: Vec<Slot>,
    throttles: Vec<ThrottleState>,
    limits: Vec<RateLimitState>,
) -> String {
    format!("{locks:#?}\n{slots:#?}\n{throttles:#?}\n{limits:#?}\n")
}

/// Adds the header fields of a check to a reply.
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

/// The reply of the fragile service.
fn street(name: &str) -> String {
    format!("{name} street, 52.5 N 13.4 E\n")
}
