//! Removing what this crate installed.

use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;

use super::contents::{Contents, beside, pin_search_path};
use super::ours::{LOCK, OURS, OurMigration, Recorded};
use super::{diesels_table, rights};
use crate::error::{Error, Result, Schema};
use crate::session::{Blocking, Session, now};
use crate::transaction;

/// Drops this crate's schema `resource_control` and all that is ours in it; returns the versions that
/// it reverted, the newest first. Where nothing is installed it does nothing.
///
/// **Lost with it** are the resources with their intervals, who took them last, every key, the log of
/// requests to services, and the grants, comments and storage parameters of our objects. A program that
/// still runs gets errors from then on: stop it first. Nobody must be in the middle of a claim or of work
/// under a throttle, since nothing protects it then.
///
/// Never by CASCADE: whatever is the user's is named in an error before anything is dropped. That is
/// - what depends on the schema from outside, such as foreign keys, columns of our enumerated type, views
///   and functions;
/// - what was put on our tables, such as columns, defaults, constraints, indexes, extended statistics,
///   triggers, rules, policies, and sequences that one of our columns owns;
/// - the membership of our tables in publications, unless those are `FOR ALL TABLES`;
/// - everything else that lies in the schema.
///
/// What the server does not record is not found, such as the text of a function that calls one of ours.
///
/// It runs each `down.sql`, in one transaction, under the session lock [`LOCK`], whoever ran the
/// migrations, or adopted the schema. If they are recorded in Diesel's table
/// `__diesel_schema_migrations`, those rows go too: delete the files, or `diesel migration run` makes
/// the schema anew.
///
/// # Blocking
///
/// Waits for [`LOCK`] as [`install`](super::install) does, and for every transaction that uses one of
/// the tables.
///
/// # Errors
///
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test transaction included.
/// - [`Schema::InUse`](crate::error::Schema::InUse) with what is the user's, or with versions of a newer release.
/// - [`Schema::Foreign`](crate::error::Schema::Foreign) if no version is recorded in the schema: [`install`](super::install)
///   adopts it, or says why it cannot.
/// - [`Schema::MissingRights`](crate::error::Schema::MissingRights) if the role does not own it, or lacks `CREATE` on the database, which
///   is needed to learn what is ours.
/// - Those of [`AdvisoryLock::acquire_on`](crate::AdvisoryLock::acquire_on).
///
/// # Examples
///
/// ```
/// use diesel_interlock::{Error, migrations};
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
pub fn uninstall(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(conn)?;
    let mut guard = LOCK.acquire_without_snapshot_on(conn)?;
    let reverted = now(revert_all(&mut Blocking::lent(guard.conn())))?;
    guard.release()?;
    Ok(reverted)
}

async fn revert_all<S: Session>(session: &mut S) -> Result<Vec<MigrationVersion<'static>>> {
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
