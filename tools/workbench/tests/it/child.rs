//! Child processes that run a part of a test, to crash or to have another environment.

use std::env;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{database_url, left_behind};

/// Names the part that the process runs.
const PART: &str = "WORKBENCH_TEST_PART";

/// A process that runs one of the parts of [`a_part_of_another_test`]. Killed when the value drops.
pub(crate) struct Child {
    process: std::process::Child,
    output: BufReader<ChildStdout>,
    /// Where the process has its temporary files.
    pub(crate) temporary: PathBuf,
}

impl Child {
    pub(crate) fn start(part: &str, database_url: &str) -> Self {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let temporary = PathBuf::from(format!("/tmp/workbench-{}-{number}", std::process::id()));
        fs::create_dir(&temporary).unwrap();
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o1777)).unwrap();

        // Perl restores SIGINT: a signal that is ignored here, as under `scripts/test &`, would stay ignored.
        const EXEC: &str = "$SIG{INT} = 'DEFAULT'; exec { $ARGV[0] } @ARGV or die $!";
        let mut process = Command::new("perl")
            .args(["-e", EXEC])
            .arg(env::current_exe().unwrap())
            .args(["--exact", "child::a_part_of_another_test", "--nocapture"])
            .env(PART, part)
            .env("TMPDIR", &temporary)
            .env("DATABASE_URL", database_url)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
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

    /// Waits for the next text that the process [says](say).
    pub(crate) fn read(&mut self) -> String {
        let mut lines = (&mut self.output).lines().map(Result::unwrap);
        let said = lines.find_map(|line| Some(line.split_once("said: ")?.1.to_owned()));
        said.expect("the process has not ended")
    }

    /// Lets the process go on from [`wait`].
    pub(crate) fn go_on(&mut self) {
        let input = self.process.stdin.as_mut().unwrap();
        input.write_all(b"\n").unwrap();
    }

    /// Sends a signal to the process and its group, as a terminal does at Ctrl-C.
    pub(crate) fn send(&self, name: &str) {
        assert!(signal(name, &format!("-{}", self.process.id())));
    }

    /// Waits until the process ends, and says whether it succeeded.
    pub(crate) fn succeeds(&mut self) -> bool {
        self.process.wait().unwrap().success()
    }

    pub(crate) fn left_nothing(&self) -> bool {
        fs::read_dir(&self.temporary).unwrap().next().is_none()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir(&self.temporary);
    }
}

/// Sends a signal to a process, or to a process group whose number is written with a minus.
pub(crate) fn signal(name: &str, process: &str) -> bool {
    let mut kill = Command::new("/bin/sh");
    kill.args(["-c", "kill -s \"$0\" -- \"$1\"", name, process]);
    kill.output().unwrap().status.success()
}

/// Sends a text to the process that started this one.
pub(crate) fn say(what: impl std::fmt::Display) {
    println!("said: {what}");
    io::stdout().flush().unwrap();
}

/// Waits until the process that started this one lets it go on, or has ended.
pub(crate) fn wait() {
    let _ = io::stdin().read_line(&mut String::new());
}

#[test]
fn a_part_of_another_test() {
    match env::var(PART).as_deref() {
        Ok("make a database") => database_url::make_a_database(),
        Ok(part) => left_behind::serve_and(part),
        // Not a child process of another test: nothing to do.
        Err(_) => {}
    }
}
