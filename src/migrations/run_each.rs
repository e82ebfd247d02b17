//! The pending migrations of an application, run by Diesel's harness.

use diesel::migration::{Migration, MigrationSource, MigrationVersion};
use diesel::pg::Pg;
use diesel_migrations::MigrationHarness;

use crate::error::{Error, Result};

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// The error of a migration that Diesel does not name.
#[derive(Debug, thiserror::Error)]
#[error("the migration {name} failed")]
struct Failed {
    name: String,
    source: Cause,
}

/// Runs the pending migrations in their order, until one fails. Returns the versions.
pub(super) fn run_each(
    harness: &mut impl MigrationHarness<Pg>,
    source: impl MigrationSource<Pg>,
) -> Result<Vec<MigrationVersion<'static>>> {
    let pending = harness.pending_migrations(source);
    let pending = pending.map_err(Error::Migration)?;
    let ran = pending.iter().map(|migration| {
        let ran = harness.run_migration(migration);
        ran.map_err(|error| Error::Migration(named(migration, error)))
    });
    ran.collect()
}

/// Diesel names the migration if one of its statements failed, but not if its commit did, or if it ended the session.
fn named(migration: &dyn Migration<Pg>, source: Cause) -> Cause {
    let name = migration.name().to_string();
    if source.to_string().contains(&name) {
        return source;
    }
    Box::new(Failed { name, source })
}
