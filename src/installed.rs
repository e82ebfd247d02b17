//! The reason of a failure in the database, queried from the catalogue after an operation failed.

use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel::sql_types::{Bool, Text};

use crate::error::{Error, Result, Schema};
use crate::session::Session;
use crate::transaction::Transaction;

#[derive(QueryableByName)]
struct Present {
    #[diesel(sql_type = Text)]
    role: String,
    #[diesel(sql_type = Bool)]
    usage: bool,
    #[diesel(sql_type = Bool)]
    newest: bool,
    #[diesel(sql_type = Bool)]
    tables: bool,
    #[diesel(sql_type = Bool)]
    functions: bool,
    #[diesel(sql_type = Bool)]
    label: bool,
}

/// Reads from the catalogue, which needs no rights on the schema, whether the role has the rights that `grants.sql` gives,
/// and whether the function that was added last exists.
const PRESENT: &str = "
    WITH schema AS (
        SELECT oid FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'
    )
    SELECT current_user::pg_catalog.text AS role,
        NOT EXISTS (SELECT FROM schema
            WHERE NOT pg_catalog.has_schema_privilege(schema.oid, 'USAGE')) AS usage,
        EXISTS (SELECT FROM pg_catalog.pg_proc, schema
            WHERE pronamespace OPERATOR(pg_catalog.=) schema.oid AND proname OPERATOR(pg_catalog.=) 'prune_rate_limits') AS newest,
        NOT EXISTS (SELECT FROM pg_catalog.pg_class, schema
            WHERE relnamespace OPERATOR(pg_catalog.=) schema.oid AND relkind OPERATOR(pg_catalog.=) 'r'
            AND NOT (pg_catalog.has_table_privilege(pg_class.oid, 'SELECT')
                AND (relname OPERATOR(pg_catalog.=) 'installed_migration'
                    OR pg_catalog.has_table_privilege(pg_class.oid, 'INSERT')
                    AND pg_catalog.has_table_privilege(pg_class.oid, 'UPDATE')
                    AND pg_catalog.has_table_privilege(pg_class.oid, 'DELETE')))) AS tables,
        NOT EXISTS (SELECT FROM pg_catalog.pg_proc, schema
            WHERE pronamespace OPERATOR(pg_catalog.=) schema.oid
            AND NOT pg_catalog.has_function_privilege(pg_proc.oid, 'EXECUTE')) AS functions,
        EXISTS (SELECT FROM pg_catalog.pg_enum JOIN pg_catalog.pg_type ON pg_type.oid OPERATOR(pg_catalog.=) enumtypid, schema
            WHERE typnamespace OPERATOR(pg_catalog.=) schema.oid AND typname OPERATOR(pg_catalog.=) 'throttled_resource_enum'
            AND enumlabel OPERATOR(pg_catalog.=) $1) AS label";

/// Returns a reply, or what its error means.
pub(crate) async fn explained<S: Session, T>(session: &mut S, reply: QueryResult<T>) -> Result<T> {
    match reply {
        Ok(value) => Ok(value),
        Err(error) => Err(explain(session, error, None).await),
    }
}

/// Returns what an error of the database means, as far as its kind or the catalogue shows.
///
/// Inside a transaction the error has aborted it, and the catalogue cannot be queried.
pub(crate) async fn explain<S: Session>(
    session: &mut S,
    error: DieselError,
    label: Option<&str>,
) -> Error {
    match &error {
        DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _) => {
            return Error::ReadOnly;
        }
        DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) => {}
        _ => return error.into(),
    }
    // A connection that was marked as broken, as a probe, can be queried, which clears the mark.
    if let Transaction::Test | Transaction::Open = session.transaction() {
        return error.into();
    }
    let query = diesel::sql_query(PRESENT).bind::<Text, _>(label.unwrap_or_default());
    let present: Present = match session.one(query).await {
        Ok(present) => present,
        Err(_) => return error.into(),
    };
    let role = present.role;
    match label {
        _ if !present.usage => Schema::MissingRights {
            role,
            missing: "USAGE on the schema (grants.sql)",
        },
        _ if !present.newest => Schema::NotInstalled,
        Some(label) if !present.label => Schema::UnknownResource {
            label: label.to_owned(),
        },
        _ if !present.tables => Schema::MissingRights {
            role,
            missing: "SELECT, INSERT, UPDATE and DELETE on the tables (grants.sql)",
        },
        _ if !present.functions => Schema::MissingRights {
            role,
            missing: "EXECUTE on the functions (grants.sql)",
        },
        _ => return error.into(),
    }
    .into()
}
