//! From the environment to a running application, and the signal that ends it.

use std::io::IsTerminal;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

use crate::app::App;
use crate::config::Config;
use crate::geocoder::Geocoder;

/// Logs to standard error, as the variable `LOG` says.
pub fn log() -> anyhow::Result<()> {
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
    Ok(())
}

/// Makes the application of a program that listens there. Its pool and its database are ready.
pub(crate) fn app<P>(config: Config, pool: P, listening: SocketAddr) -> anyhow::Result<App<P>> {
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
    Ok(App::new(config, pool, geocoder, from_here(listening)))
}

/// Prints where to look.
pub fn announce<P>(app: &App<P>) {
    println!("try it:  http://{}/", app.address);
    println!("locks:   http://{}/admin/locks", app.address);
}

/// The address that a program on this machine reaches it by.
fn from_here(mut listening: SocketAddr) -> SocketAddr {
    match listening.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => listening.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => listening.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    listening
}

/// Returns a future that completes at Ctrl-C or SIGTERM.
pub fn end_asked_for() -> std::io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
