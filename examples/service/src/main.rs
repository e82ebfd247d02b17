//! A complete asynchronous service, of which any number of instances may run: a limit for each
//! customer, charges that are made once, a leader that sends them, a schedule that tidies up,
//! numbers for Prometheus, and an end that leaves nothing behind.
//!
//! `DATABASE_URL=postgres://… cargo run -p service`, and a port if it is not to be 3000.

use std::error::Error as AnyError;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
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
use diesel_interlock::{Attempt, Done, Error, Quota, Result, describe_metrics, migrations, prune};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use sha2::{Digest, Sha256};

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
        .layer(from_fn_with_state(pool.clone(), limit))
        .with_state(pool)
}

fn header<'h>(headers: &'h HeaderMap, name: &str) -> &'h str {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

/// Who cannot be counted is not let through.
async fn limit(pool: State<PgPool>, request: Request, next: Next) -> Result<Response, Failed> {
    let customer = header(request.headers(), "x-customer");
    let check = API.key(customer).check(&pool).await?;
    let mut response = if check.is_allowed() {
        next.run(request).await
    } else {
        StatusCode::TOO_MANY_REQUESTS.into_response()
    };
    for (name, value) in check.headers() {
        if let Ok(value) = HeaderValue::from_str(&value) {
            let name = HeaderName::from_static(name);
            response.headers_mut().insert(name, value);
        }
    }
    Ok(response)
}

/// Charges once, however often a client repeats the request.
async fn charge(
    pool: State<PgPool>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<(StatusCode, String), Failed> {
    let customer = header(&headers, "x-customer");
    let key = header(&headers, "idempotency-key");
    let cents = String::from_utf8_lossy(&body).parse::<i32>();
    let (false, Ok(cents)) = (key.is_empty(), cents) else {
        return Ok((
            StatusCode::BAD_REQUEST,
            "a key, and an amount in cents".to_owned(),
        ));
    };
    // The request is part of the outcome, so that another one with the same key is refused.
    let hash = format!("{:x}", Sha256::digest(&body));
    let conn = &mut pool
        .get()
        .await
        .map_err(|error| Error::Pool(error.into()))?;
    let once = CHARGE.key(format!("{customer} {key}"));
    let done = once.try_run(conn, async |conn| {
        let insert = "INSERT INTO charge (customer, cents) VALUES ($1, $2)";
        let insert = diesel::sql_query(insert)
            .bind::<Text, _>(customer)
            .bind::<Integer, _>(cents);
        insert.execute(conn).await?;
        Ok::<_, Error>(hash.clone())
    });
    let Attempt::Acquired(done) = done.await? else {
        return Ok((
            StatusCode::CONFLICT,
            "the same request is at work".to_owned(),
        ));
    };
    Ok(match done {
        Done::First(_) => (StatusCode::CREATED, format!("{cents} cents")),
        Done::Before(stored) if stored == hash.as_bytes() => {
            (StatusCode::CREATED, format!("{cents} cents"))
        }
        Done::Before(_) => (
            StatusCode::UNPROCESSABLE_ENTITY,
            "the key was used for another request".to_owned(),
        ),
    })
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
