//! Tests in processes of their own.

use std::env;
use std::process::{Child, Command, Stdio};

use workbench::Database;

/// A process that runs one test of this program, with something in its environment. It is killed with the value.
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

    /// Kills it, as the kernel does that is out of memory.
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

/// Runs a test in a process of its own, because it looks at what the whole process has left to do.
pub(crate) fn alone(test: &str, body: impl FnOnce()) {
    const ALONE: &str = "INTERLOCK_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return body();
    }
    // Whose server it shares.
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
