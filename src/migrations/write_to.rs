//! Copies of this crate's migrations among the application's own.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::ours::{OURS, version_of};
use crate::error::{Error, Result};

/// Writes this crate's migrations into the application's migration directory. Returns the directories in which it wrote.
///
/// Each migration is a directory with an `up.sql` and a `down.sql`, which `diesel migration run` runs among the
/// application's own. Their versions are older than those of an application, so `diesel migration revert` reverts them last.
/// A file that exists with the same content is left alone, even if the directory was renamed or line endings were changed.
/// All files are checked before any file is written.
///
/// Call it from a test. The next run of the tests then writes the new migrations of a release of this crate into the
/// sources:
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
/// Several threads and processes may call it at the same time. It needs no database. If [`install`](super::install()) has run a
/// migration in a database, its file does nothing there, and `diesel migration run` records it.
///
/// # Errors
///
/// - [`Error::DifferentFile`] if a file exists and differs. Nothing was written.
/// - [`Error::File`] if the directory does not exist, or cannot be read or written.
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

/// Returns the names of the directories that Diesel treats as migrations.
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

/// Compares two texts without regard to line endings, which a checkout on Windows may have changed.
fn is_same(found: &[u8], text: &str) -> bool {
    String::from_utf8_lossy(found).replace("\r\n", "\n") == text.replace("\r\n", "\n")
}

/// Writes a file by renaming a temporary one, so that it never exists in part. The temporary one has a name of its own, because
/// another thread or process may write the same file.
fn write(one: &Path, path: &Path, text: &str) -> io::Result<()> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    fs::create_dir_all(one)?;
    let unfinished = path.with_extension(format!("sql.{}.{number}", std::process::id()));
    fs::write(&unfinished, text)?;
    fs::rename(&unfinished, path)
}

fn file_error(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    Error::File { path, source }
}
