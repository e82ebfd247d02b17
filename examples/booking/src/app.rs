//! What all requests share.

use std::net::SocketAddr;
use std::sync::Arc;

use diesel_interlock::PgPool;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::config::Config;
use crate::error::AppError;
use crate::geocoder::Geocoder;

/// The state of the application. Cheap to clone.
#[derive(Debug, Clone)]
pub struct App {
    pub pool: PgPool,
    pub config: Arc<Config>,
    pub geocoder: Arc<Geocoder>,
    /// Where it can be asked from this machine.
    pub address: SocketAddr,
    /// Cancelled when the application is to end.
    pub stop: CancellationToken,
    jobs: TaskTracker,
}

impl App {
    pub fn new(config: Config, pool: PgPool, geocoder: Geocoder, address: SocketAddr) -> Self {
        Self {
            pool,
            config: Arc::new(config),
            geocoder: Arc::new(geocoder),
            address,
            stop: CancellationToken::new(),
            jobs: TaskTracker::new(),
        }
    }

    /// Does work that no request waits for.
    pub fn in_background<F>(&self, what: &'static str, work: F)
    where
        F: FnOnce(&App) -> Result<(), AppError> + Send + 'static,
    {
        let app = self.clone();
        self.jobs.spawn_blocking(move || {
            if let Err(error) = work(&app) {
                tracing::error!(error = &error as &dyn std::error::Error, "{what} failed");
            }
        });
    }

    /// Returns a token; [`finish`](Self::finish) waits until it is dropped.
    pub fn in_progress(&self) -> TaskTrackerToken {
        self.jobs.token()
    }

    /// Waits for the end of all work.
    pub async fn finish(&self) {
        self.stop.cancel();
        self.jobs.close();
        self.jobs.wait().await;
    }
}
