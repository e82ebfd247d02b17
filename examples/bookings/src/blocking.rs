//! The handlers over Diesel and r2d2. A blocking operation belongs on a blocking thread.

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use diesel::prelude::*;
use diesel::sql_types::{Integer, Text};
use diesel_interlock::monitor::{KeyOfLimit, Slot};
use diesel_interlock::{
    Admission, AdvisoryLock, Decision, Error, PgPool, RateLimit, Semaphore, Throttle, migrations,
};
use tokio::task::spawn_blocking;

use crate::{
    BOOK, CALL, Failed, MIGRATIONS, PER_CUSTOMER, REBUILD, SLOTS, customer, street, try_again,
    with_headers,
};

static SERVER: AdvisoryLock = AdvisoryLock::named("server");
static REQUESTS: RateLimit = RateLimit::named("requests", PER_CUSTOMER);
static GEOCODER: Semaphore = Semaphore::named("geocoder", SLOTS, CALL);
static CACHE: Throttle = Throttle::named("cache rebuild", REBUILD);

/// Prepares the database, which any number of instances may do at once.
pub fn start_up(pool: &PgPool, url: &str) -> Result<(), Error> {
    migrations::install(pool)?;
    let direct = &mut PgConnection::establish(url).map_err(|error| Error::Pool(error.into()))?;
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

/// Runs on a blocking thread. A panic there is a reply of 500.
async fn block<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StatusCode> {
    spawn_blocking(work)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
}

async fn limit(State(pool): State<PgPool>, request: Request, next: Next) -> Response {
    let key = customer(&request);
    match block(move || REQUESTS.key(key).check(&pool)).await {
        Ok(Ok(check)) if check.is_allowed() => with_headers(&check, next.run(request).await),
        Ok(Ok(check)) => with_headers(&check, StatusCode::TOO_MANY_REQUESTS.into_response()),
        // Whoever cannot be counted is not let through.
        Ok(Err(error)) => Failed(error).into_response(),
        Err(status) => status.into_response(),
    }
}

async fn book(
    pool: State<PgPool>,
    Path(server): Path<i32>,
    headers: HeaderMap,
) -> Result<Response, StatusCode> {
    let customer = format!("{:?}", headers.get("x-customer"));
    block(move || {
        let booked = pool
            .get()
            .map_err(|error| Error::Pool(error.into()))
            .and_then(|mut conn| {
                SERVER.key(server).transaction(&mut conn, |conn| {
                    let insert = diesel::sql_query(BOOK)
                        .bind::<Integer, _>(server)
                        .bind::<Text, _>(customer);
                    Ok(insert.execute(conn)?)
                })
            });
        match booked {
            Ok(0) => StatusCode::CONFLICT.into_response(),
            Ok(_) => StatusCode::CREATED.into_response(),
            Err(error) => Failed(error).into_response(),
        }
    })
    .await
}

async fn geocode(pool: State<PgPool>, Path(name): Path<String>) -> Result<Response, StatusCode> {
    block(move || {
        // The pool is lent out of `State`, as it is.
        let called = GEOCODER
            .try_acquire(&pool)
            .and_then(|admission| admission.run(|_permit| Ok(street(&name))));
        match called {
            Ok(Admission::Admitted(street)) => street.into_response(),
            Ok(Admission::Full(full)) => {
                try_again(StatusCode::SERVICE_UNAVAILABLE, full.retry_after_secs())
            }
            Err(error) => Failed(error).into_response(),
        }
    })
    .await
}

async fn rebuild(pool: State<PgPool>) -> Result<Response, StatusCode> {
    block(move || match CACHE.attempt(&pool) {
        Ok(Decision::Granted(_)) => "rebuilt\n".into_response(),
        Ok(Decision::Denied(denied)) => {
            try_again(StatusCode::TOO_MANY_REQUESTS, denied.retry_after_secs())
        }
        Err(error) => Failed(error).into_response(),
    })
    .await
}

async fn status(pool: State<PgPool>) -> Result<Response, StatusCode> {
    block(move || {
        let read = || -> Result<String, Failed> {
            let conn = &mut pool.get().map_err(|error| Error::Pool(error.into()))?;
            let slots = Slot::all().load(conn)?;
            let limits = KeyOfLimit::all().load(conn)?;
            Ok(format!("{slots:#?}\n{limits:#?}\n"))
        };
        read().into_response()
    })
    .await
}
