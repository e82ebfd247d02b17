//! Asynchronous connections and pools.

use std::future::Future;
use std::time::Duration;

use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod, bb8, deadpool,
};
use diesel_async::{AsyncConnection, AsyncPgConnection};

use super::Database;
use crate::RoundTrips;

/// Runs a future on a runtime of two threads, and shuts the runtime down.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap_or_else(|error| panic!("cannot make a runtime: {error}"));
    runtime.block_on(future)
}

impl Database {
    /// The URL as tokio-postgres accepts it, which refuses parameters that only libpq knows.
    pub fn async_url(&self) -> String {
        without_parameters_of_libpq(self.url())
    }

    /// Opens an asynchronous connection, and panics if it cannot.
    pub async fn connect_async(&self) -> AsyncPgConnection {
        AsyncPgConnection::establish(&self.async_url())
            .await
            .unwrap_or_else(|error| panic!("cannot connect to the database: {error}"))
    }

    /// A pool of deadpool with at most `size` connections, which are not checked at a checkout.
    pub fn deadpool(&self, size: u32) -> deadpool::Pool<AsyncPgConnection> {
        deadpool(self.async_manager(RecyclingMethod::Fast), size)
    }

    /// A pool of bb8 with at most `size` connections, which are not checked at a checkout. A checkout from an exhausted pool
    /// fails after ten seconds. Call it inside a runtime.
    pub fn bb8(&self, size: u32) -> bb8::Pool<AsyncPgConnection> {
        bb8::Pool::builder()
            .max_size(size)
            .test_on_check_out(false)
            .connection_timeout(Duration::from_secs(10))
            .build_unchecked(self.async_manager(RecyclingMethod::Fast))
    }

    /// What opens the connections of an asynchronous pool with settings of its own.
    pub fn async_manager(
        &self,
        recycling_method: RecyclingMethod<AsyncPgConnection>,
    ) -> AsyncDieselConnectionManager<AsyncPgConnection> {
        manager(self.async_url(), recycling_method)
    }
}

impl RoundTrips {
    /// As [`Database::async_url`], through the proxy.
    pub fn async_url(&self) -> String {
        without_parameters_of_libpq(self.url())
    }

    /// As [`Database::deadpool`], through the proxy.
    pub fn deadpool(&self, size: u32) -> deadpool::Pool<AsyncPgConnection> {
        deadpool(manager(self.async_url(), RecyclingMethod::Fast), size)
    }
}

fn without_parameters_of_libpq(url: String) -> String {
    let Some((server, parameters)) = url.split_once('?') else {
        return url;
    };
    let known = parameters
        .split('&')
        .filter(|parameter| !parameter.starts_with("gssencmode="))
        .collect::<Vec<_>>();
    format!("{server}?{}", known.join("&"))
}

fn manager(
    url: String,
    recycling_method: RecyclingMethod<AsyncPgConnection>,
) -> AsyncDieselConnectionManager<AsyncPgConnection> {
    let mut config = ManagerConfig::default();
    config.recycling_method = recycling_method;
    AsyncDieselConnectionManager::new_with_config(url, config)
}

fn deadpool(
    manager: AsyncDieselConnectionManager<AsyncPgConnection>,
    size: u32,
) -> deadpool::Pool<AsyncPgConnection> {
    deadpool::Pool::builder(manager)
        .max_size(size as usize)
        .build()
        .unwrap_or_else(|error| panic!("cannot make a pool: {error}"))
}
