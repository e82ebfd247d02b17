//! The process that ends the campaign's processes when the campaign itself is killed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// A shell that kills the workers and removes the campaign's directory at the end of its standard input. This process holds
/// the other end, which the kernel closes however this process ends.
#[derive(Debug)]
pub(super) struct CleanupProcess {
    shell: Child,
    /// `None` only while dropping.
    commands: Mutex<Option<ChildStdin>>,
    directory: PathBuf,
}

impl CleanupProcess {
    pub(super) fn start() -> Self {
        let directory = PathBuf::from(format!("/tmp/interlock-faults-{}", std::process::id()));
        let mut shell = Command::new("/bin/sh")
            .args(["-c", "eval \"$SCRIPT\"", "cleanup"])
            .arg(&directory)
            .env("SCRIPT", include_str!("cleanup.sh"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("/bin/sh can be started");
        let commands = Mutex::new(shell.stdin.take());
        let output = shell.stdout.take().expect("standard output is a pipe");
        let first = BufReader::new(output).lines().next();
        assert!(
            matches!(&first, Some(Ok(line)) if line == "made"),
            "cannot make the directory {}",
            directory.display()
        );
        Self {
            shell,
            commands,
            directory,
        }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Called before the process starts work that it must not continue for ever.
    pub(super) fn add(&self, pid: u32) {
        self.tell(&format!("add {pid}\n"));
    }

    /// Called before the process is waited for, while its pid cannot be reused.
    pub(super) fn remove(&self, pid: u32) {
        self.tell(&format!("remove {pid}\n"));
    }

    fn tell(&self, line: &str) {
        let mut commands = self.commands.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(commands) = &mut *commands {
            commands
                .write_all(line.as_bytes())
                .expect("the cleanup process lives as long as the campaign");
        }
    }
}

impl Drop for CleanupProcess {
    fn drop(&mut self) {
        drop(
            self.commands
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
        let _ = self.shell.wait();
    }
}
