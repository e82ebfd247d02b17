//! The application's own migrations, run under a lock.
//!
//! Diesel's migration harness needs a `&mut PgConnection`, so this file is blocking and has no operation over a session but
//! the first look at Diesel's table.

use std::collections::BTreeSet;

use diesel::migration::{MigrationSource, MigrationVersion};
use diesel::pg::{Pg, PgConnection};

use super::diesels_table;
use super::ours::LOCK;
use super::run_each::run_each;
use crate::error::{Error, Result};
use crate::session::{Blocking, now};
use crate::transaction;

/// Runs the application's pending migrations, on one instance at a time. Returns the versions that it ran.
///
/// Call it at every start of a program. Many instances may call it at the same time. It reads `__diesel_schema_migrations`
/// first, in two round trips. If nothing is pending, it sends no DDL and needs only the right to read that table. Otherwise
/// it takes the session lock [`LOCK`] on the migrating connection and runs Diesel's harness, which reads
/// again which migrations are pending. So the first instance runs them, and the others wait and find none. Each migration has
/// a separate transaction, or none if its metadata says so. `CREATE INDEX CONCURRENTLY` therefore works while other
/// instances wait.
///
/// # Blocking
///
/// Waits for the migrations of other instances, without a timeout. It polls with pauses that grow from 20 to 250 milliseconds
/// on average, and has no snapshot in between, so a `CREATE INDEX CONCURRENTLY` does not wait for the waiting instances, and
/// migrations may set any `lock_timeout`. For a timeout, call it under `LOCK.acquire_timeout_on(conn, …)` on that guard's
/// connection, because the lock is reentrant. That wait has snapshots: see [`AdvisoryLock::acquire`].
///
/// # Errors
///
/// - [`Schema::MissingRights`](crate::error::Schema::MissingRights) if the role may not read Diesel's table of migrations.
/// - [`Error::Migration`] if a migration failed. The migrations before it stay applied.
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test
///   transaction included.
/// - Those of [`AdvisoryLock::acquire_on`].
///
/// # Examples
///
/// ```
/// use diesel_interlock::migrations;
/// use diesel_migrations::FileBasedMigrations;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # let directory = std::env::temp_dir().join(format!("migrations-{}", std::process::id()));
/// # let one = directory.join("2026-01-01-000000_create_users");
/// # std::fs::create_dir_all(&one)?;
/// # std::fs::write(one.join("up.sql"), "CREATE TABLE users (id int)")?;
/// # std::fs::write(one.join("down.sql"), "DROP TABLE users")?;
/// let source = FileBasedMigrations::from_path(&directory)?; // or embed_migrations!()
/// let ran = migrations::run_pending(conn, source)?;
/// # std::fs::remove_dir_all(&directory)?;
/// # assert_eq!(ran.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
///
/// [`AdvisoryLock::acquire`]: crate::AdvisoryLock::acquire
/// [`AdvisoryLock::acquire_on`]: crate::AdvisoryLock::acquire_on
pub fn run_pending<S>(conn: &mut PgConnection, source: S) -> Result<Vec<MigrationVersion<'static>>>
where
    S: MigrationSource<Pg>,
{
    transaction::refuse_any(transaction::of(conn))?;
    if is_up_to_date(conn, &source)? {
        return Ok(Vec::new());
    }
    let mut guard = LOCK.acquire_without_snapshot_on(conn)?;
    let ran = run_each(guard.conn(), source)?;
    guard.release()?;
    Ok(ran)
}

/// Returns whether all migrations were run. Diesel's own check first creates the table IF NOT EXISTS, which PostgreSQL
/// refuses to a role that may not create tables.
fn is_up_to_date(conn: &mut PgConnection, source: &impl MigrationSource<Pg>) -> Result<bool> {
    let session = &mut Blocking::lent(conn);
    let Some(table) = now(diesels_table::find(session))? else {
        return Ok(false);
    };
    let ran: BTreeSet<String> = now(diesels_table::versions(session, &table))?
        .into_iter()
        .collect();
    let all = source.migrations().map_err(Error::Migration)?;
    Ok(all
        .iter()
        .all(|migration| ran.contains(&migration.name().version().to_string())))
}
