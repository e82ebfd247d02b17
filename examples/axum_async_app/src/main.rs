//! A web application on axum and diesel-async whose instances share one database: see README.md.

// An application, not an interface.
#![allow(missing_docs, missing_debug_implementations, unreachable_pub)]

mod routes;

use booking::{Config, startup};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    startup::log()?;
    let config = Config::from_env(env!("CARGO_PKG_NAME"))?;
    let listener = TcpListener::bind(&config.listen)
        .await
        .map_err(|error| config.cannot_listen(error))?;
    let address = listener.local_addr()?;
    let app = booking::asynchronous::start(config, address).await?;
    booking::axum::serve(listener, app.clone(), routes::router(app)).await
}
