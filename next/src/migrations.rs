//! Installing the schema `resource_control`, and running an application's own migrations once.

mod run_pending;

use std::io;
use std::path::{Path, PathBuf};

use diesel::sql_types::{Array, Bool, Text};

pub use self::run_pending::{Target, run_pending};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::exclusion;
use crate::mode::Mode;
use crate::pool::{Borrowed, Pool, Reply};
use crate::session::Session;
use crate::statement::Statement;
use crate::transaction::Own;

/// A migration of this crate.
struct File {
    name: &'static str,
    version: &'static str,
    up: &'static str,
    down: &'static str,
}

macro_rules! files {
    ($($name:literal $version:literal)*) => {
        &[$(File {
            name: $name,
            version: $version,
            up: include_str!(concat!("../migrations/", $name, "/up.sql")),
            down: include_str!(concat!("../migrations/", $name, "/down.sql")),
        }),*]
    };
}

/// Each does nothing if its version is recorded, and otherwise creates what is missing and records it.
const FILES: &[File] = files! {
    "2000-01-01-000001_resource_control" "20000101000001"
    "2000-01-01-000002_throttles" "20000101000002"
    "2000-01-01-000003_service_requests" "20000101000003"
    "2000-01-01-000004_fences" "20000101000004"
    "2000-01-01-000005_rate_limits" "20000101000005"
    "2000-01-01-000006_schedules" "20000101000006"
    "2000-01-01-000008_views" "20000101000008"
};

/// The encoding of the database, and whether it has the table of the versions.
const STATE: &str = "SELECT pg_catalog.getdatabaseencoding()::text,
    pg_catalog.to_regclass('resource_control.installed_migration') IS NOT NULL";

const VERSIONS: &str = "SELECT COALESCE(pg_catalog.array_agg(version), '{}') FROM resource_control.installed_migration";

/// Which of these names nothing in the database has.
const MISSING: &str = "SELECT COALESCE(pg_catalog.array_agg(DISTINCT o), '{}') FROM pg_catalog.unnest($1) AS o
    WHERE pg_catalog.to_regclass(o) IS NULL AND pg_catalog.to_regproc(o) IS NULL AND pg_catalog.to_regtype(o) IS NULL";

impl File {
    /// The tables, sequences, types, views and functions that the file creates.
    fn objects(&self) -> impl Iterator<Item = String> + use<> {
        self.up.lines().filter_map(|line| {
            let created = line.trim_start().strip_prefix("CREATE ")?;
            let (_, name) = created.split_once("resource_control.")?;
            let end = name.find(|c: char| c != '_' && !c.is_alphanumeric());
            Some(format!(
                "resource_control.{}",
                &name[..end.unwrap_or(name.len())]
            ))
        })
    }
}

/// Creates the schema `resource_control`, or what it lacks of this release. Any number of instances may call it when they start.
///
/// It runs the files of [`write_to`], each in a READ COMMITTED transaction of its own and under a transaction lock, so it works behind
/// a pooler in transaction mode. If nothing is pending it takes three round trips, and a role that may not create anything may call it.
/// If a second connection of the pool is idle, it also [checks whether session locks exclude](crate::check_exclusion), and logs a
/// warning if they do not.
///
/// To uninstall, run `DROP SCHEMA resource_control CASCADE`, or the down files.
///
/// # Errors
///
/// [`Error::Encoding`] for a database that is not UTF8, [`Error::Migration`] with the database's reason, [`Error::Incomplete`] for a
/// schema that is recorded and not whole, with the statement that repairs it, [`Error::Pool`] and [`Error::Database`].
///
/// ```
/// # let pool = workbench::Database::new().pool(2);
/// diesel_interlock::migrations::install(&pool)?;
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn install<P: Pool>(pool: &P) -> Reply<'_, P, Result<()>> {
    P::Mode::drive(async move {
        let state = Statement::<(Text, Bool)>::new(STATE, []);
        let ((encoding, has_versions), _): ((String, bool), _) = ask(pool, None, [state]).await?;
        if encoding != "UTF8" {
            return Err(Error::Encoding(encoding));
        }
        let mut installed: Vec<String> = Vec::new();
        if has_versions {
            (installed, _) = ask(pool, None, [Statement::<Array<Text>>::new(VERSIONS, [])]).await?;
        }
        let mut borrowed = Borrowed::new(pool, None).await?;
        for file in FILES {
            if !installed.iter().any(|version| version == file.version) {
                run(borrowed.conn(), file).await?;
            }
        }
        drop(borrowed);
        check_whole(pool).await?;
        if pool.can_spare() {
            warn(exclusion::check(pool).await);
        }
        Ok(())
    })
}

/// At a stricter level its snapshot would be older than its lock.
async fn run<S: Session>(session: &mut S, file: &File) -> Result<()> {
    let File { version, up, .. } = file;
    let transaction = Own::begin(session).await?;
    let ran = transaction.conn.batch(up).await;
    let ran = ran.map_err(|source| Error::Migration { version, source });
    transaction.end(ran).await
}

async fn check_whole<P: Pool>(pool: &P) -> Result<()> {
    let all: Vec<String> = FILES.iter().flat_map(File::objects).collect();
    let ask_for = Statement::<Array<Text>>::new(MISSING, [all.into()]);
    let (missing, _): (Vec<String>, _) = ask(pool, None, [ask_for]).await?;
    if missing.is_empty() {
        return Ok(());
    }
    let lacks = |file: &&File| file.objects().any(|object| missing.contains(&object));
    let versions = FILES
        .iter()
        .filter(lacks)
        .map(|file| file.version)
        .collect();
    Err(Error::Incomplete { missing, versions })
}

fn warn(checked: Result<()>) {
    if let Err(error @ Error::NotExclusive) = checked {
        let subject = Subject {
            primitive: "lock",
            name: "",
        };
        let took = std::time::Duration::ZERO;
        subject.event("install", "failed", took, None, Some(&error));
    }
}

/// Writes the migrations as files that diesel_cli and psql run, into a directory each. Returns the new ones.
///
/// A directory that exists stays as it is. Their versions are older than any of yours, so that diesel_cli can revert yours.
pub fn write_to(directory: impl AsRef<Path>) -> io::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    for File { name, up, down, .. } in FILES {
        let directory = directory.as_ref().join(name);
        if !directory.exists() {
            std::fs::create_dir_all(&directory)?;
            std::fs::write(directory.join("up.sql"), up)?;
            std::fs::write(directory.join("down.sql"), down)?;
            written.push(directory);
        }
    }
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_that_of_the_directory() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
        let mut names: Vec<_> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            FILES.iter().map(|file| file.name).collect::<Vec<_>>()
        );
    }

    #[test]
    fn each_file_creates_something_and_records_its_version() {
        for file in FILES {
            assert!(file.objects().count() > 0, "{}", file.name);
            assert!(
                file.up.contains(&format!("VALUES ('{}')", file.version)),
                "{}",
                file.name
            );
            let digits: String = file.name.chars().filter(char::is_ascii_digit).collect();
            assert_eq!(digits, file.version);
        }
    }
}
