//! `/metrics` counts the requests.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use bookings::{asynchronous, blocking, metrics};
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_interlock::deadpool::PgPool as AsyncPool;
use tower::ServiceExt;
use workbench::Database;

async fn send(router: &Router, method: &str, path: &str) -> String {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("x-customer", "Jane Doe")
        .body(Body::empty())
        .unwrap();
    let response = router.clone().oneshot(request).await.unwrap();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    String::from_utf8(body.to_vec()).unwrap()
}

/// Sends the same requests to one half. Nothing is in flight when they return.
async fn use_all(router: &Router) {
    for server in 0..2 {
        send(router, "POST", &format!("/servers/{server}/bookings")).await;
    }
    for _ in 0..5 {
        send(router, "GET", "/streets/main").await;
    }
    for _ in 0..4 {
        send(router, "POST", "/cache").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn both_halves_are_counted() {
    let metrics = metrics().unwrap();
    let (database, other) = (Database::new(), Database::new());
    let (pool, url) = (database.pool(4), database.url());
    let started = pool.clone();
    tokio::task::spawn_blocking(move || blocking::start_up(&started, &url))
        .await
        .unwrap()
        .unwrap();
    use_all(&blocking::router(pool).merge(metrics.clone())).await;
    let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(other.url());
    let pool = AsyncPool::builder(manager).max_size(4).build().unwrap();
    asynchronous::start_up(&pool, &other.url()).await.unwrap();
    let router = asynchronous::router(pool).merge(metrics);
    use_all(&router).await;

    let exported = send(&router, "GET", "/metrics").await;
    for line in [
        // Two of the seven requests of each half are limited.
        r#"interlock_operations_total{kind="rate limit",name="requests",outcome="allowed"} 10"#,
        r#"interlock_operations_total{kind="rate limit",name="requests",outcome="limited"} 4"#,
        r#"interlock_operations_total{kind="lock",name="server",outcome="acquired"} 4"#,
        r#"interlock_wait_seconds_count{kind="lock",name="server"} 4"#,
        r#"interlock_wait_seconds_bucket{kind="lock",name="server",le="+Inf"} 4"#,
        r#"interlock_operations_total{kind="semaphore",name="geocoder",outcome="admitted"} 6"#,
        r#"interlock_operations_total{kind="semaphore",name="geocoder",outcome="released"} 6"#,
        r#"interlock_held_seconds_count{kind="semaphore",name="geocoder"} 6"#,
        r#"interlock_held{kind="semaphore",name="geocoder"} 0"#,
        r#"interlock_lost_total{kind="semaphore",name="geocoder"} 0"#,
        r#"interlock_waiting{kind="lock",name="server"} 0"#,
        r#"interlock_operations_total{kind="throttle",name="cache rebuild",outcome="granted"} 2"#,
        r#"interlock_operations_total{kind="throttle",name="cache rebuild",outcome="denied"} 6"#,
    ] {
        assert!(
            exported.lines().any(|exported| exported == line),
            "{line} is not in:\n{exported}"
        );
    }
    assert!(!exported.contains("Jane"), "{exported}");
}
