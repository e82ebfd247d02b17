//! Installs the schema `resource_control`, and runs an application's own migrations once.
//!
//! The schema is an SQL file, which [`install`], `diesel_cli` and psql run in the same way. It does
//! nothing if its version is recorded in `resource_control.installed_migration`. So any of these
//! tools may run it, also at the same time. Releases that change the schema add files. `DROP SCHEMA
//! resource_control CASCADE` removes everything.

// **Each file is idempotent and records itself**, under its own transaction lock. So psql,
// diesel_cli and `install` may run the files at the same time, also behind a pooler. To repair a
// schema that lacks something, delete the row of that migration and install again.
//
// **Each file runs at READ COMMITTED.** With a stricter default, the snapshot would be older than
// the lock, so two instances would both try to create the same objects.
//
// **Each file begins with a statement that switches the role's timeouts off**, for its transaction.
// The statement that waits cannot do that itself: its timeout runs already.

mod run_pending;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use diesel::sql_types::{Array, Bool, Nullable, Text};

pub use self::run_pending::{Target, run_pending};
use crate::call::ask;
use crate::error::{Error, Result};
use crate::event::{Event, Outcome, Subject};
use crate::exclusion;
use crate::mode::Mode;
use crate::pool::{Checkout, Pool, Reply};
use crate::session::{Session, classify, is_closed};
use crate::statement::{Statement, own_lock};
use crate::transaction::Own;

/// One of the migrations of this crate.
#[derive(Debug)]
struct File {
    name: &'static str,
    version: &'static str,
    up: &'static str,
    down: &'static str,
}

macro_rules! files {
    ($($name:literal $version:literal,)*) => {
        &[$(File {
            name: $name,
            version: $version,
            up: include_str!(concat!("../migrations/", $name, "/up.sql")),
            down: include_str!(concat!("../migrations/", $name, "/down.sql")),
        }),*]
    };
}

const FILES: &[File] = files! {
    "2000-01-01-000001_resource_control" "20000101000001",
};

const SUBJECT: Subject = Subject {
    primitive: "migrations",
    name: "resource_control",
};

/// Reads the encoding of the database, and whether anything was installed.
const LOOK: &str = "SELECT pg_catalog.getdatabaseencoding()::pg_catalog.text AS encoding, \
     pg_catalog.to_regclass('resource_control.installed_migration') IS NOT NULL AS is_installed";

/// Reads the recorded versions, and which of the given objects do not exist.
const STATE: &str = "
    SELECT (SELECT COALESCE(pg_catalog.array_agg(m.version), '{}')
            FROM resource_control.installed_migration AS m) AS versions,
        (SELECT COALESCE(pg_catalog.array_agg(o ORDER BY o), '{}') FROM pg_catalog.unnest($1) AS o,
                (SELECT 'resource_control'::pg_catalog.regnamespace) AS n (here)
            WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class AS c
                    WHERE c.relnamespace OPERATOR(pg_catalog.=) n.here
                        AND c.relname OPERATOR(pg_catalog.=) o)
                AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc AS p
                    WHERE p.pronamespace OPERATOR(pg_catalog.=) n.here
                        AND p.proname OPERATOR(pg_catalog.=) o)
                AND NOT EXISTS (SELECT FROM pg_catalog.pg_type AS t
                    WHERE t.typnamespace OPERATOR(pg_catalog.=) n.here
                        AND t.typname OPERATOR(pg_catalog.=) o)) AS missing";

/// Reads who owns the schema if a condition is met.
macro_rules! owner_if {
    ($condition:literal) => {
        concat!(
            "SELECT CASE WHEN ",
            $condition,
            " THEN (SELECT pg_catalog.pg_get_userbyid(n.nspowner)::pg_catalog.text
                FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'resource_control') END AS owner"
        )
    };
}

const IS_COPY: &str = owner_if!("resource_control.is_copy()");

/// Null is for a copy whose base this role may not set.
const SET_BASE: &str = owner_if!("resource_control.set_token_base() IS NULL");
const SET_BASE_ANEW: &str = owner_if!("resource_control.set_token_base(true) IS NULL");

#[derive(Debug, Default)]
struct State {
    recorded: Vec<String>,
    missing: Vec<String>,
}

/// Whether any file was pending.
struct Done(bool);

impl Outcome for Done {
    fn word(&self) -> &'static str {
        if self.0 { "ran" } else { "nothing pending" }
    }
}

/// Creates the schema `resource_control`, or the parts of this release that it lacks. Every
/// instance may call it when it starts.
///
/// If nothing is pending, it takes three round trips, and the role needs only the right to read.
/// Otherwise the role must own the schema, or be allowed to create it.
///
/// If the database is a copy of another one, fencing tokens continue above all that the copy shows.
/// Only the owner of the schema can do this. A copy of the server's files is not noticed: see
/// [`restart_tokens`].
///
/// Each pending file runs in its own transaction, under a transaction lock. So `install` also works
/// behind a pooler in transaction mode, and only one of many instances runs a file. If a file
/// fails, what the files before it have created stays.
///
/// If the pool has two idle connections, `install` also [checks](crate::check_exclusion) whether
/// session locks exclude on this pool, in sixteen more round trips, and logs a warning if they do
/// not.
///
/// # Errors
///
/// [`Error::Migration`] if a file failed; [`Error::Incomplete`] if a part of the schema is recorded
/// as installed but does not exist, with the statement that repairs it; [`Error::Encoding`] unless
/// the database is in UTF8; [`Error::CopiedSchema`] if the database is a copy and the role may not
/// set its tokens; [`Error::Standby`] if the server refuses to write; [`Error::Pool`]; and
/// [`Error::Database`].
///
/// ```
/// use diesel_interlock::migrations;
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// migrations::install(&pool)?; // `.await` it over deadpool and bb8
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn install<P: Pool>(pool: &P) -> Reply<'_, P, ()> {
    P::Mode::drive(async move {
        SUBJECT
            .observe("install", run_files(pool, SET_BASE))
            .await?;
        if pool.idle() >= 2 {
            let began = Instant::now();
            if let Err(error @ Error::NotExclusive(_)) =
                exclusion::check(pool, Duration::from_secs(5)).await
            {
                Event {
                    took: began.elapsed(),
                    error: Some(&error),
                    is_returned: false,
                    ..SUBJECT.event("check_exclusion", "failed")
                }
                .emit();
            }
        }
        Ok(())
    })
}

/// As [`install`], and also lets fencing tokens continue above all that the database shows.
///
/// Call it once after a restore, copy or upgrade of any kind, as the owner of the schema, before
/// the program starts. `install` notices a copy by itself, except a copy of the server's files
/// (base backup, snapshot, image of a machine), which does not differ from its original. Where
/// nothing was copied, tokens become larger and nothing else happens: holders keep what they hold.
///
/// # Errors
///
/// As for [`install`], but [`Error::Database`] if the role may not set the tokens.
///
/// ```
/// use diesel_interlock::migrations;
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// migrations::restart_tokens(&pool)?; // `.await` it over deadpool and bb8
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn restart_tokens<P: Pool>(pool: &P) -> Reply<'_, P, ()> {
    P::Mode::drive(async move {
        SUBJECT
            .observe("restart_tokens", run_files(pool, SET_BASE_ANEW))
            .await?;
        Ok(())
    })
}

/// Checks that [`install`] would find nothing to do, and changes nothing. Three round trips.
///
/// # Errors
///
/// [`Error::NotInstalled`] if a file is pending, [`Error::Incomplete`] and [`Error::Encoding`] as
/// for [`install`], [`Error::CopiedSchema`] if the database is a copy, [`Error::Pool`], and
/// [`Error::Database`].
///
/// ```
/// use diesel_interlock::{Error, migrations};
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// assert!(matches!(migrations::check(&pool), Err(Error::NotInstalled)));
/// migrations::install(&pool)?;
/// migrations::check(&pool)?;
/// # Ok::<(), Error>(())
/// ```
pub fn check<P: Pool>(pool: &P) -> Reply<'_, P, ()> {
    P::Mode::drive(async move {
        let state = State::look(pool).await?;
        if !state.pending().is_empty() {
            return Err(Error::NotInstalled);
        }
        state.require_all()?;
        require_no_owner(pool, IS_COPY).await
    })
}

/// Runs the files that are pending, and then a statement for the base of fencing tokens.
async fn run_files<P: Pool>(pool: &P, set_base: &'static str) -> Result<Done> {
    let mut state = State::look(pool).await?;
    let pending = state.pending();
    if !pending.is_empty() {
        let mut ran = run_each(&pending, pool).await;
        if matches!(ran, Err(Error::Standby)) {
            // The server has refused, so nothing was done.
            ran = run_each(&pending, pool).await;
        }
        ran?;
        state = State::of(pool).await?;
    }
    state.require_all()?;
    require_no_owner(pool, set_base).await?;
    Ok(Done(!pending.is_empty()))
}

/// Fails if the statement returns who must install, because the database is a copy.
async fn require_no_owner<P: Pool>(pool: &P, sql: &'static str) -> Result<()> {
    let owner = Statement::<Nullable<Text>>::new(sql, []);
    let (owner, _): (Option<String>, _) = ask(pool, None, &owner).await?;
    owner.map_or(Ok(()), |owner| Err(Error::CopiedSchema { owner }))
}

async fn run_each<P: Pool>(files: &[&File], pool: &P) -> Result<()> {
    let mut checkout = Checkout::new(pool, None).await?;
    let mut ran = Ok(());
    for file in files {
        ran = file.run(checkout.conn()).await;
        if ran.is_err() {
            break;
        }
    }
    match ran {
        Err(Error::Standby) => checkout.discard(),
        _ => checkout.give_back(),
    }
    ran
}

impl File {
    /// Runs the file at READ COMMITTED, because a stricter transaction would not see what was
    /// committed while it waited for the lock.
    async fn run<S: Session>(&self, session: &mut S) -> Result<()> {
        let transaction = Own::begin_pooled(session).await?;
        let ran = match transaction.conn.batch(self.up).await {
            Ok(()) => Ok(()),
            Err(cause) => Err(match classify(transaction.conn, cause).await {
                Error::Database(cause) if !is_closed(&cause) => Error::Migration {
                    version: self.version,
                    cause,
                },
                unavailable => unavailable,
            }),
        };
        transaction.end(ran).await
    }

    fn objects(&self) -> impl Iterator<Item = &'static str> + use<> {
        objects(self.up)
    }
}

impl State {
    /// Reads what is installed. An error if the encoding of the database does not fit.
    async fn look<P: Pool>(pool: &P) -> Result<Self> {
        let look = Statement::<(Text, Bool)>::new(LOOK, []);
        let ((encoding, is_there), _): ((String, bool), _) = ask(pool, None, &look).await?;
        if encoding != "UTF8" {
            return Err(Error::Encoding(encoding));
        }
        if is_there {
            Self::of(pool).await
        } else {
            Ok(Self::default())
        }
    }

    fn pending(&self) -> Vec<&'static File> {
        let is_pending = |file: &&File| !self.recorded.iter().any(|it| it == file.version);
        FILES.iter().filter(is_pending).collect()
    }

    async fn of<P: Pool>(pool: &P) -> Result<Self> {
        let all: Vec<String> = FILES
            .iter()
            .flat_map(File::objects)
            .map(Into::into)
            .collect();
        let statement = Statement::<(Array<Text>, Array<Text>)>::new(STATE, [all.into()]);
        let ((recorded, missing), _) = ask(pool, None, &statement).await?;
        Ok(Self { recorded, missing })
    }

    fn require_all(self) -> Result<()> {
        let missing = self.missing;
        if missing.is_empty() {
            return Ok(());
        }
        let lacks = |file: &&File| {
            file.objects()
                .any(|object| missing.iter().any(|it| it == object))
        };
        let versions = FILES
            .iter()
            .filter(lacks)
            .map(|file| file.version)
            .collect();
        Err(Error::Incomplete { missing, versions })
    }
}

/// Writes the migrations of this crate into an application's directory of migrations, for
/// `diesel_cli` and psql. Returns the directories that are new. Call it again after an upgrade of
/// this crate.
///
/// Their versions are older than all others, so `diesel migration run` runs them first. You may
/// call [`install`] as well.
///
/// # Errors
///
/// Errors of the file system.
///
/// ```
/// # let name = format!("interlock-write-to-{}", std::process::id());
/// # let directory = std::env::temp_dir().join(name);
/// let new = diesel_interlock::migrations::write_to(&directory)?; // "migrations"
/// # assert!(!new.is_empty());
/// # std::fs::remove_dir_all(directory)?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn write_to(directory: impl AsRef<Path>) -> io::Result<Vec<PathBuf>> {
    let mut written = Vec::new();
    for File { name, up, down, .. } in FILES {
        let directory = directory.as_ref().join(name);
        let files = [
            (directory.join("up.sql"), up),
            (directory.join("down.sql"), down),
        ];
        if files.iter().all(|(path, _)| path.exists()) {
            continue;
        }
        fs::create_dir_all(&directory)?;
        for (path, text) in files {
            fs::write(path, text)?;
        }
        written.push(directory);
    }
    Ok(written)
}

/// Returns the text of each migration. `interlock doctor` compares the database with these.
#[doc(hidden)]
pub fn texts() -> impl Iterator<Item = &'static str> {
    FILES.iter().map(|file| file.up)
}

/// The number of the transaction lock under which each file runs.
#[doc(hidden)]
pub const LOCK: &str = own_lock!(install);

/// Returns what the text of a migration creates: tables, indexes, types, views, sequences and
/// functions.
#[doc(hidden)]
pub fn objects(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.lines().filter_map(|line| {
        let created = line.trim_start().strip_prefix("CREATE ")?;
        let name = match created.split_once("INDEX IF NOT EXISTS ") {
            Some((_, index)) => index,
            None => created.split_once("resource_control.")?.1,
        };
        name.split(|c: char| c != '_' && !c.is_alphanumeric())
            .next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_the_directory() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations");
        let entries = fs::read_dir(root).unwrap().map(|entry| entry.unwrap());
        let entries = entries
            .filter(|entry| entry.path().is_dir())
            .map(|entry| entry.file_name());
        let mut names: Vec<_> = entries.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        let listed: Vec<_> = FILES.iter().map(|file| file.name).collect();
        assert_eq!(names, listed);
    }

    #[test]
    fn each_file_writes_and_deletes_its_own_version() {
        for File {
            name,
            version,
            up,
            down,
        } in FILES
        {
            assert_eq!(&name[..17].replace('-', ""), version);
            assert_eq!(up.matches(&format!("'{version}'")).count(), 2, "{name}");
            assert!(
                down.contains(&format!("'{version}'")) || down.contains("DROP SCHEMA"),
                "{name}"
            );
        }
    }

    /// The versions of the files are numbers of the same form, in quotes.
    #[test]
    fn each_lock_of_a_file_is_one_of_the_crates_own_and_in_the_reference() {
        let own = [
            own_lock!(install),
            own_lock!(first_grant),
            own_lock!(lowered),
            own_lock!(slot),
            own_lock!(tokens),
        ];
        let reference = include_str!("../docs/reference.md");
        for number in own {
            assert!(reference.contains(number), "{number}");
        }
        for File { name, up, .. } in FILES {
            let numbers = up.split(|c: char| !c.is_ascii_digit() && c != '\'');
            for number in numbers.filter(|word| word.starts_with("20000101")) {
                assert!(own.contains(&number), "{number} in {name}");
            }
        }
    }

    #[test]
    fn each_file_tells_what_it_creates() {
        let all: Vec<_> = FILES.iter().flat_map(File::objects).collect();
        for object in [
            "installed_migration",
            "fencing_token",
            "lock_key",
            "throttled_resource_enum",
            "throttled_resource",
            "service_name",
            "service_request",
            "service_request_in_flight",
            "claim_service_request",
            "schedule_state",
        ] {
            assert!(all.contains(&object), "{object} of {all:?}");
        }
    }
}
