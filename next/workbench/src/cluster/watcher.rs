//! The process that owns a server and outlives the one that started it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::directory;
use super::owner::Owner;

/// How long to wait for the directory to be made, which takes milliseconds.
const MAKING: Duration = Duration::from_secs(30);

/// How long to wait for everything to be removed: more than the watcher needs when it has to kill a
/// server.
const REMOVING: Duration = Duration::from_secs(20);

/// A shell that makes a directory, runs PostgreSQL's programs in it one at a time, and at the end
/// of its standard input, whose other end this process holds, stops the program and removes the
/// directory.
///
/// The kernel closes our end of that pipe whether this process returns from `main`, panics, aborts
/// or is killed. The shell is in a process group of its own and ignores the signals that a terminal
/// sends, so nothing that ends this process ends the shell too. The pipe is closed on `exec`, so no
/// other child of this process keeps it open.
#[derive(Debug)]
pub(crate) struct Watcher {
    shell: Child,
    /// `None` only while dropping.
    commands: Option<ChildStdin>,
    reports: Receiver<String>,
    /// How many programs were run.
    runs: u64,
    directory: PathBuf,
}

impl Watcher {
    /// Starts the watcher of a new directory, with `environment` for the programs that it is going
    /// to run from the directory `binaries`.
    pub(crate) fn start(binaries: &Path, environment: &[(String, String)]) -> Self {
        let owner = Owner::required();
        let directory = directory::unused_path(owner.is_some());

        let mut command = Command::new("/bin/sh");
        command
            // Not the script itself, which would fill the screen in every list of processes.
            .args(["-c", "eval \"$WATCHER\"", "watcher"])
            .args([directory.as_path(), binaries])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .current_dir("/");
        if let Some(owner) = owner {
            owner.runs(&mut command);
        }
        // Settings for clients, some of which the server would take as its own.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("PG") {
                command.env_remove(name);
            }
        }
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.env("WATCHER", include_str!("watcher.sh"));

        let mut shell = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start /bin/sh: {error}"));
        let commands = shell.stdin.take();
        let output = shell.stdout.take().expect("standard output is a pipe");
        let (sender, reports) = mpsc::channel();
        thread::Builder::new()
            .name("watcher reports".to_owned())
            .spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            })
            .expect("a thread can be started");

        let watcher = Self {
            shell,
            commands,
            reports,
            runs: 0,
            directory,
        };
        let first = watcher.reports.recv_timeout(MAKING);
        assert!(
            first.as_deref() == Ok("made"),
            "cannot make the directory {}: {first:?}",
            watcher.directory.display()
        );
        watcher
    }

    /// The directory, which goes away with this value or with the process.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether a program runs, or is about to.
    pub(super) fn is_running(&self) -> bool {
        self.directory.join("pid").exists()
    }

    /// Starts a program by one of the commands of the watcher's script. Nothing else may be
    /// running.
    pub(crate) fn run(&mut self, command: &str) {
        assert!(
            !self.is_running(),
            "a server in {} runs already",
            self.directory.display()
        );
        self.runs += 1;
        self.send(command);
    }

    /// Sends a signal, such as `INT`, to the program that runs.
    pub(crate) fn signal(&mut self, name: &str) {
        self.send(&format!("signal {name}"));
    }

    fn send(&mut self, command: &str) {
        let commands = self.commands.as_mut().expect("not dropped yet");
        if let Err(error) = commands.write_all(format!("{command}\n").as_bytes()) {
            panic!(
                "the watcher of {} is gone, and with it the server: {error}",
                self.directory.display()
            );
        }
    }

    /// Waits until the program that was run last has ended, and returns its exit status, or `None`
    /// after `timeout`.
    pub(crate) fn exit_within(&mut self, timeout: Duration) -> Option<u32> {
        let expected = format!("exited {} ", self.runs);
        let deadline = Instant::now() + timeout;
        loop {
            match self
                .reports
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(report) => match report.strip_prefix(&expected).map(str::parse) {
                    Some(Ok(status)) => return Some(status),
                    // The end of an earlier program that nobody asked about.
                    _ if report.starts_with("exited ") => {}
                    // Something that the shell itself has to say.
                    _ => eprintln!("watcher of {}: {report}", self.directory.display()),
                },
                Err(RecvTimeoutError::Timeout) => return None,
                Err(RecvTimeoutError::Disconnected) => {
                    panic!(
                        "the watcher of {} is gone, and with it the server",
                        self.directory.display()
                    )
                }
            }
        }
    }
}

impl Drop for Watcher {
    /// Waits until everything is gone.
    fn drop(&mut self) {
        drop(self.commands.take());
        let deadline = Instant::now() + REMOVING;
        while matches!(self.shell.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
    }
}
