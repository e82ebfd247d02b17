//! Diesel's own table of what was run, `__diesel_schema_migrations`, as far as it tells of our
//! migrations.

use diesel::migration::{MigrationConnection, MigrationVersion};
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Array, Nullable, Text};

use super::LOCK;
use super::install::{Installed, installed};
use super::ours::OURS;
use crate::error::{Error, Result};
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

/// Hands this crate's schema over to the copied files: records what is installed in Diesel's table
/// `__diesel_schema_migrations`, so that `diesel migration run`, `list`, `redo` and `revert` treat the
/// files that [`write_to`](super::write_to) wrote as run. Answers the versions that it recorded.
///
/// Call it once per database, before `diesel migration run`, which would otherwise fail: the schema is
/// there. It changes nothing else, and does nothing where nothing is installed or all is recorded.
/// ```sql
/// INSERT INTO __diesel_schema_migrations (version) … ON CONFLICT DO NOTHING
/// ```
/// Under the session lock [`LOCK`], in one transaction; makes the table if it is missing, in the first
/// schema of the search path, as Diesel does.
///
/// # Blocking
///
/// Waits for [`LOCK`] as [`install`](super::install) does.
///
/// # Errors
///
/// - [`Error::CommitsInTransaction`] inside a transaction, a test transaction included.
/// - [`Error::NotInstalled`] if the schema is there, but was made by hand: call
///   [`install`](super::install) first, which adopts it.
/// - [`Error::Database`] if the role may not write to Diesel's table, among others.
/// - Those of [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on).
///
/// # Examples
///
/// ```
/// use diesel_interlock::migrations;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # migrations::install(conn)?;
/// # let directory = std::env::temp_dir().join(format!("hand-over-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory)?;
/// let written = migrations::write_to(&directory)?; // "migrations", once in the sources
/// let recorded = migrations::hand_over(conn)?; // once in each database
/// assert_eq!(recorded.len(), written.len());
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn hand_over(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    under_lock(conn, |conn, versions| {
        if versions.is_empty() {
            return Ok(Vec::new());
        }
        let table = match find(conn)? {
            Some(table) => table,
            None => {
                conn.setup()?;
                find(conn)?.ok_or(Error::Database(diesel::result::Error::NotFound))?
            }
        };
        record(conn, &table, &versions)
    })
}

/// Takes this crate's schema over from the copied files: removes our versions from Diesel's table
/// `__diesel_schema_migrations`, so that `diesel migration revert --all` and `redo --all` do not look
/// for files that were deleted. Answers the versions that it removed.
///
/// Call it once per database, after the files of [`write_to`](super::write_to) were deleted and the
/// program calls [`install`](super::install). It changes nothing else: the schema itself knows what is
/// installed. It does nothing where nothing is recorded.
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
/// As [`hand_over`].
pub fn take_over(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    under_lock(conn, |conn, versions| forget(conn, &versions))
}

/// Runs it with those of our versions that are installed.
fn under_lock(
    conn: &mut PgConnection,
    work: impl FnOnce(&mut PgConnection, Vec<String>) -> Result<Vec<MigrationVersion<'static>>>,
) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(conn)?;
    let mut guard = LOCK.acquire_on(conn)?;
    let versions = match installed(guard.conn())? {
        Installed::Nothing => Vec::new(),
        Installed::Unrecorded => return Err(Error::NotInstalled),
        Installed::Versions(versions) => OURS
            .iter()
            .map(|ours| ours.version().to_string())
            .filter(|version| versions.contains(version))
            .collect(),
    };
    let answer = guard
        .conn()
        .build_transaction()
        .read_committed()
        .run(|conn| work(conn, versions))?;
    guard.release()?;
    Ok(answer)
}

/// The table on this connection's search path, qualified and quoted.
pub(super) fn find(conn: &mut PgConnection) -> QueryResult<Option<String>> {
    let table: Table = diesel::sql_query(
        "SELECT (SELECT pg_catalog.format('%I.%I', nspname, relname) \
         FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace \
         WHERE pg_class.oid = pg_catalog.to_regclass('__diesel_schema_migrations')) AS name",
    )
    .get_result(conn)?;
    Ok(table.name)
}

/// The versions that it holds, the application's own among them.
pub(super) fn versions(conn: &mut PgConnection, table: &str) -> QueryResult<Vec<String>> {
    let rows: Vec<Version> =
        diesel::sql_query(format!("SELECT version::text FROM {table}")).load(conn)?;
    Ok(rows.into_iter().map(|row| row.version).collect())
}

/// Records versions as run, and answers those that were not.
pub(super) fn record(
    conn: &mut PgConnection,
    table: &str,
    versions: &[String],
) -> Result<Vec<MigrationVersion<'static>>> {
    let rows: Vec<Version> = diesel::sql_query(format!(
        "INSERT INTO {table} (version) SELECT pg_catalog.unnest($1) \
         ON CONFLICT DO NOTHING RETURNING version::text"
    ))
    .bind::<Array<Text>, _>(versions)
    .load(conn)?;
    Ok(in_order(rows))
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
        "DELETE FROM {table} WHERE version = ANY ($1) RETURNING version::text"
    ))
    .bind::<Array<Text>, _>(versions)
    .load(conn)?;
    Ok(in_order(rows))
}

fn in_order(rows: Vec<Version>) -> Vec<MigrationVersion<'static>> {
    let mut versions: Vec<_> = rows.into_iter().map(|row| row.version.into()).collect();
    versions.sort();
    versions
}
