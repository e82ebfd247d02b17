//! What all requests share.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::Instrument;

use crate::config::Config;
use crate::geocoder::Geocoder;

/// The state of an application with a pool of this kind. Cheap to clone.
#[derive(Debug, Clone)]
pub struct App<P> {
    pub pool: P,
    pub config: Arc<Config>,
    pub geocoder: Arc<Geocoder>,
    /// Where it can be asked from this machine.
    pub address: SocketAddr,
    /// Cancelled when the application is to end.
    pub stop: CancellationToken,
    jobs: TaskTracker,
}

impl<P> App<P> {
    pub fn new(config: Config, pool: P, geocoder: Geocoder, address: SocketAddr) -> Self {
        Self {
            pool,
            config: Arc::new(config),
            geocoder: Arc::new(geocoder),
            address,
            stop: CancellationToken::new(),
            jobs: TaskTracker::new(),
        }
    }

    /// Does work in a task of its own, which runs to its end even if its request is dropped.
    pub fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send + 'static> + Send + 'static,
    {
        self.jobs.spawn(work.in_current_span())
    }

    /// As [`spawn`](Self::spawn), for work that blocks.
    pub fn spawn_blocking<T, F>(&self, work: F) -> JoinHandle<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let span = tracing::Span::current();
        self.jobs.spawn_blocking(move || span.in_scope(work))
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
