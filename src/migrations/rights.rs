//! The transaction of a migration, and the rights of the role that runs it, queried after a failure.

use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{Array, Bool, Text};

use super::ours::{Failed, names};
use crate::error::{Error, Result, Schema};
use crate::session::{OwnTransaction, Session};

#[derive(QueryableByName)]
struct Rights {
    #[diesel(sql_type = Text)]
    role: String,
    #[diesel(sql_type = Bool)]
    creates_schemas: bool,
    #[diesel(sql_type = Bool)]
    has_schema: bool,
    #[diesel(sql_type = Bool)]
    owns_all: bool,
}

impl Rights {
    async fn of<S: Session>(session: &mut S) -> QueryResult<Self> {
        let names: Vec<_> = names().into_iter().collect();
        let query = diesel::sql_query(RIGHTS).bind::<Array<Text>, _>(names);
        session.one(query).await
    }
}

/// Other objects in the schema may be anybody's.
const RIGHTS: &str = "
    WITH schema AS (
        SELECT oid, nspowner FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'
    ), owners (owner) AS (
        SELECT nspowner FROM schema
        UNION SELECT relowner FROM pg_catalog.pg_class JOIN schema ON relnamespace OPERATOR(pg_catalog.=) schema.oid
            WHERE relname OPERATOR(pg_catalog.=) ANY ($1)
        UNION SELECT proowner FROM pg_catalog.pg_proc JOIN schema ON pronamespace OPERATOR(pg_catalog.=) schema.oid
            WHERE proname OPERATOR(pg_catalog.=) ANY ($1)
        UNION SELECT typowner FROM pg_catalog.pg_type JOIN schema ON typnamespace OPERATOR(pg_catalog.=) schema.oid
            WHERE typname OPERATOR(pg_catalog.=) ANY ($1)
    )
    SELECT current_user::pg_catalog.text AS role,
        pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS creates_schemas,
        EXISTS (SELECT FROM schema) AS has_schema,
        NOT EXISTS (SELECT FROM owners WHERE NOT pg_catalog.pg_has_role(owner, 'USAGE')) AS owns_all";

/// Runs DDL in a transaction at READ COMMITTED, under every default level of the session. If a right was missing, the
/// error names it.
pub(super) async fn transaction<S: Session, T>(
    session: &mut S,
    work: impl AsyncFnOnce(&mut S) -> Result<T>,
) -> Result<T> {
    match in_transaction(session, work).await {
        Ok(value) => Ok(value),
        Err(error) => Err(explain(session, error).await),
    }
}

async fn in_transaction<S: Session, T>(
    session: &mut S,
    work: impl AsyncFnOnce(&mut S) -> Result<T>,
) -> Result<T> {
    let mut transaction = OwnTransaction::begin_read_committed(session).await?;
    let outcome = work(transaction.session()).await;
    transaction.end(outcome).await
}

/// Refuses a role that may not create schemas.
pub(super) async fn require_creating_schemas<S: Session>(session: &mut S) -> Result<()> {
    let rights = Rights::of(session).await?;
    if rights.creates_schemas {
        return Ok(());
    }
    Err(Error::Schema(Schema::MissingRights {
        role: rights.role,
        missing: "CREATE on the database, to compare the schema with a new one".to_owned(),
        source: None,
    }))
}

/// Returns what an error of a migration means, as far as the catalogue shows.
async fn explain<S: Session>(session: &mut S, error: Error) -> Error {
    let source = match &error {
        Error::Database(source) => source,
        Error::Migration(failed) => match failed.downcast_ref::<Failed>() {
            Some(failed) => &failed.source,
            None => return error,
        },
        _ => return error,
    };
    match source {
        DieselError::DatabaseError(DatabaseErrorKind::ReadOnlyTransaction, _) => {
            return Error::ReadOnly;
        }
        DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) => {}
        _ => return error,
    }
    let Ok(rights) = Rights::of(session).await else {
        return error;
    };
    let missing = match (rights.has_schema, rights.owns_all, rights.creates_schemas) {
        (true, false, _) => "the ownership of the schema and of what this crate has created in it",
        (false, _, false) => "CREATE on the database, to create the schema",
        _ => return error,
    };
    Error::Schema(Schema::MissingRights {
        role: rights.role,
        missing: missing.to_owned(),
        source: source_of(error),
    })
}

/// Returns the error of the database in an error of a migration.
fn source_of(error: Error) -> Option<DieselError> {
    match error {
        Error::Database(source) => Some(source),
        Error::Migration(failed) => failed.downcast::<Failed>().ok().map(|failed| failed.source),
        _ => None,
    }
}
