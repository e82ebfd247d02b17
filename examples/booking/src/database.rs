//! What the database needs before the first request, and how long a request waits for a connection.

use std::fmt::Display;
use std::time::Duration;

use diesel::sql_types::{Bool, Text};
use diesel_interlock::Synced;
use diesel_migrations::{EmbeddedMigrations, embed_migrations};

/// The tables of this application.
pub(crate) const MIGRATIONS: EmbeddedMigrations = embed_migrations!();

/// How long a request waits for a connection before it is told to come back.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn log_ran(versions: &[impl Display]) {
    for version in versions {
        tracing::info!(%version, "ran a migration");
    }
}

pub(crate) fn log_different(synced: Synced) {
    for difference in synced.different {
        tracing::warn!(
            ?difference,
            "the database has another interval, which holds"
        );
    }
}

#[diesel::declare_sql_function]
extern "SQL" {
    fn set_config(name: Text, value: Text, is_local: Bool) -> Text;
}
