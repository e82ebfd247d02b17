//! What all requests share, and how they do work that blocks.

use std::sync::Arc;

use actix_web::web;
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
    /// Cancelled when the application is to end.
    pub stop: CancellationToken,
    jobs: TaskTracker,
}

impl App {
    pub fn new(config: Config, pool: PgPool, geocoder: Geocoder) -> Self {
        Self {
            pool,
            config: Arc::new(config),
            geocoder: Arc::new(geocoder),
            stop: CancellationToken::new(),
            jobs: TaskTracker::new(),
        }
    }

    /// Does the work of a request on a thread that may block: Diesel, and whatever is held while it
    /// lasts.
    ///
    /// The work runs to its end, so what it holds is released on every way out: an early `?`, a panic,
    /// or an answer that nobody waits for any more. What takes long asks its token whether to go on:
    /// it is cancelled when the client hangs up, the request times out, or the application is to end.
    pub async fn block<T, F>(&self, work: F) -> Result<T, AppError>
    where
        T: Send + 'static,
        F: FnOnce(&App, &CancellationToken) -> Result<T, AppError> + Send + 'static,
    {
        let app = self.clone();
        let stop = self.stop.child_token();
        let _cancels_when_dropped = stop.clone().drop_guard();
        let job = self.in_progress();
        let span = tracing::Span::current();
        let answer = web::block(move || {
            let _until_the_end = job;
            span.in_scope(|| work(&app, &stop))
        });
        answer
            .await
            .map_err(|panic| AppError::Panicked(panic.to_string()))?
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

    /// What [`finish`](Self::finish) waits for to be dropped.
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
