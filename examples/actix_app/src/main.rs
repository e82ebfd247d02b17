//! A web application on actix-web and Diesel whose instances share one database: see README.md.

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

use std::future::Future;
use std::io::IsTerminal;
use std::net::TcpListener;
use std::time::Duration;

use actix_web::middleware::from_fn;
use actix_web::rt::signal::unix::{SignalKind, signal};
use actix_web::rt::time::timeout;
use actix_web::web::{self, Data};
use actix_web::{HttpServer, rt};
use anyhow::Context;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::app::App;
use crate::config::Config;
use crate::geocoder::Geocoder;

/// How long requests may take when the application is to end.
const GRACE: Duration = Duration::from_secs(20);

#[actix_web::main]
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
    let listener =
        TcpListener::bind(&config.listen).with_context(|| format!("LISTEN={}", config.listen))?;
    let address = listener.local_addr()?;
    let app = web::block(move || start(config)).await??;

    let state = Data::new(app.clone());
    let server = HttpServer::new(move || {
        actix_web::App::new()
            .app_data(state.clone())
            .wrap(from_fn(routes::each_request))
            .configure(|service| routes::configure(service, state.config.chaos))
    })
    .listen(listener)?
    .h1_allow_half_closed(false) // a client that hangs up is not waited for
    .disable_signals()
    .shutdown_timeout(1)
    .run();

    let ended = shutdown_signal()?;
    rt::spawn({
        let (app, server) = (app.clone(), server.handle());
        async move {
            ended.await;
            // Waited for here, since actix-server may end a worker with requests in flight
            // (actix/actix-net#945).
            server.pause().await;
            let _ = timeout(GRACE, app.finish()).await;
            server.stop(true).await;
        }
    });
    println!("listening on http://{address}");
    server.await?;
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
