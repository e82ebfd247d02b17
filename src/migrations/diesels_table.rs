//! Diesel's own table of what was run, `__diesel_schema_migrations`, as far as it tells of our
//! migrations.

use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Array, Nullable, Text};

use super::ours::OURS;
use super::{LOCK, rights};
use crate::error::Result;
use crate::transaction;

#[derive(QueryableByName)]
struct Table {
    #[diesel(sql_type = Nullable<Text>)]
    name: Option<String>,
}

#[derive(QueryableByName)]
struct Version {
    #[diesel(sql_type = Text)]
    version: String,
}

/// Takes this crate's schema over from the copied files: removes our versions from Diesel's table
/// `__diesel_schema_migrations`, so that `diesel migration revert --all` and `redo --all` do not look
/// for files that were deleted. Returns the versions that it removed.
///
/// Call it once per database, after the files of [`write_to`](super::write_to) were deleted and the
/// program calls [`install`](super::install). It changes nothing else, because the schema itself knows
/// what is installed. It does nothing where nothing is recorded. The other direction needs no call:
/// `diesel migration run` runs the files, which do nothing where [`install`](super::install) has run
/// them, and Diesel records them.
/// ```sql
/// DELETE FROM __diesel_schema_migrations WHERE version = ANY ($1)
/// ```
/// Under the session lock [`LOCK`], in one transaction.
///
/// # Blocking
///
/// Waits for [`LOCK`] as [`install`](super::install) does.
///
/// # Errors
///
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test transaction included.
/// - [`Error::Database`] if the role may not write to Diesel's table, among others.
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
pub fn take_over(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(conn)?;
    let mut guard = LOCK.acquire_without_snapshot_on(conn)?;
    let ours: Vec<_> = OURS.iter().map(|ours| ours.version().to_string()).collect();
    let forgotten = rights::transaction(guard.conn(), |conn| forget(conn, &ours))?;
    guard.release()?;
    Ok(forgotten)
}

/// The table on this connection's search path, qualified and quoted.
pub(super) fn find(conn: &mut PgConnection) -> QueryResult<Option<String>> {
    let table: Table = diesel::sql_query(
        "SELECT (SELECT pg_catalog.format('%I.%I', nspname, relname) \
         FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid OPERATOR(pg_catalog.=) relnamespace \
         WHERE pg_class.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass('__diesel_schema_migrations')) AS name",
    )
    .get_result(conn)?;
    Ok(table.name)
}

/// The versions that it holds, the application's own among them.
pub(super) fn versions(conn: &mut PgConnection, table: &str) -> QueryResult<Vec<String>> {
    let rows: Vec<Version> =
        diesel::sql_query(format!("SELECT version::pg_catalog.text FROM {table}")).load(conn)?;
    Ok(rows.into_iter().map(|row| row.version).collect())
}

/// Removes versions, and answers those that were there.
pub(super) fn forget(
    conn: &mut PgConnection,
    versions: &[String],
) -> Result<Vec<MigrationVersion<'static>>> {
    let Some(table) = find(conn)? else {
        return Ok(Vec::new());
    };
    if !self::versions(conn, &table)?
        .iter()
        .any(|version| versions.contains(version))
    {
        return Ok(Vec::new()); // nothing that would need the right to delete
    }
    let rows: Vec<Version> = diesel::sql_query(format!(
        "DELETE FROM {table} WHERE version::pg_catalog.text OPERATOR(pg_catalog.=) ANY ($1) \
         RETURNING version::pg_catalog.text"
    ))
    .bind::<Array<Text>, _>(versions)
    .load(conn)?;
    let mut versions: Vec<_> = rows.into_iter().map(|row| row.version.into()).collect();
    versions.sort();
    Ok(versions)
}
