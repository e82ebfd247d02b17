//! A web application on axum and Diesel whose instances share one database: see README.md.

// An application, not an interface.
#![allow(missing_docs, unreachable_pub)]

mod admin;
mod app;
mod cache;
mod chaos;
mod config;
mod database;
mod error;
mod geocoder;
mod reports;
mod reservations;
mod routes;
mod schema;

use std::future::{Future, IntoFuture};
use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::app::App;
use crate::config::Config;
use crate::geocoder::Geocoder;

/// How long clients may take to let go of their connections when the application is to end.
const GRACE: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let log: Targets = std::env::var("LOG")
        .as_deref()
        .unwrap_or("info,diesel_interlock=debug")
        .parse()?;
    let format = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry()
        .with(format.with_filter(log))
        .init();
    let config = Config::from_env()?;
    let listener = TcpListener::bind(&config.listen)
        .await
        .with_context(|| format!("LISTEN={}", config.listen))?;
    let app = tokio::task::spawn_blocking(move || start(config)).await??;

    let ended = shutdown_signal()?;
    tokio::spawn({
        let stop = app.stop.clone();
        async move {
            ended.await;
            stop.cancel();
        }
    });

    println!("listening on http://{}", listener.local_addr()?);
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

/// All that is to be done before the first request. Blocks.
fn start(config: Config) -> anyhow::Result<App> {
    let pool = database::pool(&config).context("DATABASE_URL")?;
    database::prepare(&pool)?;
    let backend = match &config.backend {
        Some(url) => url.clone(),
        None => {
            let service =
                fragile_geocoder::FragileGeocoder::start("127.0.0.1:0", Duration::from_secs(1))?;
            tracing::info!(
                "a geocoder for this and other instances: BACKEND={}",
                service.url()
            );
            service.url()
        }
    };
    let geocoder = Geocoder::new(&config, &backend);
    Ok(App::new(config, pool, geocoder))
}

/// Completes at Ctrl-C, or when whoever started the application wants it to end.
fn shutdown_signal() -> std::io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

async fn after(grace: Duration, app: &App) {
    app.stop.cancelled().await;
    tokio::time::sleep(grace).await;
}
