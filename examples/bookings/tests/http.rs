//! Both halves reply alike.

use axum::Router;
use axum::body::Body;
use axum::http::{Request, Response, StatusCode};
use bookings::{asynchronous, blocking};
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
    let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(database.url());
    let pool = AsyncPool::builder(manager).max_size(4).build().unwrap();
    asynchronous::start_up(&pool, &database.url())
        .await
        .unwrap();
    asynchronous::router(pool)
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

async fn of_ten_requests_one_books(router: &Router) {
    let mut requests = Vec::new();
    for customer in 0..10 {
        let router = router.clone();
        requests.push(tokio::spawn(async move {
            send(
                &router,
                "POST",
                "/servers/345/bookings",
                &customer.to_string(),
            )
            .await
            .status()
        }));
    }
    let mut created = 0;
    for request in requests {
        match request.await.unwrap() {
            StatusCode::CREATED => created += 1,
            status => assert_eq!(status, StatusCode::CONFLICT),
        }
    }
    assert_eq!(created, 1);
}

async fn a_customer_has_five_requests_at_once(router: &Router) {
    for left in (0..5).rev() {
        let response = send(router, "GET", "/streets/main", "limited").await;
        assert_eq!(response.status(), StatusCode::OK);
        let limit = response.headers()["ratelimit"].to_str().unwrap();
        assert!(limit.contains(&format!("r={left};")), "{limit}");
    }
    let refused = send(router, "GET", "/streets/main", "limited").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(
        send(router, "GET", "/streets/main", "other").await.status(),
        StatusCode::OK
    );
}

async fn the_cache_is_rebuilt_once(router: &Router) {
    assert_eq!(
        send(router, "POST", "/cache", "7").await.status(),
        StatusCode::OK
    );
    let refused = send(router, "POST", "/cache", "7").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key("retry-after"));
    assert_eq!(
        send(router, "GET", "/status", "7").await.status(),
        StatusCode::OK
    );
}

async fn try_all(router: &Router) {
    of_ten_requests_one_books(router).await;
    a_customer_has_five_requests_at_once(router).await;
    the_cache_is_rebuilt_once(router).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_blocking_half() {
    let database = Database::new();
    try_all(&in_blocking(&database).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_asynchronous_half() {
    let database = Database::new();
    try_all(&in_async(&database).await).await;
}
