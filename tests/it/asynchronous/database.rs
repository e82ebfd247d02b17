//! A database whose connections are asynchronous.

use std::ops::Deref;

use diesel::{Connection, ConnectionError};
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod,
};
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};

use super::pool::Setup;
use super::{PgConnection, PgPool};

#[derive(Debug)]
pub(crate) struct Database(pub(super) workbench::Database);

impl Database {
    #[allow(clippy::new_without_default)]
    pub(crate) fn new() -> Self {
        Self(workbench::Database::new())
    }

    pub(crate) fn connect(&self) -> PgConnection {
        PgConnection::establish(&self.url())
            .unwrap_or_else(|error| panic!("cannot connect to the database: {error}"))
    }

    /// A pool of at most `size` connections, which are checked as they are borrowed by [`PgPool::get`].
    pub(crate) fn pool(&self, size: u32) -> PgPool {
        PgPool::of(self, size)
    }
}

/// The rest is as for blocking connections.
impl Deref for Database {
    type Target = workbench::Database;

    fn deref(&self) -> &workbench::Database {
        &self.0
    }
}

/// The URL as tokio-postgres accepts it, which refuses parameters that only libpq knows.
pub(super) fn async_url(url: &str) -> String {
    let Some((server, parameters)) = url.split_once('?') else {
        return url.to_owned();
    };
    let known: Vec<_> = parameters
        .split('&')
        .filter(|parameter| !parameter.starts_with("gssencmode="))
        .collect();
    format!("{server}?{}", known.join("&"))
}

/// What opens the connections of a pool.
pub(super) fn manager(url: &str, setup: Setup) -> AsyncDieselConnectionManager<AsyncPgConnection> {
    let mut config = ManagerConfig::default();
    config.recycling_method = match setup {
        Setup::Unchecked => RecyclingMethod::Fast,
        _ => RecyclingMethod::Verified,
    };
    config.custom_setup = Box::new(move |url| {
        let setup = setup.clone();
        Box::pin(async move {
            let mut conn = <AsyncPgConnection as AsyncConnection>::establish(url).await?;
            let is_set_up = match setup {
                Setup::Unchecked | Setup::Checked => Ok(()),
                Setup::Runs(sql) => SimpleAsyncConnection::batch_execute(&mut conn, &sql).await,
                Setup::Instrumented(instrumentation) => {
                    conn.set_instrumentation(instrumentation);
                    Ok(())
                }
                Setup::InTestTransaction => conn.begin_test_transaction().await,
            };
            is_set_up.map_err(ConnectionError::CouldntSetupConfiguration)?;
            Ok(conn)
        })
    });
    AsyncDieselConnectionManager::new_with_config(async_url(url), config)
}
