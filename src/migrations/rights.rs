//! The transaction of a migration, and the rights of the role that runs it, queried after a failure.

use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{Bool, Text};

use super::ours::Failed;
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

const RIGHTS: &str = "
    WITH schema AS (
        SELECT oid, nspowner FROM pg_catalog.pg_namespace WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'
    ), owners (owner) AS (
        SELECT nspowner FROM schema
        UNION SELECT relowner FROM pg_catalog.pg_class JOIN schema ON relnamespace OPERATOR(pg_catalog.=) schema.oid
        UNION SELECT proowner FROM pg_catalog.pg_proc JOIN schema ON pronamespace OPERATOR(pg_catalog.=) schema.oid
        UNION SELECT typowner FROM pg_catalog.pg_type JOIN schema ON typnamespace OPERATOR(pg_catalog.=) schema.oid
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
    let rights: Rights = session.one(diesel::sql_query(RIGHTS)).await?;
    if rights.creates_schemas {
        return Ok(());
    }
    Err(Error::Schema(Schema::MissingRights {
        role: rights.role,
        missing: "CREATE on the database, to compare the schema with a new one",
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
    let rights: QueryResult<Rights> = session.one(diesel::sql_query(RIGHTS)).await;
    match rights {
        Ok(rights) if rights.has_schema && !rights.owns_all => {
            Error::Schema(Schema::MissingRights {
                role: rights.role,
                missing: "the ownership of the schema and of what is in it",
            })
        }
        Ok(rights) if !rights.has_schema && !rights.creates_schemas => {
            Error::Schema(Schema::MissingRights {
                role: rights.role,
                missing: "CREATE on the database, to create the schema",
            })
        }
        _ => error,
    }
}
