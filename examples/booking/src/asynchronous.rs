//! The same without blocking: the work of `axum_async_app`, over deadpool and diesel-async.

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
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::deadpool::{Pool, PoolError};
use diesel_interlock::Error;
use tokio::task::JoinError;

use crate::config::Config;
use crate::error::AppError;
use crate::{app, startup};

/// The pool of connections.
pub type PgPool = Pool<AsyncPgConnection>;

/// The state of the application.
pub type App = app::App<PgPool>;

/// Does all that comes before the first request of a program that listens there.
pub async fn start(config: Config, listening: SocketAddr) -> anyhow::Result<App> {
    let pool = database::pool(&config)?;
    database::prepare(&pool).await.context("DATABASE_URL")?;
    startup::app(config, pool, listening)
}

/// The result of a task that was awaited.
pub fn joined<T>(returned: Result<Result<T, AppError>, JoinError>) -> Result<T, AppError> {
    returned.map_err(|panic| AppError::Panicked(panic.to_string()))?
}

/// For `?` on `pool.get()`.
impl From<PoolError> for AppError {
    fn from(error: PoolError) -> Self {
        Self::Interlock(Error::Pool(error.into()))
    }
}
