//! The place and the name of a server's directory.

use std::collections::hash_map::RandomState;
use std::env;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The longest path of a Unix socket that both Linux (107 bytes) and macOS (103) accept.
const LONGEST_SOCKET_PATH: usize = 103;

/// A path for a new directory, below `TMPDIR` if the server can use that, else below `/tmp`. It
/// does not exist yet.
pub(super) fn unused_path(for_another_user: bool) -> PathBuf {
    let name = format!("interlock-{:016x}", random());
    let temporary = env::temp_dir();
    let parent = match fs::canonicalize(&temporary) {
        Ok(parent)
            if is_short_enough(&parent.join(&name))
                && (!for_another_user || is_open_to_all(&parent)) =>
        {
            parent
        }
        _ => PathBuf::from("/tmp"),
    };
    parent.join(name)
}

/// 64 bits that no other process is likely to have drawn.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn is_short_enough(directory: &Path) -> bool {
    let socket = directory.join(".s.PGSQL.65535.lock");
    // The path is sent as text, in commands of one line and in connection strings.
    socket
        .to_str()
        .is_some_and(|path| path.len() <= LONGEST_SOCKET_PATH && !path.contains(['\n', '\\']))
}

/// Whether any user may make a directory there and use it.
fn is_open_to_all(directory: &Path) -> bool {
    let mode = |path: &Path| fs::metadata(path).map_or(0, |metadata| metadata.permissions().mode());
    mode(directory) & 0o003 == 0o003
        && directory
            .ancestors()
            .all(|path| mode(path) & 0o001 == 0o001)
}
