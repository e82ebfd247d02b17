//! Processes of their own that run a part of a test, in order to end badly or to have another
//! environment.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{database_url, left_behind, poll};

/// Names the part that the process runs.
const PART: &str = "WORKBENCH_TEST_PART";

/// A process that runs one of the parts listed in [`part`]. Killed when the value drops.
#[derive(Debug)]
pub(crate) struct Child {
    process: std::process::Child,
    output: BufReader<std::process::ChildStdout>,
    /// Where the process has its temporary files.
    temporary: PathBuf,
}

impl Child {
    pub(crate) fn start(part: &str, environment: &[(&str, &str)]) -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary = PathBuf::from(format!("/tmp/workbench-{}-{number}", std::process::id()));
        fs::create_dir(&temporary).unwrap();
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o1777)).unwrap();

        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "child::part", "--ignored", "--nocapture"])
            .env(PART, part)
            .env("TMPDIR", &temporary)
            .env_remove("DATABASE_URL")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self {
            process,
            output,
            temporary,
        }
    }

    pub(crate) fn temporary(&self) -> &Path {
        &self.temporary
    }

    /// What the process says next by [`say`].
    pub(crate) fn said(&mut self) -> String {
        let mut line = String::new();
        while !line.contains("said: ") {
            line.clear();
            if self.output.read_line(&mut line).unwrap() == 0 {
                panic!("the process ended:\n{}", self.errors());
            }
        }
        line.split_once("said: ").unwrap().1.trim_end().to_owned()
    }

    /// Lets the process go on from [`wait`].
    pub(crate) fn go_on(&mut self) {
        self.process
            .stdin
            .as_mut()
            .unwrap()
            .write_all(b"\n")
            .unwrap();
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Sends the signal of Ctrl-C to the process and its group, as a terminal does.
    pub(crate) fn interrupt(&mut self) {
        signal("INT", &format!("-{}", self.process.id()));
        self.process.wait().unwrap();
    }

    /// Waits until the process ends, and returns what it wrote to standard error.
    pub(crate) fn end(&mut self) -> (ExitStatus, String) {
        let errors = self.errors();
        (self.process.wait().unwrap(), errors)
    }

    fn errors(&mut self) -> String {
        let mut errors = String::new();
        self.process
            .stderr
            .as_mut()
            .unwrap()
            .read_to_string(&mut errors)
            .unwrap();
        errors
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let emptied = poll::soon(|| is_empty(&self.temporary));
        let _ = fs::remove_dir(&self.temporary);
        assert!(
            emptied || std::thread::panicking(),
            "something was left behind in {:?}",
            self.temporary
        );
    }
}

/// Sends a signal to a process, or to a process group whose number is written with a minus.
pub(crate) fn signal(name: &str, process: &str) -> bool {
    let kill = Command::new("/bin/sh")
        .args(["-c", "kill -s \"$0\" -- \"$1\"", name, process])
        .output();
    kill.unwrap().status.success()
}

pub(crate) fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().next().is_none()
}

/// Tells something to the process that started this one.
pub(crate) fn say(what: impl std::fmt::Display) {
    println!("said: {what}");
    io::stdout().flush().unwrap();
}

/// Waits until the process that started this one lets it go on, or has ended.
pub(crate) fn wait() {
    let _ = io::stdin().read_line(&mut String::new());
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn part() {
    match env::var(PART).as_deref() {
        Ok("serve and wait") => left_behind::serve_and_wait(),
        Ok("serve and panic") => left_behind::serve_and_panic(),
        Ok("serve and abort") => left_behind::serve_and_abort(),
        Ok("serve beside another child") => left_behind::serve_beside_another_child(),
        Ok("restart again and again") => left_behind::restart_again_and_again(),
        Ok("serve twice and wait") => left_behind::serve_twice_and_wait(),
        Ok("make a database") => database_url::make_a_database(),
        Ok("make a database and count") => database_url::make_a_database_and_count(),
        Ok(other) => panic!("there is no part {other}"),
        Err(_) => {}
    }
}
