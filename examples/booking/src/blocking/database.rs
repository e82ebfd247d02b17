//! The pool of connections, and what the database needs before the first request.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Error, Pool};
use diesel_interlock::{PgPool, migrations, sync};

use crate::cache::Resource;
use crate::config::Config;
use crate::database::{MIGRATIONS, PATIENCE, log_different, log_ran, set_config};

/// Opens the pool.
pub fn pool(config: &Config) -> anyhow::Result<PgPool> {
    let pool = Pool::builder()
        .max_size(config.pool_size)
        .min_idle(Some(1))
        .connection_timeout(PATIENCE)
        .connection_customizer(Box::new(Introduce(config.instance.clone())))
        .build(ConnectionManager::new(&config.database_url))?;
    Ok(pool)
}

/// Brings the schema up to date, on one instance at a time: that of the library, and our own beside it.
pub fn prepare(pool: &PgPool) -> anyhow::Result<()> {
    let conn = &mut pool.get()?;
    migrations::install(conn)?;
    log_ran(&migrations::run_pending(conn, MIGRATIONS)?);
    log_different(sync::<Resource>(conn)?);
    Ok(())
}

/// Tells the server who we are, so that it can say who holds a lock.
#[derive(Debug)]
struct Introduce(String);

impl CustomizeConnection<PgConnection, Error> for Introduce {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), Error> {
        diesel::select(set_config("application_name", &self.0, false))
            .execute(conn)
            .map_err(Error::QueryError)?;
        Ok(())
    }
}
