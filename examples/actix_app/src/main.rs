//! A web application on actix-web and Diesel whose instances share one database: see README.md.

// An application, not an interface.
#![allow(missing_docs, missing_debug_implementations, unreachable_pub)]

mod blocking;
mod failure;
mod limit;
mod routes;

use std::net::TcpListener;
use std::time::Duration;

use actix_web::middleware::from_fn;
use actix_web::rt::time::timeout;
use actix_web::web::{self, Data};
use actix_web::{HttpServer, rt};
use booking::{Config, startup};

/// How long requests may take when the application is to end.
const GRACE: Duration = Duration::from_secs(20);

#[actix_web::main]
async fn main() -> anyhow::Result<()> {
    startup::log()?;
    let config = Config::from_env(env!("CARGO_PKG_NAME"))?;
    let listener =
        TcpListener::bind(&config.listen).map_err(|error| config.cannot_listen(error))?;
    let address = listener.local_addr()?;
    let app = web::block(move || booking::blocking::start(config, address)).await??;

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

    let ended = startup::end_asked_for()?;
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
    startup::announce(&app);
    server.await?;
    app.finish().await;
    tracing::info!("ended");
    Ok(())
}
