//! Runs the application with some requests and a lost lock, for `scripts/check metrics`. Prints the
//! port of `/metrics` and the URL of its database, which is dropped at the end.

use std::error::Error;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use bookings::blocking;
use diesel::connection::SimpleConnection;
use diesel_interlock::AdvisoryLock;
use tower::ServiceExt;
use workbench::Database;

static LOST: AdvisoryLock = AdvisoryLock::named("lost");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let metrics = bookings::metrics()?;
    let database = Database::new();
    let (pool, url) = (database.pool(4), database.url());
    let started = (pool.clone(), url.clone());
    let prepared = tokio::task::spawn_blocking(move || {
        let (pool, url) = started;
        blocking::start_up(&pool, &url).map_err(|error| error.to_string())?;
        let guard = LOST.try_acquire(&pool).map_err(|error| error.to_string())?;
        database
            .connect()
            .batch_execute(
                "SELECT pg_terminate_backend(pid) FROM resource_control.advisory_lock WHERE
                    is_held",
            )
            .map_err(|error| error.to_string())?;
        let released = guard.acquired().map(|guard| guard.release());
        assert!(released.is_some_and(|released| released.is_err()));
        Ok::<_, String>(database)
    });
    let _database = prepared.await??;
    let router = blocking::router(pool).merge(metrics);
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
    println!("{}\n{url}", listener.local_addr()?.port());
    let requests = router.clone();
    tokio::spawn(async move {
        for number in 0_u64.. {
            for (method, path) in [
                ("POST", format!("/servers/{}/bookings", number % 10)),
                ("GET", "/streets/main".to_owned()),
                ("POST", "/cache".to_owned()),
            ] {
                let request = Request::builder().method(method).uri(path);
                let request = request.header("x-customer", format!("customer {}", number % 7));
                if let Ok(request) = request.body(Body::empty()) {
                    let _ = requests.clone().oneshot(request).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    Ok(axum::serve(listener, router).await?)
}
