//! Removal of this crate's schema.

use diesel::migration::MigrationVersion;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

use super::contents::{Contents, beside, pin_search_path};
#[cfg(feature = "postgres")]
use super::ours::LOCK;
use super::ours::{OURS, OurMigration, Recorded};
use super::{diesels_table, rights};
use crate::error::{Error, Result, Schema};
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
#[cfg(feature = "postgres")]
use crate::transaction;

/// Drops this crate's schema `resource_control` with all of this crate's objects. Returns the versions that it reverted, the
/// newest first. If nothing is installed, it does nothing.
///
/// **This deletes** the resources with their intervals and last grants, all throttled keys, the log of requests to services, all
/// rate limits with their overrides, all fences with their tokens, and the grants, comments and storage parameters of this crate's
/// objects. Stop the programs that use the schema first, because they get errors from then on. Claims and work under a throttle
/// lose their protection. After a new installation, every key is full, and a fence lets the token of an earlier holder pass.
///
/// It never uses CASCADE. Before it drops anything, it returns an error that names every object of the application:
/// - objects outside the schema that depend on it, such as foreign keys, columns of the enumerated type, views and
///   functions;
/// - objects on this crate's tables, such as columns, defaults, constraints, indexes, extended statistics, triggers, rules,
///   policies, and sequences that a column owns;
/// - the membership of the tables in publications, unless these are `FOR ALL TABLES`;
/// - extensions that have one of this crate's objects as a member;
/// - all other objects in the schema.
///
/// It does not find dependencies that the server does not record, such as the text of a function that calls one of this
/// crate's.
///
/// It runs each `down.sql` in one transaction under the session lock [`LOCK`], even if the migrations were run by files or
/// the schema was adopted. If Diesel's table `__diesel_schema_migrations` records the versions, it deletes those rows. Then
/// delete the files, or `diesel migration run` creates the schema again.
///
/// # Blocking
///
/// Waits for [`LOCK`] as [`install`](super::install()) does, and for every transaction that uses one of the tables.
///
/// # Errors
///
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test
///   transaction included.
/// - [`Schema::InUse`](crate::error::Schema::InUse) with the objects of the application, or with versions of a newer release.
/// - [`Schema::Foreign`](crate::error::Schema::Foreign) if no version is recorded in the schema.
///   [`install`](super::install()) adopts it, or returns why it cannot.
/// - [`Schema::MissingRights`](crate::error::Schema::MissingRights) if the role does not own the schema, or lacks `CREATE`
///   on the database, which is needed to find out which objects are this crate's.
/// - Those of [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on).
///
/// # Examples
///
/// ```
/// use diesel_interlock::{Error, error::Schema, migrations};
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # migrations::install(conn)?;
/// match migrations::uninstall(conn) {
///     Ok(_) => println!("gone"),
///     Err(Error::Schema(Schema::InUse { objects })) => println!("to be dropped first: {objects:?}"),
///     Err(error) => return Err(error),
/// }
/// # assert!(migrations::uninstall(conn)?.is_empty());
/// # Ok::<(), Error>(())
/// ```
#[cfg(feature = "postgres")]
pub fn uninstall(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(transaction::of(conn))?;
    let mut guard = LOCK.acquire_without_snapshot_on(conn)?;
    let reverted = now(revert_all(&mut Blocking::lent(guard.conn())))?;
    guard.release()?;
    Ok(reverted)
}

pub(super) async fn revert_all<S: Session>(
    session: &mut S,
) -> Result<Vec<MigrationVersion<'static>>> {
    match Recorded::of(session).await? {
        Recorded::Nothing => Ok(Vec::new()),
        Recorded::NoVersion => {
            let differences =
                vec!["no version is recorded in it: migrations::install may adopt it".to_owned()];
            Err(Error::Schema(Schema::Foreign { differences }))
        }
        Recorded::Versions(versions) => {
            rights::transaction(session, async |session: &mut S| {
                revert(session, &versions).await
            })
            .await
        }
    }
}

async fn revert<S: Session>(
    session: &mut S,
    versions: &[String],
) -> Result<Vec<MigrationVersion<'static>>> {
    diesels_table::forget(session, versions).await?;
    pin_search_path(session).await?;
    let (newer, ran) = by_release(versions);
    let objects = if newer.is_empty() {
        foreign_objects(session, &ran).await?
    } else {
        newer
    };
    if !objects.is_empty() {
        return Err(Error::Schema(Schema::InUse { objects }));
    }
    let mut reverted = Vec::new();
    for migration in ran.iter().rev() {
        migration.revert(session).await?;
        reverted.push(migration.version());
    }
    Ok(reverted)
}

/// Splits the versions into those of newer releases and the migrations of this one.
fn by_release(versions: &[String]) -> (Vec<String>, Vec<&'static OurMigration>) {
    let mut newer = versions.to_vec();
    let mut ran = Vec::new();
    for migration in &OURS {
        let version = migration.version().to_string();
        if versions.contains(&version) {
            newer.retain(|it| *it != version);
            ran.push(migration);
        }
    }
    let newer = newer.into_iter();
    let named = newer.map(|version| format!("migration {version} of a newer release"));
    (named.collect(), ran)
}

/// Returns the objects in the schema that these migrations do not create, and the objects that depend on it from outside.
async fn foreign_objects<S: Session>(
    session: &mut S,
    ran: &[&'static OurMigration],
) -> Result<Vec<String>> {
    let found = Contents::of(session).await?;
    let ours = beside(session, async |session: &mut S| {
        for migration in ran {
            migration.run(session).await?;
        }
        Ok(Contents::of(session).await?)
    })
    .await?;
    Ok(found.beyond(&ours).cloned().collect())
}
