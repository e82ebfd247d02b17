//! Tests in child processes.

use std::env;
use std::process::{Child, Command, Stdio};

use workbench::Database;

/// A child process that runs one test of this program, with an environment variable. Dropping kills
/// it.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(test: &str, variable: &str, value: &str) -> Self {
        let process = Command::new(env::current_exe().unwrap())
            .args(["--exact", test])
            .env(variable, value)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self(process.unwrap())
    }

    /// Waits until the process has ended, and returns its exit code.
    pub(crate) fn end(mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    /// Kills the process, as an out-of-memory killer would.
    pub(crate) fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a test in a child process, because it waits for the background work of the whole process.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "INTERLOCK_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return body();
    }
    // The child uses the server of this database.
    let database = Database::new();
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ALONE, "")
        .env("DATABASE_URL", database.url())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("1 passed"), "there is no such test: {text}");
}
