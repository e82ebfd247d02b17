//! Where PostgreSQL's programs are installed.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Directories of the form `<parent>/<prefix><version><suffix>`, as the packages of different
/// systems have them.
const VERSIONED: [(&str, &str, &str); 4] = [
    ("/usr/lib/postgresql", "", "bin"),
    ("/usr", "pgsql-", "bin"),
    ("/opt/homebrew/opt", "postgresql@", "bin"),
    ("/usr/local/opt", "postgresql@", "bin"),
];

/// Directories without a version in their name.
const UNVERSIONED: [&str; 6] = [
    "/usr/local/pgsql/bin",
    "/usr/libexec/postgresql",
    "/usr/bin",
    "/usr/local/bin",
    "/opt/homebrew/opt/postgresql/bin",
    "/usr/local/opt/postgresql/bin",
];

/// The directory with `initdb`, `postgres` and, where it is installed, `pg_basebackup`.
///
/// Panics if there is none, with a message that says what to install.
pub(super) fn directory() -> PathBuf {
    if let Some(chosen) = env::var_os("PGBINDIR").filter(|value| !value.is_empty()) {
        let chosen = PathBuf::from(chosen);
        assert!(
            has_server(&chosen),
            "PGBINDIR is {}, where there are no `initdb` and `postgres`",
            chosen.display()
        );
        // The server's programs run with `/` as their working directory.
        return fs::canonicalize(&chosen).unwrap_or(chosen);
    }
    candidates()
        .into_iter()
        .find(|directory| has_server(directory))
        .unwrap_or_else(|| panic!("{MISSING}"))
}

/// The directories to look in, the preferred one first.
fn candidates() -> Vec<PathBuf> {
    let mut candidates = Vec::new();
    for directory in env::split_paths(&env::var_os("PATH").unwrap_or_default()) {
        // `initdb` may be a link, and its neighbours not: then the whole installation is where the
        // link leads.
        let real = fs::canonicalize(directory.join("initdb"))
            .ok()
            .and_then(|initdb| Some(initdb.parent()?.to_owned()));
        candidates.extend(real);
    }
    if let Ok(output) = Command::new("pg_config").arg("--bindir").output() {
        candidates.push(PathBuf::from(
            String::from_utf8_lossy(&output.stdout).trim(),
        ));
    }
    let mut versioned: Vec<_> = VERSIONED
        .iter()
        .flat_map(|&(parent, prefix, suffix)| versions(parent, prefix, suffix))
        .collect();
    versioned.sort_by(|(one, _), (other, _)| other.cmp(one));
    candidates.extend(versioned.into_iter().map(|(_, directory)| directory));
    candidates.extend(UNVERSIONED.map(PathBuf::from));
    candidates
}

/// The directories `<parent>/<prefix><version>/<suffix>` that exist, with their versions.
fn versions(parent: &str, prefix: &str, suffix: &str) -> Vec<(Vec<u32>, PathBuf)> {
    let Ok(entries) = fs::read_dir(parent) else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let version = version(path.file_name()?.to_str()?.strip_prefix(prefix)?)?;
            Some((version, path.join(suffix)))
        })
        .collect()
}

/// `17` and `9.6` as numbers that sort; `None` for anything else.
fn version(text: &str) -> Option<Vec<u32>> {
    text.split('.').map(|part| part.parse().ok()).collect()
}

fn has_server(directory: &Path) -> bool {
    directory.is_absolute()
        && ["initdb", "postgres"]
            .iter()
            .all(|program| directory.join(program).is_file())
}

const MISSING: &str = "\
no PostgreSQL server is installed, or none was found: `initdb` and `postgres` were looked for in the directory that \
PGBINDIR names, in PATH, in `pg_config --bindir`, /usr/lib/postgresql/*/bin, /usr/pgsql-*/bin, /usr/local/pgsql/bin, \
/usr/libexec/postgresql, and in Homebrew's postgresql@*/bin.

Install one (it need not be running):
    Debian, Ubuntu    apt-get install postgresql
    Fedora            dnf install postgresql-server
    Alpine            apk add postgresql
    macOS             brew install postgresql@17

or set DATABASE_URL to a server whose role may create databases, such as postgresql://postgres@localhost/postgres";

#[cfg(test)]
mod tests {
    use super::version;

    #[test]
    fn versions_sort_as_numbers() {
        assert!(version("10") > version("9.6"));
        assert!(version("9.10") > version("9.6"));
        assert_eq!(version("15-old"), None);
    }
}
