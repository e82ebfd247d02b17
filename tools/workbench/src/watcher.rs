//! The process that owns a server, and outlives the process that started it.

use std::collections::hash_map::RandomState;
use std::env;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::endpoint::cannot;

/// How often a state is polled that another process is about to change.
pub(crate) const POLL: Duration = Duration::from_millis(5);

/// A shell that creates a directory and runs PostgreSQL's programs in it, one at a time. When its standard input ends,
/// whose other end this process holds, it stops the program and removes the directory.
///
/// The kernel closes our end of that pipe whether this process returns from `main`, panics, aborts or is killed. The
/// shell is in a process group of its own and ignores the signals that a terminal sends, so nothing that ends this
/// process ends the shell too. The pipe is closed on `exec`, so no other child of this process keeps it open.
#[derive(Debug)]
pub(crate) struct Watcher {
    shell: Child,
    /// `None` only while dropping.
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    directory: String,
}

impl Watcher {
    /// Starts the watcher of a new directory, with `environment` for the programs that it is going to run from the
    /// directory `binaries`.
    pub(crate) fn start(binaries: &Path, environment: &[(String, String)]) -> Self {
        let directory = format!("{}/interlock-{:016x}", env::temp_dir().display(), random());
        let mut command = Command::new("/bin/sh");
        command
            // By a variable: as an argument, the script would fill every list of processes.
            .args(["-c", "eval \"$WATCHER\"", "watcher"])
            .arg(&directory)
            .arg(binaries)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .current_dir("/");
        if let Some((uid, gid)) = required_owner() {
            command.uid(uid).gid(gid);
        }
        // Settings for clients and for another Patroni, which the programs would take as their own.
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("PG") || text.starts_with("PATRONI_") {
                command.env_remove(name);
            }
        }
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.env("WATCHER", include_str!("watcher/watcher.sh"));

        let mut shell = command.spawn().unwrap_or_else(cannot("start /bin/sh"));
        let commands = shell.stdin.take();
        let answers = BufReader::new(shell.stdout.take().expect("standard output is a pipe"));
        let mut watcher = Self {
            shell,
            commands,
            answers,
            directory,
        };
        watcher.wait_for_answer();
        watcher
    }

    /// The directory, which goes away with this value or with the process.
    pub(crate) fn directory(&self) -> &str {
        &self.directory
    }

    /// The path of a file in the directory.
    pub(crate) fn path(&self, file: &str) -> PathBuf {
        Path::new(&self.directory).join(file)
    }

    /// The text of a file in the directory, or an empty one if there is no such file.
    pub(crate) fn read(&self, file: &str) -> String {
        let bytes = fs::read(self.path(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether a program runs, or is about to.
    pub(crate) fn is_running(&self) -> bool {
        self.path("pid").exists()
    }

    /// Starts a program by one of the commands of the watcher's script. Nothing else may be running.
    pub(crate) fn run(&mut self, command: &str) {
        assert!(
            !self.is_running(),
            "a server in {} runs already",
            self.directory
        );
        self.send(command);
    }

    /// Sends a signal, such as `INT`, to the program that runs.
    pub(crate) fn signal(&mut self, name: &str) {
        self.send(&format!("signal {name}"));
    }

    fn send(&mut self, command: &str) {
        // If the shell is gone, the missing answer shows it.
        let _ = self
            .commands
            .as_mut()
            .map(|shell| writeln!(shell, "{command}"));
        self.wait_for_answer();
    }

    fn wait_for_answer(&mut self) {
        let mut answer = String::new();
        let read = self.answers.read_line(&mut answer);
        assert!(
            read.is_ok() && answer == "done\n",
            "the watcher of {} is gone, and with it the server: {read:?} {answer}",
            self.directory
        );
    }

    /// Waits for the end of the program that was run last. Returns whether it ended successfully within `timeout`.
    pub(crate) fn succeeds_within(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while self.is_running() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        !self.is_running() && self.read("status").trim() == "0"
    }
}

impl Drop for Watcher {
    /// Waits until everything is gone.
    fn drop(&mut self) {
        drop(self.commands.take());
        let _ = self.shell.wait();
    }
}

/// The user and group to run PostgreSQL's programs as. `None` means the user of this process. PostgreSQL refuses to run as
/// root.
fn required_owner() -> Option<(u32, u32)> {
    let id = |arguments: &[&str]| {
        let output = Command::new("id").args(arguments).output().ok()?;
        String::from_utf8_lossy(&output.stdout).trim().parse().ok()
    };
    let of = |name: &&str| Some((id(&["-u", name])?, id(&["-g", name])?));
    let owner = || ["postgres", "nobody"].iter().find_map(of);
    let is_root = id(&["-u"]) == Some(0);
    is_root.then(|| {
        owner()
            .expect("there is a user `postgres` or `nobody` to run PostgreSQL as instead of root")
    })
}

/// 64 bits that no other process is likely to have drawn.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
