//! The pool of connections, and what the database needs before the first request.

use std::time::Duration;

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Error, Pool};
use diesel::sql_types::{Bool, Text};
use diesel_interlock::{PgPool, migrations, sync};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};

use crate::cache::Resource;
use crate::config::Config;

const MIGRATIONS: EmbeddedMigrations = embed_migrations!();

/// How long a request waits for a connection before it is told to come back.
const PATIENCE: Duration = Duration::from_secs(5);

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
    for version in migrations::run_pending(conn, MIGRATIONS)? {
        tracing::info!(%version, "ran a migration");
    }
    for difference in sync::<Resource>(conn)?.different {
        tracing::warn!(
            ?difference,
            "the database has another interval, which holds"
        );
    }
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

#[diesel::declare_sql_function]
extern "SQL" {
    fn set_config(name: Text, value: Text, is_local: Bool) -> Text;
}
