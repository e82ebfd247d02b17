//! A complete asynchronous service, of which any number of instances may run: a limit for each
//! customer, charges that are made once, a leader that sends them, a schedule that tidies up,
//! numbers for Prometheus, and an end that leaves nothing behind.
//!
//! `DATABASE_URL=postgres://… cargo run -p service`, and a port if it is not to be 3000.

use std::error::Error as AnyError;
use std::time::Duration;

use axum::Router;
use axum::extract::Extension;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use deadpool::Runtime;
use diesel::sql_types::{BigInt, Integer, Text};
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod,
};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use diesel_interlock::deadpool::{Leader, Once, PgPool, RateLimit, Schedule, drain};
use diesel_interlock::schedule::every;
use diesel_interlock::{Error, Quota, Result, describe_metrics, migrations, prune};
use diesel_interlock_tower::{IdempotencyLayer, RateLimitLayer, Transaction};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

const MIGRATIONS: EmbeddedMigrations = embed_migrations!();
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

static API: RateLimit = RateLimit::named("api", Quota::per_minute(100).burst(20));
static CHARGE: Once = Once::named("charge");
static SENDER: Leader = Leader::named("sender", Duration::from_secs(15));
static TIDY: Schedule = Schedule::named("tidy up");

#[tokio::main]
async fn main() -> Result<(), Box<dyn AnyError>> {
    // Before the first operation, so that no gauge is missed.
    let metrics = metrics()?;
    let url = std::env::var("DATABASE_URL")?;
    let pool = pool(&url, 8)?;
    // The work in the background has connections of its own, so that requests cannot starve it.
    let background = self::pool(&url, 3)?;
    migrations::install(&pool).await?;
    let direct = AsyncPgConnection::establish(&url).await?;
    migrations::run_pending(direct, MIGRATIONS).await?;

    let port = std::env::args()
        .nth(1)
        .map_or(Ok(3000), |port| port.parse())?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("http://{}", listener.local_addr()?);
    let service = axum::serve(listener, router(pool.clone()).merge(metrics));
    tokio::select! {
        served = service.with_graceful_shutdown(terminated()) => served?,
        // Database errors are tried again, so this ends only after a mistake, such as a bad name.
        ended = async { tokio::try_join!(send(&background), tidy(&background)) } => {
            ended?;
        }
    }
    // The futures of the leader and the schedule are dropped. This waits until they have resigned
    // and given back their tick, which the runtime would not.
    if !drain(Duration::from_secs(10)).await {
        eprintln!("what is held expires by itself");
    }
    Ok(())
}

/// A pool that does not test its connections: this crate replaces a broken one by itself.
fn pool(url: &str, size: usize) -> Result<PgPool, Box<dyn AnyError>> {
    let mut config = ManagerConfig::default();
    config.recycling_method = RecyclingMethod::Fast;
    let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new_with_config(url, config);
    let timeout = Some(Duration::from_secs(5));
    Ok(PgPool::builder(manager)
        .max_size(size)
        .wait_timeout(timeout)
        .create_timeout(timeout)
        .recycle_timeout(timeout)
        .runtime(Runtime::Tokio1)
        .build()?)
}

fn metrics() -> Result<Router, Box<dyn AnyError>> {
    let seconds = [0.001, 0.01, 0.1, 1.0, 10.0, 100.0];
    let exporter = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &seconds)?
        .install_recorder()?;
    describe_metrics();
    Ok(Router::new().route("/metrics", get(async move || exporter.render())))
}

async fn terminated() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => drop(terminate.recv().await),
        Err(error) => eprintln!("no handler of SIGTERM: {error}"),
    }
}

fn router(pool: PgPool) -> Router {
    Router::new()
        .route("/charges", post(charge))
        .layer(IdempotencyLayer::new(CHARGE.clone(), pool.clone(), customer).required())
        .layer(RateLimitLayer::new((API.clone(), pool), customer))
}

/// The customer of a request. A real service authenticates it in an earlier layer.
fn customer(request: &Parts) -> String {
    let customer = request.headers.get("x-customer");
    let customer = customer.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    customer.unwrap_or_default()
}

/// Charges once, however often a client repeats the request: the charge and the response commit
/// together.
async fn charge(
    Extension(transaction): Extension<Transaction<PgPool>>,
    headers: HeaderMap,
    body: String,
) -> Result<(StatusCode, String), Failed> {
    let customer = headers.get("x-customer").and_then(|it| it.to_str().ok());
    let (Some(customer), Ok(cents)) = (customer, body.parse::<i32>()) else {
        let text = "a customer, and an amount in cents";
        return Ok((StatusCode::BAD_REQUEST, text.to_owned()));
    };
    let insert = "INSERT INTO charge (customer, cents) VALUES ($1, $2)";
    let insert = diesel::sql_query(insert)
        .bind::<Text, _>(customer)
        .bind::<Integer, _>(cents);
    insert.execute(transaction.lock().await?.conn()).await?;
    Ok((StatusCode::CREATED, format!("{cents} cents")))
}

/// Sends what was charged, on one instance at a time.
async fn send(pool: &PgPool) -> Result<()> {
    let leading = SENDER.lead(pool, |term| async move {
        while term.pause(Duration::from_secs(1)).await {
            if let Err(error) = send_some(pool).await {
                eprintln!("sending: {error}");
            }
        }
    });
    leading.await.map(|never| match never {})
}

async fn send_some(pool: &PgPool) -> Result<()> {
    const SEND: &str = "UPDATE charge SET is_sent = true WHERE id IN
        (SELECT id FROM charge WHERE NOT is_sent ORDER BY id LIMIT $1)";
    let conn = &mut pool
        .get()
        .await
        .map_err(|error| Error::Pool(error.into()))?;
    diesel::sql_query(SEND)
        .bind::<BigInt, _>(100)
        .execute(conn)
        .await?;
    Ok(())
}

/// Deletes what is not needed any more, once a day on one instance.
async fn tidy(pool: &PgPool) -> Result<()> {
    TIDY.run(pool, every(DAY), |_tick| async move {
        prune::once(pool, 7 * DAY).await?;
        prune::rate_limits(pool).await?;
        prune::throttles(pool).await?;
        Ok::<_, Error>(())
    })
    .await
}

/// An error as a reply: 400 for bad input, 503 if the database is away, and 500 for a mistake.
struct Failed(StatusCode);

impl<E: Into<Error>> From<E> for Failed {
    fn from(error: E) -> Self {
        let error = error.into();
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        eprintln!("{error}{}", cause.unwrap_or_default());
        Self(if error.is_input() {
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
