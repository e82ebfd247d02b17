//! `DATABASE_URL=postgres://… cargo run -p bookings -- blocking`, or `async`, and optionally a port (default: 3000).

use std::error::Error;

use bookings::{asynchronous, blocking};
use diesel::PgConnection;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_interlock::deadpool::PgPool as AsyncPool;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let metrics = bookings::metrics()?;
    let url = std::env::var("DATABASE_URL")
        .map_err(|_| "set DATABASE_URL to the URL of a PostgreSQL database")?;
    let router = match std::env::args().nth(1).as_deref() {
        Some("async") => {
            let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(&url);
            let pool = AsyncPool::builder(manager).build()?;
            asynchronous::start_up(&pool, &url).await?;
            asynchronous::router(pool)
        }
        Some("blocking") | None => {
            let started = tokio::task::spawn_blocking(move || {
                let pool = Pool::new(ConnectionManager::<PgConnection>::new(&url))?;
                blocking::start_up(&pool, &url)?;
                Ok::<_, Box<dyn Error + Send + Sync>>(pool)
            });
            blocking::router(started.await?.map_err(|error| error.to_string())?)
        }
        Some(other) => return Err(format!("{other} is neither blocking nor async").into()),
    };
    let port = std::env::args()
        .nth(2)
        .map_or(Ok(3000), |port| port.parse())?;
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    println!("http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, router.merge(metrics)).await?)
}
