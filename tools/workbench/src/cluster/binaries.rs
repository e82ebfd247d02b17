//! Where PostgreSQL's programs are installed.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The directory with `initdb`, `postgres` and, where it is installed, `pg_basebackup`: the one that `PGBINDIR` names, or
/// else where `PATH`, `pg_config` or Debian's packages have them. The path is absolute.
pub(crate) fn directory() -> PathBuf {
    let chosen = env::var_os("PGBINDIR").filter(|value| !value.is_empty());
    let candidates = chosen.map_or_else(installed, |chosen| vec![chosen.into()]);
    // If `initdb` is a symbolic link, the whole installation is where the link leads.
    candidates
        .iter()
        .filter_map(|directory| fs::canonicalize(directory.join("initdb")).ok())
        .filter_map(|initdb| initdb.parent().map(Path::to_owned))
        .find(|directory| directory.join("postgres").is_file())
        .unwrap_or_else(|| panic!(
            "no PostgreSQL server is found in {candidates:?}. Install one (it need not be running; Debian: `apt-get \
             install postgresql`, macOS: `brew install postgresql@17`), let PGBINDIR name the directory of its `initdb`, \
             or let DATABASE_URL name a server, such as postgresql://postgres@localhost/postgres"
        ))
}

fn installed() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let reported = Command::new("pg_config").arg("--bindir").output();
    let reported = reported.map(|output| String::from_utf8_lossy(&output.stdout).trim().into());
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let mut versions: Vec<u32> = debian
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    versions.sort_unstable();
    let debian = versions.iter().rev();
    let debian = debian.map(|version| format!("/usr/lib/postgresql/{version}/bin").into());
    env::split_paths(&path)
        .chain(reported)
        .chain(debian)
        .collect()
}
