//! A web application on axum and Diesel whose instances share one database: see README.md.

// An application, not an interface.
#![allow(missing_docs, missing_debug_implementations, unreachable_pub)]

mod blocking;
mod failure;
mod routes;

use std::future::IntoFuture;
use std::time::Duration;

use booking::{App, Config, startup};
use tokio::net::TcpListener;

/// How long clients may take to let go of their connections when the application is to end.
const GRACE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    startup::log()?;
    let config = Config::from_env(env!("CARGO_PKG_NAME"))?;
    let listener = TcpListener::bind(&config.listen)
        .await
        .map_err(|error| config.cannot_listen(error))?;
    let address = listener.local_addr()?;
    let app = tokio::task::spawn_blocking(move || startup::start(config, address)).await??;

    let ended = startup::end_asked_for()?;
    tokio::spawn({
        let stop = app.stop.clone();
        async move {
            ended.await;
            stop.cancel();
        }
    });

    startup::announce(&app);
    let server = axum::serve(listener, routes::router(app.clone()))
        .with_graceful_shutdown(app.stop.clone().cancelled_owned())
        .into_future();
    tokio::select! {
        served = server => served?,
        () = after(GRACE, &app) => tracing::warn!("some clients did not let go"),
    }
    app.finish().await;
    tracing::info!("ended");
    Ok(())
}

async fn after(grace: Duration, app: &App) {
    app.stop.cancelled().await;
    tokio::time::sleep(grace).await;
}
