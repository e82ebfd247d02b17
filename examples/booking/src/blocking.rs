//! What blocks: the work of `axum_app` and `actix_app`, over r2d2 and Diesel's own connection.

pub mod cache;
pub mod chaos;
pub mod database;
pub mod geocoder;
pub mod limits;
pub mod quotas;
pub mod reports;
pub mod reservations;
pub mod status;

use std::net::SocketAddr;

use anyhow::Context;
use diesel::r2d2::PoolError;
use diesel_interlock::PgPool;

use crate::config::Config;
use crate::error::AppError;
use crate::{app, startup};

/// The state of the application.
pub type App = app::App<PgPool>;

/// Does all that comes before the first request of a program that listens there. Blocks.
pub fn start(config: Config, listening: SocketAddr) -> anyhow::Result<App> {
    let pool = database::pool(&config).context("DATABASE_URL")?;
    database::prepare(&pool)?;
    startup::app(config, pool, listening)
}

/// For `?` on `pool.get()`.
impl From<PoolError> for AppError {
    fn from(error: PoolError) -> Self {
        Self::Interlock(error.into())
    }
}
