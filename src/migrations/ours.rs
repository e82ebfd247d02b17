//! This crate's own migrations: their files, and which of them the database records.

use std::collections::BTreeSet;

use diesel::migration::MigrationVersion;
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sql_types::{Bool, Text};

use crate::advisory::AdvisoryLock;
use crate::error::{Error, Result};
use crate::installed;
use crate::key::LockKey;
use crate::session::Session;

/// The lock under which [`run_pending`](super::run_pending()), [`install`](super::install()) and every other function of
/// this module that changes the database runs.
///
/// Its key is part of this crate's contract, as that of every name is: 7668513674988384022.
pub static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::frozen(
    "diesel_interlock migrations",
    7668513674988384022,
));

/// A migration of this crate: a directory below `migrations/`.
#[derive(Debug)]
pub(super) struct OurMigration {
    /// The name of the directory.
    pub(super) name: &'static str,
    /// The text of `up.sql`.
    pub(super) up: &'static str,
    /// The text of `down.sql`.
    pub(super) down: &'static str,
}

macro_rules! embedded {
    ($($name:literal),+ $(,)?) => {
        [$(OurMigration {
            name: $name,
            up: include_str!(concat!("../../migrations/", $name, "/up.sql")),
            down: include_str!(concat!("../../migrations/", $name, "/down.sql")),
        }),+]
    };
}

/// This crate's migrations, in their order.
pub(super) static OURS: [OurMigration; 6] = embedded![
    "2000-01-01-000001_resource_control",
    "2000-01-01-000002_throttled_resources",
    "2000-01-01-000003_throttled_keys",
    "2000-01-01-000004_service_requests",
    "2000-01-01-000005_fences",
    "2000-01-01-000006_rate_limits",
];

const CREATE_SCHEMA: &str = "CREATE SCHEMA resource_control;";

/// The error of a migration that failed.
#[derive(Debug, thiserror::Error)]
#[error("the migration {name} failed")]
pub(super) struct Failed {
    name: &'static str,
    pub(super) source: DieselError,
}

impl OurMigration {
    /// Returns the version, as Diesel derives it from the name of the directory.
    pub(super) fn version(&self) -> MigrationVersion<'static> {
        version_of(self.name).into()
    }

    /// Runs `up.sql`, which also inserts the version into `installed_migration`.
    pub(super) async fn run<S: Session>(&self, session: &mut S) -> Result<()> {
        self.send(session, self.up).await
    }

    /// Runs `up.sql` where the schema exists and is empty or was created by hand.
    pub(super) async fn run_in_the_schema<S: Session>(&self, session: &mut S) -> Result<()> {
        let up = self.up.replacen(CREATE_SCHEMA, "", 1);
        self.send(session, &up).await
    }

    /// Runs `down.sql`.
    pub(super) async fn revert<S: Session>(&self, session: &mut S) -> Result<()> {
        self.send(session, self.down).await
    }

    async fn send<S: Session>(&self, session: &mut S, sql: &str) -> Result<()> {
        session.batch(sql).await.map_err(|source| {
            let name = self.name;
            Error::Migration(Box::new(Failed { name, source }))
        })
    }
}

/// Returns the names of the tables, functions and types that the migrations create, among others that they mention.
pub(super) fn names() -> BTreeSet<&'static str> {
    let mentions = OURS
        .iter()
        .flat_map(|ours| ours.up.split("resource_control."));
    let is_in_name = |it: char| it.is_ascii_alphanumeric() || it == '_';
    mentions
        .filter_map(|mention| mention.split(|it| !is_in_name(it)).next())
        .collect()
}

/// Returns the version that Diesel derives from the name of a directory.
pub(super) fn version_of(name: &str) -> String {
    let (version, _) = name.split_once('_').unwrap_or((name, ""));
    version.replace('-', "")
}

/// The versions that a database records.
#[derive(Debug)]
pub(super) enum Recorded {
    /// The schema `resource_control` does not exist.
    Nothing,
    /// The schema exists without a recorded version. It was created by hand, or copied without its rows.
    NoVersion,
    /// The versions that were run, those of newer releases among them.
    Versions(Vec<String>),
}

impl Recorded {
    /// Returns this crate's migrations that were not run, in their order.
    pub(super) fn pending(&self) -> impl Iterator<Item = &'static OurMigration> + use<> {
        let ran: Vec<String> = match self {
            Recorded::Versions(ran) => ran.clone(),
            Recorded::Nothing | Recorded::NoVersion => Vec::new(),
        };
        OURS.iter()
            .filter(move |ours| !ran.contains(&ours.version().to_string()))
    }

    /// Reads the versions in two round trips, under any search path.
    pub(super) async fn of<S: Session>(session: &mut S) -> Result<Self> {
        #[derive(QueryableByName)]
        struct Present {
            #[diesel(sql_type = Bool)]
            schema: bool,
            #[diesel(sql_type = Bool)]
            versions: bool,
        }
        #[derive(QueryableByName)]
        struct Row {
            #[diesel(sql_type = Text)]
            version: String,
        }
        let query = diesel::sql_query(
            "SELECT pg_catalog.count(nspname) OPERATOR(pg_catalog.>) 0 AS schema, \
                 pg_catalog.count(attname) OPERATOR(pg_catalog.>) 0 AS versions \
             FROM pg_catalog.pg_namespace \
             LEFT JOIN pg_catalog.pg_class ON relnamespace OPERATOR(pg_catalog.=) pg_namespace.oid \
                 AND relname OPERATOR(pg_catalog.=) 'installed_migration' \
                 AND relkind OPERATOR(pg_catalog.=) 'r' \
             LEFT JOIN pg_catalog.pg_attribute ON attrelid OPERATOR(pg_catalog.=) pg_class.oid \
                 AND attname OPERATOR(pg_catalog.=) 'version' \
             WHERE nspname OPERATOR(pg_catalog.=) 'resource_control'",
        );
        let present: Present = session.one(query).await?;
        if !present.schema {
            return Ok(Recorded::Nothing);
        }
        if !present.versions {
            return Ok(Recorded::NoVersion);
        }
        let query = diesel::sql_query(
            "SELECT version::pg_catalog.text FROM resource_control.installed_migration",
        );
        let rows = session.all(query).await;
        let rows: Vec<Row> =
            installed::explained(session, rows, &[("installed_migration", "SELECT")]).await?;
        let versions: Vec<_> = rows.into_iter().map(|row| row.version).collect();
        Ok(if versions.is_empty() {
            Recorded::NoVersion
        } else {
            Recorded::Versions(versions)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    use super::{CREATE_SCHEMA, OURS};

    #[test]
    fn they_are_exactly_the_directory_migrations() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
        let mut files = BTreeMap::new();
        for directory in fs::read_dir(&root).unwrap() {
            for file in fs::read_dir(directory.unwrap().path()).unwrap() {
                let path = file.unwrap().path();
                let name = path.strip_prefix(&root).unwrap().to_owned();
                files.insert(name, fs::read_to_string(path).unwrap());
            }
        }
        let embedded: BTreeMap<_, _> = OURS
            .iter()
            .flat_map(|ours| [("up.sql", ours.up), ("down.sql", ours.down)].map(|it| (ours, it)))
            .map(|(ours, (file, text))| (Path::new(ours.name).join(file), text.to_owned()))
            .collect();
        assert_eq!(embedded, files);
        assert!(OURS.windows(2).all(|pair| pair[0].name < pair[1].name));
    }

    #[test]
    fn each_writes_and_deletes_its_own_version() {
        for ours in &OURS {
            let version = ours.version();
            let insert = format!(
                "INSERT INTO resource_control.installed_migration (version) VALUES ('{version}');"
            );
            let delete = format!(
                "DELETE FROM resource_control.installed_migration WHERE version = '{version}';"
            );
            let end = format!("{insert}\nEND\n$migration$;");
            assert!(ours.up.trim_end().ends_with(&end), "{}", ours.name);
            let drops_the_table = "DROP TABLE resource_control.installed_migration;";
            let first = std::ptr::eq(ours, &OURS[0]);
            let deletes = if first { drops_the_table } else { &delete };
            assert!(ours.down.contains(deletes), "{}", ours.name);
        }
    }

    #[test]
    fn the_first_creates_the_schema_in_a_statement_of_its_own() {
        assert_eq!(OURS[0].up.matches(CREATE_SCHEMA).count(), 1);
    }
}
