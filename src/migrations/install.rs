//! Installing this crate's own schema, beside the application's migrations.

use diesel::migration::{Migration, MigrationSource, MigrationVersion};
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};
use diesel_migrations::{EmbeddedMigrations, embed_migrations};

use super::LOCK;
use crate::error::{Error, Result};
use crate::installed;
use crate::transaction;

/// This crate's own migrations, those of its directory `migrations/`.
const OURS: EmbeddedMigrations = embed_migrations!("migrations");

/// Installs this crate's schema `resource_control`, or brings it up to date; answers the versions
/// that it ran.
///
/// Meant for every start of a program, also of twenty instances at once. It reads first, in two
/// round trips; with nothing to do it sends no DDL and needs no rights beyond those of the
/// [grants](#grants). Otherwise it takes the session lock [`LOCK`] and runs each pending migration in
/// a transaction of its own.
///
/// The versions are kept in `resource_control.installed_migration`, apart from the application's
/// own, so `diesel migration revert` never trips over them. The other way to install the schema is to
/// copy the directories of `migrations/` among the application's own.
///
/// # Grants
///
/// The role that installs becomes the owner. Another role that is to use the schema needs
/// ```sql
/// GRANT USAGE ON SCHEMA resource_control TO app;
/// GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO app;
/// ```
///
/// # Errors
///
/// - [`Error::CommitsInTransaction`] inside a transaction, a test transaction included.
/// - [`Error::ForeignInstallation`] if the schema is there, but this function did not make it.
/// - [`Error::Migration`] if a migration failed, as it does for a role that may not create a schema.
///   Those before it stay.
/// - Those of [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on).
pub fn install(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(conn)?;
    if pending(conn)?.is_empty() {
        return Ok(Vec::new());
    }
    let mut guard = LOCK.acquire_on(conn)?;
    let mut ran = Vec::new();
    for migration in pending(guard.conn())? {
        let version = migration.name().version().as_owned();
        guard
            .conn()
            .transaction(|conn| run(conn, migration.as_ref()))?;
        ran.push(version);
    }
    guard.release()?;
    Ok(ran)
}

/// Each migration writes its own version.
fn run(conn: &mut PgConnection, migration: &dyn Migration<Pg>) -> Result<()> {
    migration.run(conn).map_err(Error::Migration)?;
    Ok(())
}

/// Our migrations that were not installed yet, in their order.
fn pending(conn: &mut PgConnection) -> Result<Vec<Box<dyn Migration<Pg>>>> {
    #[derive(QueryableByName)]
    struct Present {
        #[diesel(sql_type = Bool)]
        schema: bool,
        #[diesel(sql_type = Bool)]
        versions: bool,
    }
    #[derive(QueryableByName)]
    struct Installed {
        #[diesel(sql_type = Text)]
        version: String,
    }
    let present: Present = diesel::sql_query(
        "SELECT count(nspname) > 0 AS schema, count(relname) > 0 AS versions \
         FROM pg_catalog.pg_namespace LEFT JOIN pg_catalog.pg_class \
         ON relnamespace = pg_namespace.oid AND relname = 'installed_migration' \
         WHERE nspname = 'resource_control'",
    )
    .get_result(conn)?;
    let installed: Vec<Installed> = match present {
        Present { versions: true, .. } => {
            diesel::sql_query("SELECT version FROM resource_control.installed_migration")
                .load(conn)
                .map_err(|error| installed::explain(conn, error, None))?
        }
        Present { schema: true, .. } => return Err(Error::ForeignInstallation),
        _ => Vec::new(),
    };
    let mut ours = MigrationSource::<Pg>::migrations(&OURS).map_err(Error::Migration)?;
    ours.sort_by(|one, other| one.name().version().cmp(&other.name().version()));
    ours.retain(|migration| {
        let version = migration.name().version().to_string();
        installed.iter().all(|row| row.version != version)
    });
    Ok(ours)
}
