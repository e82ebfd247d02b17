//! Where PostgreSQL's programs are installed.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Directories `<parent>/<prefix><version>/bin`, as the packages of different systems have them.
const VERSIONED: [(&str, &str); 4] = [
    ("/usr/lib/postgresql", ""),
    ("/usr", "pgsql-"),
    ("/opt/homebrew/opt", "postgresql@"),
    ("/usr/local/opt", "postgresql@"),
];

/// The directory with `initdb`, `postgres` and, where it is installed, `pg_basebackup`. The server's programs run with
/// `/` as their working directory, so the path is absolute.
pub(super) fn directory() -> PathBuf {
    if let Some(chosen) = env::var_os("PGBINDIR").filter(|value| !value.is_empty()) {
        let chosen = PathBuf::from(chosen);
        assert!(
            has_server(&chosen),
            "PGBINDIR is {}, where there are no `initdb` and `postgres`",
            chosen.display()
        );
        return fs::canonicalize(&chosen).unwrap_or(chosen);
    }
    candidates().into_iter().find(|directory| has_server(directory)).expect(
        "no PostgreSQL server is found in PATH, `pg_config --bindir` or /usr/lib/postgresql/*/bin. Install one (it need \
         not be running; Debian: `apt-get install postgresql`, macOS: `brew install postgresql@17`), let PGBINDIR name \
         its directory, or let DATABASE_URL name a server, such as postgresql://postgres@localhost/postgres",
    )
}

/// The directories to look in, the preferred one first.
fn candidates() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // `initdb` may be a link, and its neighbours not: then the whole installation is where the link leads.
    let in_path = env::split_paths(&path)
        .filter_map(|directory| fs::canonicalize(directory.join("initdb")).ok())
        .filter_map(|initdb| Some(initdb.parent()?.to_owned()));
    let told = Command::new("pg_config").arg("--bindir").output();
    let told = told.map(|output| String::from_utf8_lossy(&output.stdout).trim().into());
    let mut versioned: Vec<_> = VERSIONED
        .iter()
        .flat_map(|(parent, prefix)| versions(parent, prefix))
        .collect();
    versioned.sort_by(|(one, _), (other, _)| other.cmp(one));
    let versioned = versioned.into_iter().map(|(_, directory)| directory);
    in_path
        .chain(told)
        .chain(versioned)
        .chain(["/usr/local/pgsql/bin".into()])
        .collect()
}

/// The directories `<parent>/<prefix><version>/bin`, with their versions as numbers that sort.
fn versions(parent: &str, prefix: &str) -> Vec<(Vec<u32>, PathBuf)> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?.split('.');
            let version = version.map(|part| part.parse().ok());
            Some((version.collect::<Option<_>>()?, entry.path().join("bin")))
        })
        .collect()
}

fn has_server(directory: &Path) -> bool {
    ["initdb", "postgres"]
        .iter()
        .all(|program| directory.join(program).is_file())
}
