//! This crate's own migrations, with the text of their files.

use diesel::connection::SimpleConnection;
use diesel::migration::MigrationVersion;
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use crate::error::{Error, Result};

/// One of this crate's migrations: a directory below `migrations/`.
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

/// All of them, in their order.
pub(super) static OURS: [OurMigration; 5] = embedded![
    "2000-01-01-000001_resource_control",
    "2000-01-01-000002_throttled_resources",
    "2000-01-01-000003_throttled_keys",
    "2000-01-01-000004_service_requests",
    "2000-01-01-000005_fences",
];

const CREATE_SCHEMA: &str = "CREATE SCHEMA resource_control;";

/// Why one of them could not be run.
#[derive(Debug, thiserror::Error)]
#[error("the migration {name} failed")]
pub(super) struct Failed {
    name: &'static str,
    pub(super) source: DieselError,
}

impl OurMigration {
    /// Its version, as Diesel makes it of a directory's name.
    pub(super) fn version(&self) -> MigrationVersion<'static> {
        version_of(self.name).into()
    }

    /// Runs `up.sql`, which also writes the version into `installed_migration`.
    pub(super) fn run(&self, conn: &mut PgConnection) -> Result<()> {
        self.execute(conn, self.up)
    }

    /// Runs `up.sql` where the schema is there, empty or made by hand.
    pub(super) fn run_in_the_schema(&self, conn: &mut PgConnection) -> Result<()> {
        self.execute(conn, &self.up.replacen(CREATE_SCHEMA, "", 1))
    }

    /// Runs `down.sql`.
    pub(super) fn revert(&self, conn: &mut PgConnection) -> Result<()> {
        self.execute(conn, self.down)
    }

    fn execute(&self, conn: &mut PgConnection, sql: &str) -> Result<()> {
        conn.batch_execute(sql).map_err(|source| {
            let name = self.name;
            Error::Migration(Box::new(Failed { name, source }))
        })
    }
}

/// The version that Diesel makes of a directory's name.
pub(super) fn version_of(name: &str) -> String {
    let (version, _) = name.split_once('_').unwrap_or((name, ""));
    version.replace('-', "")
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
