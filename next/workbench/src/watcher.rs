//! The process that owns a server and outlives the one that started it.

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

/// How often a file is looked at that another process is about to change.
pub(crate) const POLL: Duration = Duration::from_millis(5);

/// A shell that makes a directory, runs PostgreSQL's programs in it one at a time, and at the end of its standard
/// input, whose other end this process holds, stops the program and removes the directory.
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
    directory: PathBuf,
}

impl Watcher {
    /// Starts the watcher of a new directory, with `environment` for the programs that it is going to run from the
    /// directory `binaries`.
    pub(crate) fn start(binaries: &Path, environment: &[(String, String)]) -> Self {
        let directory = env::temp_dir().join(format!("interlock-{:016x}", random()));
        let mut command = Command::new("/bin/sh");
        command
            // Not the script itself, which would fill the screen in every list of processes.
            .args(["-c", "eval \"$WATCHER\"", "watcher"])
            .args([&directory, binaries])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .current_dir("/");
        if let Some((uid, gid)) = required_owner() {
            command.uid(uid).gid(gid);
        }
        // Settings for clients, some of which the server would take as its own.
        for (name, _) in env::vars_os() {
            if name.to_string_lossy().starts_with("PG") {
                command.env_remove(name);
            }
        }
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.env("WATCHER", include_str!("watcher/watcher.sh"));

        let mut shell = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start /bin/sh: {error}"));
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
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The text of a file in the directory, empty where there is none.
    pub(crate) fn read(&self, file: &str) -> String {
        let bytes = fs::read(self.directory.join(file)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether a program runs, or is about to.
    pub(crate) fn is_running(&self) -> bool {
        self.directory.join("pid").exists()
    }

    /// Starts a program by one of the commands of the watcher's script. Nothing else may be running.
    pub(crate) fn run(&mut self, command: &str) {
        assert!(
            !self.is_running(),
            "a server in {} runs already",
            self.directory.display()
        );
        self.send(command);
    }

    /// Sends a signal, such as `INT`, to the program that runs.
    pub(crate) fn signal(&mut self, name: &str) {
        self.send(&format!("signal {name}"));
    }

    fn send(&mut self, command: &str) {
        // An error shows by the answer that does not come.
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
            self.directory.display()
        );
    }

    /// Waits until the program that was run last has ended, and says whether it did so, successfully, within `timeout`.
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

/// The user and group that PostgreSQL's programs must be run as: `None` for the one that runs the tests, unless that is
/// root, which PostgreSQL refuses to run as.
fn required_owner() -> Option<(u32, u32)> {
    let output = Command::new("id").arg("-u").output();
    let output = output
        .unwrap_or_else(|error| panic!("cannot find out who runs the tests: `id -u`: {error}"));
    if output.stdout.trim_ascii() != b"0" {
        return None;
    }
    let accounts = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let numbers = |name: &str| {
        let mut fields = accounts
            .lines()
            .map(|line| line.split(':'))
            .find_map(|mut fields| (fields.next() == Some(name)).then_some(fields))?;
        Some((fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    let owner = numbers("postgres").or_else(|| numbers("nobody"));
    Some(owner.expect("PostgreSQL does not run as root; /etc/passwd has no `postgres`, nor `nobody`, to run it as"))
}

/// 64 bits that no other process is likely to have drawn.
pub(crate) fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
