//! Copying this crate's migrations among the application's own.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::ours::{OURS, version_of};
use crate::error::{Error, Result};

/// Writes this crate's migrations into the application's migration directory, and answers the
/// directories in which it wrote.
///
/// Each is a directory with an `up.sql` and a `down.sql`, which `diesel migration run` runs among the
/// application's own; their versions are older than any of an application, so `diesel migration
/// revert` comes to them last. What is there already and the same is left alone, also where the
/// directory was renamed or line endings were changed. Everything is looked at before anything is
/// written.
///
/// Call it from a test, and a release of this crate with a new migration is written into the sources
/// by the next run of the tests:
///
/// ```
/// # fn test(directory: &std::path::Path) -> diesel_interlock::Result<()> {
/// // directory: concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")
/// let written = diesel_interlock::migrations::write_to(directory)?;
/// assert!(written.is_empty(), "add them to the repository: {written:?}");
/// # Ok(())
/// # }
/// # let directory = std::env::temp_dir().join(format!("write-to-{}", std::process::id()));
/// # std::fs::create_dir_all(&directory).unwrap();
/// # diesel_interlock::migrations::write_to(&directory)?;
/// # test(&directory)?;
/// # std::fs::remove_dir_all(&directory).unwrap();
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
///
/// Needs no database. In a database where [`install`](super::install) has run a migration, its file does
/// nothing, and `diesel migration run` records it.
///
/// # Errors
///
/// - [`Error::DifferentFile`] if a file is there and differs. Nothing was written then.
/// - [`Error::File`] if the directory is not there, or cannot be read or written.
pub fn write_to(directory: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let directory = directory.as_ref();
    let present = directories(directory).map_err(|source| file_error(directory, source))?;
    let mut missing = Vec::new();
    for ours in &OURS {
        let version = ours.version().to_string();
        let mut same_version = present.iter().filter(|name| version_of(name) == version);
        let one = directory.join(same_version.next().map_or(ours.name, String::as_str));
        if let Some(other) = same_version.next() {
            // Diesel would run one of the two, and never the other.
            let path = directory.join(other);
            return Err(Error::DifferentFile { path });
        }
        for (name, text) in [("up.sql", ours.up), ("down.sql", ours.down)] {
            let path = one.join(name);
            match fs::read(&path) {
                Ok(found) if is_same(&found, text) => {}
                Ok(_) => return Err(Error::DifferentFile { path }),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    missing.push((one.clone(), path, text));
                }
                Err(source) => return Err(file_error(&path, source)),
            }
        }
    }
    let mut written = Vec::new();
    for (one, path, text) in missing {
        write(&one, &path, text).map_err(|source| file_error(&path, source))?;
        if written.last() != Some(&one) {
            written.push(one);
        }
    }
    Ok(written)
}

/// The names of the directories that Diesel takes for migrations.
fn directories(directory: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() && !name.starts_with('.') {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// A checkout on Windows may have turned each line feed into two characters.
fn is_same(found: &[u8], text: &str) -> bool {
    String::from_utf8_lossy(found).replace("\r\n", "\n") == text.replace("\r\n", "\n")
}

/// A file is there as a whole or not at all, whenever the program ends.
fn write(one: &Path, path: &Path, text: &str) -> io::Result<()> {
    fs::create_dir_all(one)?;
    let unfinished = path.with_extension(format!("sql.{}", std::process::id()));
    fs::write(&unfinished, text)?;
    fs::rename(&unfinished, path)
}

fn file_error(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    Error::File { path, source }
}
