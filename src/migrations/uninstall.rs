//! Removing what this crate installed.

use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Array, Text};

use super::description::OBJECTS;
use super::install::{Installed, installed};
use super::ours::OURS;
use super::{LOCK, adopt, diesels_table, rights};
use crate::error::{Error, Result};
use crate::transaction;

/// Follows the objects of ours, the first bind parameter, to what is a part of them, and answers what
/// else depends on those or lies in the schema.
const IN_THE_WAY: &str = "
    , ours (classid, objid) AS (
        SELECT classid, objid FROM objects WHERE object = ANY ($1)
        UNION
        SELECT pg_depend.classid, pg_depend.objid
            FROM pg_catalog.pg_depend JOIN ours ON refclassid = ours.classid AND refobjid = ours.objid
            WHERE deptype IN ('a', 'i')
    ), dependent (classid, objid, objsubid) AS (
        SELECT pg_depend.classid, pg_depend.objid, objsubid
            FROM pg_catalog.pg_depend JOIN ours ON refclassid = ours.classid AND refobjid = ours.objid
            WHERE (pg_depend.classid, pg_depend.objid) NOT IN (SELECT classid, objid FROM ours)
    ), named (classid, objid, objsubid) AS (
        -- A view depends by its rule and its columns.
        SELECT CASE WHEN is_view THEN 'pg_catalog.pg_class'::regclass ELSE dependent.classid END,
                CASE WHEN is_view THEN relation.oid ELSE dependent.objid END,
                CASE WHEN is_view THEN 0 ELSE objsubid END
            FROM dependent LEFT JOIN pg_catalog.pg_rewrite ON pg_rewrite.oid = dependent.objid
                AND dependent.classid = 'pg_catalog.pg_rewrite'::regclass AND rulename = '_RETURN'
            LEFT JOIN pg_catalog.pg_class AS relation ON relation.oid = ev_class
                OR relation.oid = dependent.objid AND dependent.classid = 'pg_catalog.pg_class'::regclass,
            LATERAL (SELECT COALESCE(relkind IN ('v', 'm'), false)) AS kind (is_view)
    )
    SELECT DISTINCT identified.type || ' ' || identity AS object
        FROM named, LATERAL pg_catalog.pg_identify_object(classid, objid, objsubid) AS identified
        ORDER BY object";

#[derive(QueryableByName)]
struct InTheWay {
    #[diesel(sql_type = Text)]
    object: String,
}

/// Drops this crate's schema `resource_control` and all that is ours in it; answers the versions that
/// it reverted, the newest first. Where nothing is installed it does nothing.
///
/// **Lost with it** are the resources with their intervals, who took them last, every key, the log of
/// requests to services, and what was put on our tables: columns, indexes, triggers, policies, grants.
/// A program that still runs gets errors from then on: stop it first. Nobody must be in the middle of
/// a claim or of work under a throttle, since nothing protects it then.
///
/// Never by CASCADE: what is the user's is named in an error before anything is dropped. That is what
/// depends on the schema (foreign keys, columns of our enumerated type, views, functions), and whatever
/// else lies in it. What the server does not record is not found: the text of a function that calls
/// one of ours.
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
/// - [`Error::CommitsInTransaction`] inside a transaction, a test transaction included.
/// - [`Error::InTheWay`] with what is the user's, or with versions of a newer release.
/// - [`Error::ForeignInstallation`] if the schema was made by hand and not adopted.
/// - [`Error::MissingRights`] if the role does not own it, or lacks `CREATE` on the database, which
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
///     Err(Error::InTheWay { objects }) => println!("to be dropped first: {objects:?}"),
///     Err(error) => return Err(error),
/// }
/// # assert!(migrations::uninstall(conn)?.is_empty());
/// # Ok::<(), Error>(())
/// ```
pub fn uninstall(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    transaction::refuse_any(conn)?;
    let mut guard = LOCK.acquire_on(conn)?;
    let reverted = match installed(guard.conn())? {
        Installed::Nothing => Vec::new(),
        Installed::Unrecorded => {
            let differences = vec!["relation installed_migration is missing".to_owned()];
            return Err(Error::ForeignInstallation { differences });
        }
        Installed::Versions(versions) => {
            rights::transaction(guard.conn(), |conn| revert(conn, &versions))?
        }
    };
    guard.release()?;
    Ok(reverted)
}

fn revert(conn: &mut PgConnection, versions: &[String]) -> Result<Vec<MigrationVersion<'static>>> {
    diesels_table::forget(conn, versions)?;
    adopt::pin_search_path(conn)?;
    let objects = in_the_way(conn, versions)?;
    if !objects.is_empty() {
        return Err(Error::InTheWay { objects });
    }
    let mut reverted = Vec::new();
    for migration in OURS.iter().rev() {
        let version = migration.version();
        if versions.contains(&version.to_string()) {
            migration.revert(conn)?;
            reverted.push(version);
        }
    }
    Ok(reverted)
}

fn in_the_way(conn: &mut PgConnection, versions: &[String]) -> Result<Vec<String>> {
    let known: Vec<_> = OURS.iter().map(|ours| ours.version().to_string()).collect();
    let newer: Vec<_> = versions
        .iter()
        .filter(|version| !known.contains(version))
        .map(|version| format!("migration {version} of a newer release"))
        .collect();
    if !newer.is_empty() {
        return Ok(newer);
    }
    let ours: Vec<String> = adopt::expected(conn)?.objects().iter().cloned().collect();
    let found: Vec<InTheWay> = diesel::sql_query(format!("{OBJECTS}{IN_THE_WAY}"))
        .bind::<Array<Text>, _>(ours)
        .load(conn)?;
    Ok(found.into_iter().map(|it| it.object).collect())
}
