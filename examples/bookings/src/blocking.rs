//! The handlers over Diesel and r2d2. A blocking operation belongs on a blocking thread.

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_interlock::monitor::{Lock, RateLimitState, Slot, ThrottleState};
use diesel_interlock::{AdvisoryLock, Error, PgPool, RateLimit, Semaphore, Throttle, migrations};
use tokio::task::spawn_blocking;

use crate::{
    BOOK, CALL, Failed, MIGRATIONS, PER_CUSTOMER, REBUILD, SLOTS, SLOW, booked, customer, geocoded,
    no_connection, rebuilt, shown, street, with_headers,
};

static SERVER: AdvisoryLock = AdvisoryLock::named("server");
static REQUESTS: RateLimit = RateLimit::named("requests", PER_CUSTOMER);
static GEOCODER: Semaphore = Semaphore::named("geocoder", SLOTS, CALL);
static CACHE: Throttle = Throttle::named("cache rebuild", REBUILD);

/// Prepares the database. Any number of instances may do this at once.
pub fn start_up(pool: &PgPool, url: &str) -> Result<(), Error> {
    migrations::install(pool)?;
    let direct = PgConnection::establish(url);
    let direct = &mut direct.map_err(no_connection)?;
    for version in migrations::run_pending(direct, MIGRATIONS)? {
        println!("migrated: {version}");
    }
    Ok(())
}

/// The application.
pub fn router(pool: PgPool) -> Router {
    Router::new()
        .route("/servers/{server}/bookings", post(book))
        .route("/streets/{name}", get(geocode))
        .layer(from_fn_with_state(pool.clone(), limit))
        .route("/cache", post(rebuild))
        .route("/status", get(status))
        .with_state(pool)
}

/// Runs a handler on a blocking thread. A panic there becomes a reply with the status 500.
async fn block<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failed> + Send + 'static,
) -> Result<T, Failed> {
    let panicked = Failed(StatusCode::INTERNAL_SERVER_ERROR);
    spawn_blocking(work).await.unwrap_or(Err(panicked))
}

/// A caller that cannot be counted is refused.
async fn limit(pool: State<PgPool>, request: Request, next: Next) -> Result<Response, Failed> {
    let requests = REQUESTS.key(customer(request.headers()));
    let check = block(move || Ok(requests.check(&pool)?)).await?;
    let response = if check.is_allowed() {
        next.run(request).await
    } else {
        StatusCode::TOO_MANY_REQUESTS.into_response()
    };
    Ok(with_headers(&check, response))
}

async fn book(
    pool: State<PgPool>,
    Path(server): Path<i32>,
    headers: HeaderMap,
) -> Result<StatusCode, Failed> {
    let customer = customer(&headers);
    block(move || {
        let conn = &mut pool.get().map_err(no_connection)?;
        let server_lock = SERVER.key(server);
        let booking = server_lock.transaction(conn, |conn| {
            let insert = diesel::sql_query(BOOK)
                .bind::<Integer, _>(server)
                .bind::<Text, _>(customer);
            Ok::<_, Error>(insert.execute(conn)?)
        });
        Ok(booked(booking?))
    })
    .await
}

async fn geocode(pool: State<PgPool>, Path(name): Path<String>) -> Result<Response, Failed> {
    block(move || {
        let admission = GEOCODER.try_acquire(&pool)?;
        let call = admission.run(|_permit| {
            std::thread::sleep(SLOW);
            Ok::<_, Error>(street(&name))
        });
        Ok(geocoded(call?))
    })
    .await
}

async fn rebuild(pool: State<PgPool>) -> Result<Response, Failed> {
    block(move || Ok(rebuilt(CACHE.attempt(&pool)?))).await
}

async fn status(pool: State<PgPool>) -> Result<String, Failed> {
    block(move || {
        let conn = &mut pool.get().map_err(no_connection)?;
        Ok(shown(
            Lock::all().load(conn)?,
            Slot::all().load(conn)?,
            ThrottleState::all().load(conn)?,
            RateLimitState::all().load(conn)?,
        ))
    })
    .await
}
