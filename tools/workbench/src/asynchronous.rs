//! Asynchronous connections and pools, and a runtime for tests.

#[cfg(feature = "tls")]
mod tls;

use std::sync::OnceLock;
use std::time::Duration;

use diesel::result::ConnectionResult;
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod, bb8, deadpool,
};
use diesel_async::{AsyncConnection, AsyncPgConnection};
use tokio::runtime::{Builder, Runtime};

use crate::endpoint::{Endpoint, cannot};

/// The runtime that all tests of a process share. It has four threads, and never ends.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build()
            .unwrap_or_else(cannot("make a runtime"))
    })
}

/// Runs a future on the calling thread, which must not belong to a runtime. Tasks that it spawns run on [`runtime`].
pub fn block_on<F: Future>(future: F) -> F::Output {
    runtime().block_on(future)
}

impl Endpoint {
    /// Opens an asynchronous connection.
    pub async fn connect_async(&self) -> AsyncPgConnection {
        let connected = self.try_connect_async().await;
        connected.unwrap_or_else(cannot("connect"))
    }

    /// Opens an asynchronous connection, or says why not.
    pub async fn try_connect_async(&self) -> ConnectionResult<AsyncPgConnection> {
        #[cfg(feature = "tls")]
        if self.requires_tls() {
            return tls::establish(self.clone()).await;
        }
        AsyncPgConnection::establish(&self.url()).await
    }

    /// A pool of deadpool with at most `size` connections, which are not tested at a checkout.
    pub fn deadpool(&self, size: u32) -> deadpool::Pool<AsyncPgConnection> {
        deadpool::Pool::builder(self.async_manager(RecyclingMethod::Fast))
            .max_size(size as usize)
            .build()
            .unwrap_or_else(cannot("make a pool"))
    }

    /// A pool of bb8 with at most `size` connections, which are not tested at a checkout. A checkout from an exhausted
    /// pool fails after ten seconds.
    pub fn bb8(&self, size: u32) -> bb8::Pool<AsyncPgConnection> {
        let _entered = runtime().enter();
        bb8::Pool::builder()
            .max_size(size)
            .test_on_check_out(false)
            .connection_timeout(Duration::from_secs(10))
            .build_unchecked(self.async_manager(RecyclingMethod::Fast))
    }

    /// The manager for an asynchronous pool with other settings. Connections use TLS if the endpoint requires it.
    pub fn async_manager(
        &self,
        recycling_method: RecyclingMethod<AsyncPgConnection>,
    ) -> AsyncDieselConnectionManager<AsyncPgConnection> {
        let mut config = ManagerConfig::default();
        config.recycling_method = recycling_method;
        let endpoint = self.clone();
        config.custom_setup = Box::new(move |_| {
            let endpoint = endpoint.clone();
            Box::pin(async move { endpoint.try_connect_async().await })
        });
        AsyncDieselConnectionManager::new_with_config(self.url(), config)
    }
}
