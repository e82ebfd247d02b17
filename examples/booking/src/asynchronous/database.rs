//! The pool of connections, and what the database needs before the first request.

use deadpool::Runtime;
use deadpool::managed::{HookError, QueueMode};
use diesel_async::pooled_connection::deadpool::{Hook, Pool};
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, PoolError, RecyclingMethod,
};
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use diesel_interlock::asynchronous::{migrations, sync};

use super::PgPool;
use crate::cache::Resource;
use crate::config::Config;
use crate::database::{MIGRATIONS, PATIENCE, log_different, log_ran, set_config};

/// Makes the pool. It opens connections when they are first needed.
pub fn pool(config: &Config) -> anyhow::Result<PgPool> {
    let mut settings = ManagerConfig::default();
    // A connection that was closed is noticed by its socket. The default asks the server at each checkout.
    settings.recycling_method = RecyclingMethod::Fast;
    let url = config.database_url.as_str();
    let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new_with_config(url, settings);
    let pool = Pool::builder(manager)
        .max_size(config.pool_size as usize)
        .queue_mode(QueueMode::Lifo) // the connection that was used last is the fastest
        .runtime(Runtime::Tokio1) // the timeouts need it
        .wait_timeout(Some(PATIENCE))
        .create_timeout(Some(PATIENCE))
        .post_create(introduce(config.instance.clone()))
        .build()?;
    Ok(pool)
}

/// Brings the schema up to date, on one instance at a time: that of the library, and our own beside it.
pub async fn prepare(pool: &PgPool) -> anyhow::Result<()> {
    migrations::install(pool).await?;
    log_ran(&migrations::run_pending(pool, MIGRATIONS).await?);
    log_different(sync::<Resource>(pool).await?);
    Ok(())
}

/// Tells the server who we are, so that it can say who holds a lock.
fn introduce(instance: String) -> Hook<AsyncPgConnection> {
    Hook::async_fn(move |conn: &mut AsyncPgConnection, _| {
        let named = diesel::select(set_config("application_name", instance.clone(), false));
        Box::pin(async move {
            let named = named.execute(conn).await.map(drop);
            named.map_err(|error| HookError::Backend(PoolError::QueryError(error)))
        })
    })
}
