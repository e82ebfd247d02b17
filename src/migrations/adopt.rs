//! Adopting a schema that somebody made by hand.

use diesel::connection::SimpleConnection;
use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;

use super::description::Description;
use super::ours::OURS;
use super::rights;
use super::statements::statements;
use crate::error::{Error, Result};

/// Makes the schema what the migrations make, if what is there of it is that already; answers the
/// versions, all of which it records. Runs inside a transaction.
pub(super) fn adopt(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    pin_search_path(conn)?;
    let expected = expected(conn)?;
    let differences = Description::of(conn)?.differences(&expected);
    if !differences.is_empty() {
        return Err(Error::ForeignInstallation { differences });
    }
    for migration in &OURS {
        for statement in statements(migration.up) {
            migration.execute(conn, &unless_there(statement))?;
        }
    }
    for parameter in Description::of(conn)?.storage_parameters(&expected) {
        conn.batch_execute(&parameter)?;
    }
    let differences = Description::of(conn)?.all_differences(&expected);
    if !differences.is_empty() {
        return Err(Error::ForeignInstallation { differences });
    }
    Ok(OURS.iter().map(|ours| ours.version()).collect())
}

/// Describes what the migrations make on this server, in this transaction, which it leaves as it was:
/// beside the present schema, renamed for the purpose, they make a new one.
pub(super) fn expected(conn: &mut PgConnection) -> Result<Description> {
    rights::require_creating_schemas(conn)?;
    let mut description = None;
    let undone = conn.transaction(|conn| {
        conn.batch_execute("ALTER SCHEMA resource_control RENAME TO diesel_interlock_aside")?;
        for migration in &OURS {
            migration.run(conn)?;
        }
        description = Some(Description::of(conn)?);
        Err::<(), _>(Error::Database(DieselError::RollbackTransaction))
    });
    match (undone, description) {
        (Err(Error::Database(DieselError::RollbackTransaction)), Some(description)) => {
            Ok(description)
        }
        (Err(error), _) => Err(error),
        (Ok(()), _) => Err(Error::Database(DieselError::BrokenTransactionManager)),
    }
}

/// Until the transaction ends, names mean what they do by default, and the server writes out the
/// schema of every other.
pub(super) fn pin_search_path(conn: &mut PgConnection) -> QueryResult<()> {
    conn.batch_execute("SET LOCAL search_path = pg_catalog, pg_temp")
}

/// The statement, made to do nothing if what it creates is there, and to replace functions.
fn unless_there(statement: &str) -> String {
    let (create, name) = match statement.strip_prefix("CREATE FUNCTION ") {
        Some(name) => ("CREATE OR REPLACE FUNCTION ", name),
        None => ("", statement),
    };
    format!(
        "DO $unless_there$ BEGIN EXECUTE $statement${create}{name}$statement$; \
         EXCEPTION WHEN duplicate_schema OR duplicate_object OR duplicate_table OR duplicate_column \
         OR duplicate_function THEN NULL; END $unless_there$"
    )
}
