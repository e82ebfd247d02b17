//! What the schema records of our migrations.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};

use super::ours::{OURS, OurMigration};
use crate::error::Result;
use crate::installed;

/// What of this crate is in a database.
#[derive(Debug)]
pub(super) enum Recorded {
    /// There is no schema `resource_control`.
    Nothing,
    /// There is one in which no version is recorded: somebody made it by hand, or copied it without its
    /// rows.
    NoVersion,
    /// The versions that were run, those of newer releases among them.
    Versions(Vec<String>),
}

impl Recorded {
    /// Our migrations that were not run, in their order.
    pub(super) fn pending(&self) -> impl Iterator<Item = &'static OurMigration> {
        let ran: &[String] = match self {
            Recorded::Versions(ran) => ran,
            _ => &[],
        };
        OURS.iter()
            .filter(move |ours| !ran.contains(&ours.version().to_string()))
    }

    /// Looks: two reads, under whatever search path.
    pub(super) fn of(conn: &mut PgConnection) -> Result<Self> {
        #[derive(QueryableByName)]
        struct Present {
            #[diesel(sql_type = Bool)]
            schema: bool,
            #[diesel(sql_type = Bool)]
            versions: bool,
        }
        #[derive(QueryableByName)]
        struct Row {
            #[diesel(sql_type = Text)]
            version: String,
        }
        let present: Present = diesel::sql_query(
            "SELECT pg_catalog.count(nspname) OPERATOR(pg_catalog.>) 0 AS schema, \
                 pg_catalog.count(attname) OPERATOR(pg_catalog.>) 0 AS versions \
             FROM pg_catalog.pg_namespace \
             LEFT JOIN pg_catalog.pg_class ON relnamespace OPERATOR(pg_catalog.=) pg_namespace.oid \
                 AND relname OPERATOR(pg_catalog.=) 'installed_migration' \
                 AND relkind OPERATOR(pg_catalog.=) 'r' \
             LEFT JOIN pg_catalog.pg_attribute ON attrelid OPERATOR(pg_catalog.=) pg_class.oid \
                 AND attname OPERATOR(pg_catalog.=) 'version' \
             WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'",
        )
        .get_result(conn)?;
        if !present.schema {
            return Ok(Recorded::Nothing);
        }
        if !present.versions {
            return Ok(Recorded::NoVersion);
        }
        let rows: Vec<Row> = diesel::sql_query(
            "SELECT version::pg_catalog.text FROM resource_control.installed_migration",
        )
        .load(conn)
        .map_err(|error| installed::explain_on(conn, error, None))?;
        let versions: Vec<_> = rows.into_iter().map(|row| row.version).collect();
        Ok(if versions.is_empty() {
            Recorded::NoVersion
        } else {
            Recorded::Versions(versions)
        })
    }
}
