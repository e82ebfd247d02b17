//! Both halves send the same replies.

use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use bookings::{asynchronous, blocking};
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel::sql_types::{Bool, Text};
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_interlock::deadpool::PgPool as AsyncPool;
use tower::ServiceExt;
use workbench::Database;

async fn in_blocking(database: &Database) -> Router {
    let (pool, url) = (database.pool(4), database.url());
    let started = pool.clone();
    tokio::task::spawn_blocking(move || blocking::start_up(&started, &url))
        .await
        .unwrap()
        .unwrap();
    blocking::router(pool)
}

async fn in_async(database: &Database) -> Router {
    let pool = deadpool(&database.url());
    asynchronous::start_up(&pool, &database.url())
        .await
        .unwrap();
    asynchronous::router(pool)
}

fn deadpool(url: &str) -> AsyncPool {
    let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
    AsyncPool::builder(manager).max_size(4).build().unwrap()
}

/// The application in each half. A blocking request waits for a connection for at most `patience`.
fn both(url: &str, patience: Duration) -> [Router; 2] {
    let pool = Pool::builder()
        .connection_timeout(patience)
        .build_unchecked(ConnectionManager::<PgConnection>::new(url));
    [blocking::router(pool), asynchronous::router(deadpool(url))]
}

async fn send(router: &Router, method: &str, path: &str, customer: &str) -> Response<Body> {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("x-customer", customer);
    router
        .clone()
        .oneshot(request.body(Body::empty()).unwrap())
        .await
        .unwrap()
}

/// Sends ten requests at once, and counts the replies `one`. All others must be `other`.
async fn count_of_ten(
    router: &Router,
    path: &'static str,
    one: StatusCode,
    other: StatusCode,
) -> usize {
    let mut requests = Vec::new();
    for customer in 0..10 {
        let router = router.clone();
        requests.push(tokio::spawn(async move {
            send(&router, "POST", path, &customer.to_string())
                .await
                .status()
        }));
    }
    let mut ones = 0;
    for request in requests {
        let status = request.await.unwrap();
        assert!(status == one || status == other, "{status}");
        ones += usize::from(status == one);
    }
    ones
}

async fn of_ten_requests_one_books(router: &Router, database: &Database) {
    let (created, conflict) = (StatusCode::CREATED, StatusCode::CONFLICT);
    let books = count_of_ten(router, "/servers/345/bookings", created, conflict);
    assert_eq!(books.await, 1);
    let customer = "(SELECT customer FROM booking)";
    let customer: String = diesel::select(sql::<Text>(customer))
        .get_result(&mut database.connect())
        .unwrap();
    assert!(
        customer.parse().is_ok_and(|number: i32| number < 10),
        "{customer}"
    );
}

async fn a_customer_has_five_requests_at_once(router: &Router) {
    let (mut responses, mut round) = (Vec::new(), 0);
    // One more is allowed after three seconds, so a slower round proves nothing.
    let mut is_quick = false;
    while !is_quick {
        assert!(round < 20, "no round was quick");
        round += 1;
        responses.clear();
        let (customer, began) = (format!("limited-{round}"), Instant::now());
        for _ in 0..6 {
            responses.push(send(router, "GET", "/streets/main", &customer).await);
        }
        is_quick = began.elapsed() < Duration::from_secs(3);
    }
    let refused = responses.pop().unwrap();
    for (response, left) in responses.iter().zip((0..5).rev()) {
        assert_eq!(response.status(), StatusCode::OK);
        let limit = response.headers()["ratelimit"].to_str().unwrap();
        assert!(limit.contains(&format!("r={left};")), "{limit}");
    }
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(
        send(router, "GET", "/streets/main", "other").await.status(),
        StatusCode::OK
    );
}

async fn of_ten_requests_one_rebuilds_the_cache(router: &Router) {
    let (ok, too_many) = (StatusCode::OK, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(count_of_ten(router, "/cache", ok, too_many).await, 1);
    let refused = send(router, "POST", "/cache", "7").await;
    assert_eq!(refused.status(), too_many);
    assert!(refused.headers().contains_key("retry-after"));
}

/// Takes all four slots before the call.
async fn a_fifth_call_is_refused(router: &Router, database: &Database) {
    let four = "SELECT resource_control.claim_service_request('geocoder', 4, '1 hour') FROM generate_series(1, 4)";
    database.connect().batch_execute(four).unwrap();
    let refused = send(router, "GET", "/streets/main", "fifth").await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(refused.headers().contains_key("retry-after"));
}

async fn the_status_has_everything(router: &Router) {
    let response = send(router, "GET", "/status", "7").await;
    assert_eq!(response.status(), StatusCode::OK);
    let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
    let body = String::from_utf8(body.unwrap().to_vec()).unwrap();
    for shown in ["geocoder", "cache rebuild", "requests"] {
        assert!(body.contains(shown), "{body}");
    }
}

async fn try_all(router: &Router, database: &Database) {
    of_ten_requests_one_books(router, database).await;
    a_customer_has_five_requests_at_once(router).await;
    of_ten_requests_one_rebuilds_the_cache(router).await;
    a_fifth_call_is_refused(router, database).await;
    the_status_has_everything(router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_blocking_half() {
    let database = Database::new();
    try_all(&in_blocking(&database).await, &database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_asynchronous_half() {
    let database = Database::new();
    try_all(&in_async(&database).await, &database).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_cannot_be_counted_is_refused() {
    let book = "/servers/345/bookings";
    for router in both(
        "postgresql://postgres@127.0.0.1:1/away",
        Duration::from_millis(100),
    ) {
        let away = send(&router, "POST", book, "7").await;
        assert_eq!(away.status(), StatusCode::SERVICE_UNAVAILABLE);
    }
    // The schema of the limit is missing, although a booking would need only a lock.
    let database = Database::new();
    let table = "CREATE TABLE booking (server integer, customer text)";
    database.connect().batch_execute(table).unwrap();
    for router in both(&database.url(), Duration::from_secs(20)) {
        let mistake = send(&router, "POST", book, "7").await;
        assert_eq!(mistake.status(), StatusCode::INTERNAL_SERVER_ERROR);
    }
    let is_empty = "(SELECT count(*) = 0 FROM booking)";
    let is_empty: bool = diesel::select(sql::<Bool>(is_empty))
        .get_result(&mut database.connect())
        .unwrap();
    assert!(is_empty);
}
