//! Adoption of a schema without recorded versions: one that was created by hand from the article, or a copy of this crate's
//! schema without its rows.

use diesel::migration::MigrationVersion;
use diesel::sql_types::Text;

use super::contents::{Contents, beside, pin_search_path};
use super::ours::OURS;
use crate::error::{Error, Result, Schema};
use crate::session::Session;

/// The article's four objects. Only the name, the arguments and the result of the function count, because this crate's
/// function replaces its body.
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

/// Records the migrations whose objects exist, runs the others, and returns all versions. Runs inside a transaction.
pub(super) async fn adopt<S: Session>(session: &mut S) -> Result<Vec<MigrationVersion<'static>>> {
    pin_search_path(session).await?;
    let found = Contents::of(session).await?;
    let there = if found.have("table resource_control.installed_migration") {
        recognise(session, &found).await?
    } else {
        if !found.are_empty() {
            require_the_article(session, found).await?;
        }
        0
    };
    for migration in &OURS[..there] {
        let insert = diesel::sql_query(
            "INSERT INTO resource_control.installed_migration (version) VALUES ($1)",
        );
        let version = migration.version().to_string();
        session.execute(insert.bind::<Text, _>(version)).await?;
    }
    for migration in &OURS[there..] {
        migration.run_in_the_schema(session).await?;
    }
    Ok(OURS.iter().map(|ours| ours.version()).collect())
}

/// Refuses a schema that is not exactly the article's, apart from objects outside it that depend on it.
async fn require_the_article<S: Session>(session: &mut S, found: Contents) -> Result<()> {
    let article = beside(session, async |session: &mut S| {
        session.batch(ARTICLE).await?;
        Ok(Contents::of(session).await?.without_bodies())
    })
    .await?;
    let found = found.without_bodies();
    let mut differences = found.differences(&article);
    let others = found.beyond(&article).filter(|object| found.have(object));
    differences.extend(others.map(|object| format!("{object} is not expected")));
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::Schema(Schema::Foreign { differences }))
}

/// Returns how many of this crate's migrations a copy without rows was made of.
async fn recognise<S: Session>(session: &mut S, found: &Contents) -> Result<usize> {
    let releases = beside(session, async |session: &mut S| {
        let mut releases = Vec::new();
        for migration in &OURS {
            migration.run(session).await?;
            releases.push(Contents::of(session).await?);
        }
        Ok(releases)
    })
    .await?;
    let newest = &releases[OURS.len() - 1];
    let is_whole = |release: &&Contents| {
        found.differences(release).is_empty()
            // No part of the next release may exist either.
            && !newest.beyond(release).any(|object| found.have(object))
    };
    match releases.iter().rposition(|release| is_whole(&release)) {
        Some(last) => Ok(last + 1),
        None => Err(Error::Schema(Schema::Foreign {
            differences: found.differences(newest),
        })),
    }
}
