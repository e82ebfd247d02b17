//! Adopting a schema without recorded versions: one that somebody made by hand from the article, or a copy
//! of ours without its rows.

use diesel::connection::SimpleConnection;
use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::Text;

use super::contents::{Contents, beside, pin_search_path};
use super::ours::OURS;
use crate::error::{Error, Result, Schema};

/// The article's four objects. The function stands for its name, its arguments and its result: ours
/// replaces what it does.
const ARTICLE: &str = "
    CREATE SCHEMA resource_control;
    CREATE TYPE resource_control.throttled_resource_enum AS ENUM ();
    CREATE TABLE resource_control.throttled_resource (
        resource_id resource_control.throttled_resource_enum PRIMARY KEY,
        throttle_interval interval NOT NULL
            CONSTRAINT positive_delays_only CHECK (throttle_interval > '00:00:00'),
        last_locked timestamptz NOT NULL DEFAULT '-infinity',
        last_locker_details text NOT NULL DEFAULT ''
            CONSTRAINT empty_rules CHECK (
                (last_locked = '-infinity' AND last_locker_details = '')
                OR (last_locked != '-infinity' AND length(trim(last_locker_details)) > 0)
            )
    );
    CREATE FUNCTION resource_control.lock_throttled_resource(
        resource_id_var resource_control.throttled_resource_enum, details_var text
    ) RETURNS boolean LANGUAGE sql AS 'SELECT false'";

/// Records what is there, adds what is missing, and returns the versions. Runs inside a transaction.
pub(super) fn adopt(conn: &mut PgConnection) -> Result<Vec<MigrationVersion<'static>>> {
    pin_search_path(conn)?;
    let found = Contents::of(conn)?;
    let there = if found.have("table resource_control.installed_migration") {
        recognise(conn, &found)?
    } else {
        if !found.are_empty() {
            require_the_article(conn, found)?;
        }
        0
    };
    for migration in &OURS[..there] {
        diesel::sql_query("INSERT INTO resource_control.installed_migration (version) VALUES ($1)")
            .bind::<Text, _>(migration.version().to_string())
            .execute(conn)?;
    }
    for migration in &OURS[there..] {
        migration.run_in_the_schema(conn)?;
    }
    Ok(OURS.iter().map(|ours| ours.version()).collect())
}

/// Refuses what is not exactly the article's, apart from what depends on it from outside.
fn require_the_article(conn: &mut PgConnection, found: Contents) -> Result<()> {
    let article = beside(conn, |conn| {
        conn.batch_execute(ARTICLE)?;
        Ok(Contents::of(conn)?.without_bodies())
    })?;
    let found = found.without_bodies();
    let mut differences = found.differences(&article);
    let others = found.beyond(&article).filter(|object| found.have(object));
    differences.extend(others.map(|object| format!("{object} is not expected")));
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::Schema(Schema::Foreign { differences }))
}

/// Returns how many of our migrations a copy without rows was made of.
fn recognise(conn: &mut PgConnection, found: &Contents) -> Result<usize> {
    let releases = beside(conn, |conn| {
        let mut releases = Vec::new();
        for migration in &OURS {
            migration.run(conn)?;
            releases.push(Contents::of(conn)?);
        }
        Ok(releases)
    })?;
    let newest = &releases[OURS.len() - 1];
    let is_whole = |release: &&Contents| {
        found.differences(release).is_empty()
            // Nor is there a part of the next.
            && !newest.beyond(release).any(|object| found.have(object))
    };
    match releases.iter().rposition(|release| is_whole(&release)) {
        Some(last) => Ok(last + 1),
        None => Err(Error::Schema(Schema::Foreign {
            differences: found.differences(newest),
        })),
    }
}
