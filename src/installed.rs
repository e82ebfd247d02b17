//! The reason of a failure in the database, queried from the catalogue after an operation failed.

use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel::sql_types::{Array, Bool, Nullable, Text};

use crate::error::{Error, Result, Schema};
use crate::session::Session;
use crate::transaction::Transaction;

/// The functions and tables of the schema that a statement names, each with the privileges that the statement needs on it.
///
/// What a function uses in turn is listed if it is a table. The functions that it calls are left out: an upgrade replaces them
/// together with it, and `grants.sql` grants all of them.
pub(crate) type Needs = [(&'static str, &'static str)];

#[derive(QueryableByName)]
struct Present {
    #[diesel(sql_type = Text)]
    role: String,
    #[diesel(sql_type = Bool)]
    usage: bool,
    #[diesel(sql_type = Bool)]
    all: bool,
    #[diesel(sql_type = Nullable<Text>)]
    ungranted: Option<String>,
    #[diesel(sql_type = Bool)]
    label: bool,
}

/// Reads from the catalogue, which needs no rights on the schema, whether what is needed exists, and what of it is not granted.
const PRESENT: &str = "
    WITH schema AS (
        SELECT oid FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'
    ), object (name, is_function, oid) AS (
        SELECT relname, false, pg_class.oid
            FROM pg_catalog.pg_class JOIN schema ON relnamespace OPERATOR(pg_catalog.=) schema.oid
        UNION ALL SELECT proname, true, pg_proc.oid
            FROM pg_catalog.pg_proc JOIN schema ON pronamespace OPERATOR(pg_catalog.=) schema.oid
    ), need AS (
        -- A privilege on some columns may be enough. Of functions with the same name, somebody else may have made one.
        SELECT needed.name, privilege, pg_catalog.count(object.oid) OPERATOR(pg_catalog.>) 0 AS is_there, pg_catalog.bool_or(CASE
                WHEN is_function THEN pg_catalog.has_function_privilege(object.oid, privilege)
                WHEN privilege OPERATOR(pg_catalog.=) 'DELETE' THEN pg_catalog.has_table_privilege(object.oid, privilege)
                ELSE pg_catalog.has_any_column_privilege(object.oid, privilege)
            END) AS is_granted
            FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS needed (name, privileges)
            CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.string_to_array(privileges, ', ')) AS privilege
            LEFT JOIN object ON object.name OPERATOR(pg_catalog.=) needed.name
                AND is_function OPERATOR(pg_catalog.=) (privilege OPERATOR(pg_catalog.=) 'EXECUTE')
            GROUP BY needed.name, privilege
    )
    SELECT current_user::pg_catalog.text AS role,
        NOT EXISTS (SELECT FROM schema
            WHERE NOT pg_catalog.has_schema_privilege(schema.oid, 'USAGE')) AS usage,
        NOT EXISTS (SELECT FROM need WHERE NOT is_there) AS all,
        (SELECT pg_catalog.string_agg(DISTINCT pg_catalog.format('%s on %s', privilege, name), ', ')
            FROM need WHERE NOT is_granted) AS ungranted,
        EXISTS (SELECT FROM pg_catalog.pg_enum JOIN pg_catalog.pg_type ON pg_type.oid OPERATOR(pg_catalog.=) enumtypid, schema
            WHERE typnamespace OPERATOR(pg_catalog.=) schema.oid AND typname OPERATOR(pg_catalog.=) 'throttled_resource_enum'
            AND enumlabel OPERATOR(pg_catalog.=) $3) AS label";

/// Returns a reply, or what its error means.
pub(crate) async fn explained<S: Session, T>(
    session: &mut S,
    reply: QueryResult<T>,
    needs: &Needs,
) -> Result<T> {
    match reply {
        Ok(value) => Ok(value),
        Err(error) => Err(explain(session, error, needs, None).await),
    }
}

/// Returns what an error of the database means, as far as its kind shows.
pub(crate) fn by_kind(error: DieselError) -> Error {
    match error {
        DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _) => Error::ReadOnly,
        other => other.into(),
    }
}

/// Returns what an error of the database means, as far as its kind or the catalogue shows. If the catalogue has all that the
/// statement needs, the error has another reason, such as a timeout, and stays what it is.
///
/// Inside a transaction the error has aborted it, and the catalogue cannot be queried.
pub(crate) async fn explain<S: Session>(
    session: &mut S,
    error: DieselError,
    needs: &Needs,
    label: Option<&str>,
) -> Error {
    let DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) = &error else {
        return by_kind(error);
    };
    // A connection that was marked as broken, as a probe, can be queried, which clears the mark.
    if let Transaction::Test | Transaction::Open = session.transaction() {
        return error.into();
    }
    let (names, privileges): (Vec<&str>, Vec<&str>) = needs.iter().copied().unzip();
    let query = diesel::sql_query(PRESENT)
        .bind::<Array<Text>, _>(names)
        .bind::<Array<Text>, _>(privileges)
        .bind::<Text, _>(label.unwrap_or_default());
    let present: Present = match session.one(query).await {
        Ok(present) => present,
        Err(_) => return error.into(),
    };
    let missing = match (present.ungranted, label) {
        _ if !present.usage => "USAGE on the schema".to_owned(),
        _ if !present.all => return Schema::NotInstalled.into(),
        (_, Some(label)) if !present.label => {
            let label = label.to_owned();
            return Schema::UnknownResource { label }.into();
        }
        (Some(ungranted), _) => ungranted,
        (None, _) => return error.into(),
    };
    Error::Schema(Schema::MissingRights {
        role: present.role,
        missing: format!("{missing} (grants.sql)"),
        source: Some(error),
    })
}
