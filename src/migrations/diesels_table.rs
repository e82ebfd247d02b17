//! Diesel's own table of migrations, `__diesel_schema_migrations`, and this crate's versions in it.

use diesel::migration::MigrationVersion;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Array, Bool, Nullable, Text};

#[cfg(feature = "postgres")]
use super::ours::LOCK;
use super::ours::OURS;
use super::rights;
use crate::error::{Error, Result, Schema};
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
#[cfg(feature = "postgres")]
use crate::transaction;

#[derive(QueryableByName)]
struct Table {
    #[diesel(sql_type = Nullable<Text>)]
    name: Option<String>,
    #[diesel(sql_type = Bool)]
    is_readable: bool,
    #[diesel(sql_type = Text)]
    role: String,
}

#[derive(QueryableByName)]
struct Version {
    #[diesel(sql_type = Text)]
    version: String,
}

/// Changes from copied files to [`install`](super::install()): removes this crate's versions from Diesel's table
/// `__diesel_schema_migrations`, so that `diesel migration revert --all` and `redo --all` do not look for files that were
/// deleted. Returns the versions that it removed.
///
/// Call it once per database, after you have deleted the files of [`write_to`](super::write_to()) and the program calls
/// [`install`](super::install()). It changes nothing else, because the schema itself records what is installed. If Diesel's
/// table has none of the versions, it does nothing. The other direction needs no call, because `diesel migration run` runs
/// the files, which do nothing where [`install`](super::install()) has run them, and Diesel records them.
/// ```sql
/// DELETE FROM __diesel_schema_migrations WHERE version = ANY ($1)
/// ```
/// Under the session lock [`LOCK`], in one transaction.
///
/// # Blocking
///
/// Waits for [`LOCK`] as [`install`](super::install()) does.
///
/// # Errors
///
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test
///   transaction included.
/// - [`Schema::MissingRights`](crate::error::Schema::MissingRights) if the role may not read Diesel's table.
/// - [`Error::Database`], for example if it may not write to it.
/// - Those of [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on).
///
/// [`Error::Database`]: crate::Error::Database
///
/// # Examples
///
/// ```
/// use diesel_interlock::migrations;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # let directory = std::env::temp_dir().join(format!("take-over-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// let written = migrations::write_to(&directory)?; // "migrations", in the sources
/// # let source = diesel_migrations::FileBasedMigrations::from_path(&directory).unwrap();
/// # migrations::run_pending(conn, source)?; // `diesel migration run`
/// // Later: the files are deleted, and the program calls `install`.
/// migrations::install(conn)?;
/// let forgotten = migrations::take_over(conn)?; // once in each database
/// assert_eq!(forgotten.len(), written.len());
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "postgres")]
pub fn take_over(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(transaction::of(conn))?;
    let mut guard = LOCK.acquire_without_snapshot_on(conn)?;
    let forgotten = now(forget_ours(&mut Blocking::lent(guard.conn())))?;
    guard.release()?;
    Ok(forgotten)
}

/// Removes this crate's versions, in one transaction, and returns those that were in the table.
pub(super) async fn forget_ours<S: Session>(
    session: &mut S,
) -> Result<Vec<MigrationVersion<'static>>> {
    rights::transaction(session, async |session: &mut S| {
        let ours: Vec<_> = OURS.iter().map(|ours| ours.version().to_string()).collect();
        forget(session, &ours).await
    })
    .await
}

/// Finds the table on the search path of this session. Returns its name, qualified and quoted. Refuses a role that may not read it.
pub(super) async fn find<S: Session>(session: &mut S) -> Result<Option<String>> {
    let query = diesel::sql_query(
        "SELECT (SELECT pg_catalog.format('%I.%I', nspname, relname) \
         FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid OPERATOR(pg_catalog.=) relnamespace \
         WHERE pg_class.oid OPERATOR(pg_catalog.=) found.oid) AS name, \
         COALESCE(pg_catalog.has_column_privilege(found.oid, 'version', 'SELECT'), true) AS is_readable, \
         current_user::pg_catalog.text AS role \
         FROM (SELECT pg_catalog.to_regclass('__diesel_schema_migrations')::pg_catalog.oid AS oid) AS found",
    );
    let table: Table = session.one(query).await?;
    if !table.is_readable {
        return Err(Error::Schema(Schema::MissingRights {
            role: table.role,
            missing: "SELECT on __diesel_schema_migrations (grants.sql)".to_owned(),
            source: None,
        }));
    }
    Ok(table.name)
}

/// Returns the versions in the table, the application's own among them.
pub(super) async fn versions<S: Session>(session: &mut S, table: &str) -> QueryResult<Vec<String>> {
    let query = diesel::sql_query(format!("SELECT version::pg_catalog.text FROM {table}"));
    let rows: Vec<Version> = session.all(query).await?;
    Ok(rows.into_iter().map(|row| row.version).collect())
}

/// Removes versions, and returns those that were in the table.
pub(super) async fn forget<S: Session>(
    session: &mut S,
    versions: &[String],
) -> Result<Vec<MigrationVersion<'static>>> {
    let Some(table) = find(session).await? else {
        return Ok(Vec::new());
    };
    let recorded = self::versions(session, &table).await?;
    if !recorded.iter().any(|version| versions.contains(version)) {
        return Ok(Vec::new()); // so the right to delete is not needed
    }
    let delete = diesel::sql_query(format!(
        "DELETE FROM {table} WHERE version::pg_catalog.text OPERATOR(pg_catalog.=) ANY ($1) \
         RETURNING version::pg_catalog.text"
    ));
    let rows: Vec<Version> = session.all(delete.bind::<Array<Text>, _>(versions)).await?;
    let mut versions: Vec<_> = rows.into_iter().map(|row| row.version.into()).collect();
    versions.sort();
    Ok(versions)
}
