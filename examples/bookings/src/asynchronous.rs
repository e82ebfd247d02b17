//! The handlers over diesel-async and deadpool. A request whose client goes away is dropped, and what it has taken is released.

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use diesel::sql_types::{Integer, Text};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use diesel_interlock::deadpool::{AdvisoryLock, PgPool, RateLimit, Semaphore, Throttle};
use diesel_interlock::monitor::{KeyOfLimit, Slot};
use diesel_interlock::{Admission, Decision, Error, migrations};

use crate::{
    BOOK, CALL, Failed, MIGRATIONS, PER_CUSTOMER, REBUILD, SLOTS, customer, street, try_again,
    with_headers,
};

static SERVER: AdvisoryLock = AdvisoryLock::named("server");
static REQUESTS: RateLimit = RateLimit::named("requests", PER_CUSTOMER);
static GEOCODER: Semaphore = Semaphore::named("geocoder", SLOTS, CALL);
static CACHE: Throttle = Throttle::named("cache rebuild", REBUILD);

/// Prepares the database, which any number of instances may do at once.
pub async fn start_up(pool: &PgPool, url: &str) -> Result<(), Error> {
    migrations::install(pool).await?;
    let direct = AsyncPgConnection::establish(url)
        .await
        .map_err(|error| Error::Pool(error.into()))?;
    for version in migrations::run_pending(direct, MIGRATIONS).await? {
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

async fn limit(pool: State<PgPool>, request: Request, next: Next) -> Response {
    match REQUESTS.key(customer(&request)).check(&pool).await {
        Ok(check) if check.is_allowed() => with_headers(&check, next.run(request).await),
        Ok(check) => with_headers(&check, StatusCode::TOO_MANY_REQUESTS.into_response()),
        // Whoever cannot be counted is not let through.
        Err(error) => Failed(error).into_response(),
    }
}

async fn book(
    pool: State<PgPool>,
    Path(server): Path<i32>,
    headers: HeaderMap,
) -> Result<StatusCode, Failed> {
    let customer = format!("{:?}", headers.get("x-customer"));
    let mut conn = pool
        .get()
        .await
        .map_err(|error| Error::Pool(error.into()))?;
    let booked: usize = SERVER
        .key(server)
        .transaction(&mut conn, async |conn| {
            let insert = diesel::sql_query(BOOK)
                .bind::<Integer, _>(server)
                .bind::<Text, _>(customer);
            Ok::<_, Error>(insert.execute(conn).await?)
        })
        .await?;
    Ok(if booked == 0 {
        StatusCode::CONFLICT
    } else {
        StatusCode::CREATED
    })
}

async fn geocode(pool: State<PgPool>, Path(name): Path<String>) -> Result<Response, Failed> {
    let admission = GEOCODER.try_acquire(&pool).await?;
    let called = admission
        .run(async |_permit| Ok::<_, Error>(street(&name)))
        .await?;
    Ok(match called {
        Admission::Admitted(street) => street.into_response(),
        Admission::Full(full) => {
            try_again(StatusCode::SERVICE_UNAVAILABLE, full.retry_after_secs())
        }
    })
}

async fn rebuild(pool: State<PgPool>) -> Result<Response, Failed> {
    Ok(match CACHE.attempt(&pool).await? {
        Decision::Granted(_) => "rebuilt\n".into_response(),
        Decision::Denied(denied) => {
            try_again(StatusCode::TOO_MANY_REQUESTS, denied.retry_after_secs())
        }
    })
}

async fn status(pool: State<PgPool>) -> Result<String, Failed> {
    let conn = &mut pool
        .get()
        .await
        .map_err(|error| Error::Pool(error.into()))?;
    let slots: Vec<Slot> = Slot::all().load(conn).await?;
    let limits: Vec<KeyOfLimit> = KeyOfLimit::all().load(conn).await?;
    Ok(format!("{slots:#?}\n{limits:#?}\n"))
}
