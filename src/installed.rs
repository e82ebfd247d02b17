//! Whether what this crate needs is in the database, asked once something failed.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{Bool, Text};

use crate::error::Error;
use crate::transaction::{self, Transaction};

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

/// What is there, read from the catalogue alone, which needs no rights on the schema: those that
/// `grants.sql` gives, and the function that was added last.
const PRESENT: &str = "
    WITH schema AS (
        SELECT oid FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'
    )
    SELECT current_user::pg_catalog.text AS role,
        NOT EXISTS (SELECT FROM schema
            WHERE NOT pg_catalog.has_schema_privilege(schema.oid, 'USAGE')) AS usage,
        EXISTS (SELECT FROM pg_catalog.pg_proc, schema
            WHERE pronamespace OPERATOR(pg_catalog.=) schema.oid AND proname OPERATOR(pg_catalog.=) 'pass_fence') AS newest,
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

/// Says what an error of the database means, as far as its kind or the catalogue tells.
///
/// Inside a transaction the error has aborted it, and nothing more can be asked.
pub(crate) fn explain(conn: &mut PgConnection, error: DieselError, label: Option<&str>) -> Error {
    match &error {
        DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _) => {
            return Error::ReadOnly;
        }
        DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) => {}
        _ => return error.into(),
    }
    // A connection that was marked as broken, as a probe, can be asked, and loses the mark by it.
    if let Transaction::Test | Transaction::Open = transaction::of(conn) {
        return error.into();
    }
    let present: QueryResult<Present> = diesel::sql_query(PRESENT)
        .bind::<Text, _>(label.unwrap_or_default())
        .get_result(conn);
    match (present, label) {
        (Ok(present), _) if !present.usage => Error::MissingRights {
            role: present.role,
            missing: "USAGE on it (grants.sql)",
        },
        (Ok(present), _) if !present.newest => Error::NotInstalled,
        (Ok(present), Some(label)) if !present.label => Error::UnknownResource {
            label: label.to_owned(),
        },
        (Ok(present), _) if !present.tables => Error::MissingRights {
            role: present.role,
            missing: "SELECT, INSERT, UPDATE and DELETE on its tables (grants.sql)",
        },
        (Ok(present), _) if !present.functions => Error::MissingRights {
            role: present.role,
            missing: "EXECUTE on its functions (grants.sql)",
        },
        _ => error.into(),
    }
}
