//! Programs between clients and a server.

use std::env;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crate::watcher::{POLL, Watcher};

/// How long a program may take to listen, or to end.
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);

/// The directory of a program: on the `PATH`, or `/usr/sbin`, where Debian installs poolers.
pub(crate) fn directory_of(program: &str, package: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into()])
        .find(|directory| directory.join(program).is_file())
        .unwrap_or_else(|| panic!("{program} is not installed: install the package `{package}`"))
}

/// Waits until the program that the watcher runs accepts connections at the Unix socket of a port.
pub(crate) fn wait_until_it_listens(name: &str, watcher: &Watcher, port: u16) {
    let socket = watcher.path(&format!(".s.PGSQL.{port}"));
    let deadline = Instant::now() + DEADLINE;
    while UnixStream::connect(&socket).is_err() {
        let is_early = watcher.is_running() && Instant::now() < deadline;
        assert!(is_early, "{name} does not listen:\n{}", watcher.read("log"));
        thread::sleep(POLL);
    }
}
