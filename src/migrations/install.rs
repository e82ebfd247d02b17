//! Installing this crate's own schema, beside the application's migrations.

use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;

use super::adopt::adopt;
use super::contents::pin_search_path;
use super::recorded::Recorded;
use super::{LOCK, rights};
use crate::error::Result;
use crate::transaction;

/// Installs this crate's schema `resource_control`, or brings it up to date; answers the versions
/// that it ran.
///
/// Meant for every start of a program, also of twenty instances at once. It reads first, in two
/// round trips; with nothing to do it sends no DDL and needs no rights beyond those of the
/// [grants](#grants). Otherwise it takes the session lock [`LOCK`] and runs each pending migration in
/// a transaction of its own.
///
/// The versions are kept in `resource_control.installed_migration`, apart from the application's
/// own, so `diesel migration revert` never trips over them. The other way to install the schema is by
/// files among the application's own: see [the module](super#this-crates-own-schema), also for how the
/// two go together.
///
/// # A schema that was made by hand
///
/// with the same type, table and function, is adopted: in one transaction, what is missing is added in
/// place (tables, functions, comments, storage parameters), and functions are replaced. Its rows and
/// labels stay, and so does what refers to it; what else lies in the schema is nobody's business.
///
/// What is there must be what the migrations make, compared in the server's own catalogue: kinds,
/// columns with their types, defaults and nullability, constraints and indexes with names and
/// definitions, the functions' arguments and results. Anything else is refused with the list of
/// differences, and nothing is changed. To compare, the schema is renamed and a new one made, both
/// undone before anybody sees it; the role must own the schema and have `CREATE` on the database.
///
/// # Grants
///
/// The role that installs becomes the owner. Another role that is to use the schema needs what
/// `grants.sql`, in this crate's repository, gives it, to be run by the owner:
/// ```sql
#[doc = include_str!("../../grants.sql")]
/// ```
///
/// # Blocking
///
/// With nothing to do it never waits. Otherwise it waits for [`LOCK`], while other instances run
/// migrations, as [`AdvisoryLock::acquire_on`] does.
///
/// # Errors
///
/// - [`Error::CommitsInTransaction`] inside a transaction, a test transaction included.
/// - [`Error::ForeignInstallation`] if the schema was made by hand and differs.
/// - [`Error::MissingRights`] if something is to be done, and the role may not; or if nothing is, and
///   it lacks the grants.
/// - [`Error::Migration`] if a migration failed for another reason. Those before it stay.
/// - Those of [`AdvisoryLock::acquire_on`].
///
/// # Examples
///
/// ```
/// use diesel_interlock::migrations;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// migrations::install(conn)?; // at start-up, before anything is throttled or claimed
/// # assert!(migrations::install(conn)?.is_empty());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
///
/// [`AdvisoryLock::acquire_on`]: crate::AdvisoryLock::acquire_on
/// [`Error::CommitsInTransaction`]: crate::Error::CommitsInTransaction
/// [`Error::ForeignInstallation`]: crate::Error::ForeignInstallation
/// [`Error::MissingRights`]: crate::Error::MissingRights
/// [`Error::Migration`]: crate::Error::Migration
pub fn install(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(conn)?;
    if Recorded::of(conn)?.pending().next().is_none() {
        return Ok(Vec::new());
    }
    let mut guard = LOCK.acquire_on(conn)?;
    let recorded = Recorded::of(guard.conn())?;
    let mut ran = Vec::new();
    if let Recorded::NoVersion = recorded {
        ran = rights::transaction(guard.conn(), adopt)?;
    } else {
        for migration in recorded.pending() {
            rights::transaction(guard.conn(), |conn| {
                pin_search_path(conn)?;
                migration.run(conn)
            })?;
            ran.push(migration.version());
        }
    }
    guard.release()?;
    Ok(ran)
}
