//! Installation of this crate's schema at start-up.

use diesel::migration::MigrationVersion;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

use super::adopt::adopt;
use super::contents::pin_search_path;
#[cfg(feature = "postgres")]
use super::ours::LOCK;
use super::ours::Recorded;
use super::rights;
use crate::error::Result;
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
#[cfg(feature = "postgres")]
use crate::transaction;

/// Installs this crate's schema `resource_control`, or updates it. Returns the versions that it ran or recorded.
///
/// Call it at every start of a program. Many instances may call it at the same time. It reads first, in two round trips. If
/// nothing is pending, it sends no DDL and needs no rights beyond those of the [grants](#grants). Otherwise it takes the
/// session lock [`LOCK`] and runs each pending migration in a separate transaction.
///
/// The versions are recorded in `resource_control.installed_migration`, separate from the application's own, so `diesel
/// migration revert` does not look for their files. The other way to install the schema is by files among the application's
/// own migrations. [The module](super#installation-of-this-crates-schema) explains it, and how the two work together.
///
/// # Adoption of a schema without recorded versions
///
/// `install` adopts a schema in which no version is recorded if it is one of these:
/// - An empty schema, such as an administrator creates for a role that may not create schemas.
/// - The four objects of the article on throttled resources, and nothing else: the schema, the enumerated
///   type `throttled_resource_enum`, the table `throttled_resource` and the function
///   `lock_throttled_resource(resource_id_var, details_var)`.
/// - A copy of this crate's schema without its rows, such as `pg_dump --schema-only` makes. The copy may be of an older
///   release, and of an older server.
///
/// Adoption happens in one transaction: it adds what is missing, replaces the article's function by this
/// crate's, and sets comments and storage parameters. Rows, labels and grants stay, and so does what
/// refers to the schema from outside. Adopting a copy changes nothing but `installed_migration`.
///
/// Every other schema is refused with the list of differences, and nothing is changed. `install` compares the columns,
/// defaults, constraints, indexes, triggers, rules, policies, row security, inheritance and persistence that the server's
/// catalogue lists, and the arguments and results of the functions. The body of the article's function, comments, grants
/// and storage parameters may differ. In a copy, the bodies of the functions must be this crate's, and other objects may
/// have been added. To compare, `install` renames the schema and creates a new one, and rolls both back, so that no other
/// session sees them. The role must therefore own the schema and have `CREATE` on the database, unless the schema is empty.
///
/// Load the rows of a copy before the first `install`, because `install` records the versions, and rows that are loaded
/// later would be duplicates. Logical replication copies neither tables nor the
/// values of sequences: call `install` on the subscriber, and keep `resource_control` out of the
/// publication.
///
/// # Grants
///
/// The role that installs becomes the owner. Another role that uses the schema needs the rights that `grants.sql` in this
/// crate's repository grants. The owner runs it:
/// ```sql
#[doc = include_str!("../../grants.sql")]
/// ```
///
/// # Blocking
///
/// If nothing is pending, it waits only for a session that has locked `installed_migration` `ACCESS EXCLUSIVE`, as
/// `VACUUM FULL`, `LOCK TABLE` and `diesel migration redo --all` do. `lock_timeout` limits that wait. Otherwise it waits for
/// [`LOCK`] while other instances run migrations, as [`run_pending`](super::run_pending()) does.
///
/// # Errors
///
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test
///   transaction included.
/// - [`Schema::Foreign`](crate::error::Schema::Foreign) if no version is recorded in the schema, and it cannot be adopted.
/// - [`Schema::MissingRights`](crate::error::Schema::MissingRights) if a migration is pending and the role may not run it, or if
///   the role may not read which migrations were run.
/// - [`Error::Migration`] if a migration failed for another reason. The migrations before it stay applied.
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
/// [`Error::Migration`]: crate::Error::Migration
#[cfg(feature = "postgres")]
pub fn install(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(transaction::of(conn))?;
    let recorded = now(Recorded::of(&mut Blocking::lent(conn)))?;
    if recorded.pending().next().is_none() {
        return Ok(Vec::new());
    }
    let mut guard = LOCK.acquire_without_snapshot_on(conn)?;
    let ran = now(run_missing(&mut Blocking::lent(guard.conn())))?;
    guard.release()?;
    Ok(ran)
}

/// Reads again under the lock, and runs what is missing.
pub(super) async fn run_missing<S: Session>(
    session: &mut S,
) -> Result<Vec<MigrationVersion<'static>>> {
    let recorded = Recorded::of(session).await?;
    if let Recorded::NoVersion = recorded {
        return rights::transaction(session, async |session: &mut S| adopt(session).await).await;
    }
    let mut ran = Vec::new();
    for migration in recorded.pending() {
        rights::transaction(session, async |session: &mut S| {
            pin_search_path(session).await?;
            migration.run(session).await
        })
        .await?;
        ran.push(migration.version());
    }
    Ok(ran)
}
