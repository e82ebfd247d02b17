//! Runs `interlock` in the bare environment of cron, and observes the database meanwhile.
#![allow(dead_code)] // each crate uses a part

pub(crate) mod doctor;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use diesel_interlock::{LockKey, migrations};
use workbench::Database;

/// A database with the schema.
pub(crate) fn installed() -> Database {
    let database = Database::new();
    migrations::install(&database.pool(1)).unwrap();
    database
}

/// A program with the default disposition of all signals. A program inherits ignored signals, and a
/// shell that starts the tests in the background lets them ignore SIGINT.
pub(crate) fn with_default_signals(program: &str) -> Command {
    const EXEC: &str = "$SIG{$_} = 'DEFAULT' for qw(HUP INT QUIT TERM USR1 USR2 TSTP CHLD); \
        exec { $ARGV[0] } @ARGV or die $!";
    let mut command = Command::new("perl");
    command.args(["-e", EXEC, program]);
    command
}

/// The program, in the bare environment of cron, with the words of a line as arguments.
pub(crate) fn interlock(url: &str, line: &str) -> Command {
    let mut command = with_default_signals(env!("CARGO_BIN_EXE_interlock"));
    command
        .env_clear()
        .env("PATH", "/usr/bin:/bin")
        .env("DATABASE_URL", url);
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

/// The same, with a script for sh as the command.
pub(crate) fn run(url: &str, line: &str, script: &str) -> Command {
    let mut command = interlock(url, &format!("run {line} -- sh -c"));
    command.arg(script);
    command
}

/// A command that goes on until SIGTERM, and then exits with 9.
pub(crate) const UNTIL_TERM: &str = "trap 'exit 9' TERM; echo ready; while :; do sleep 0.05; done";

/// Lets a role use the schema.
#[track_caller]
pub(crate) fn grant(database: &Database, settings: &str) {
    let mut psql = Command::new("psql");
    psql.args([
        "-qX",
        "-v",
        "ON_ERROR_STOP=1",
        "--file",
        "migrations/grants.sql",
    ])
    .args(settings.split(' '));
    psql.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let (status, text) = printed(psql.arg(database.url()));
    assert_eq!((status, &*text), (Some(0), ""));
}

pub(crate) fn status(command: &mut Command) -> Option<i32> {
    output(command).status.code()
}

pub(crate) fn output(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!error.contains("panicked"), "{error}");
    output
}

pub(crate) fn printed(command: &mut Command) -> (Option<i32>, String) {
    let output = output(command);
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text.into_owned())
}

/// A running program, which is killed when the value is dropped.
pub(crate) struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The next line of its standard output.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub(crate) fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    /// Waits until it has ended.
    pub(crate) fn status(&mut self) -> Option<i32> {
        let mut status = None;
        eventually("the program has ended", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running program whose standard error is read, and which is killed when the value is dropped.
pub(crate) struct Speaking {
    child: Child,
    lines: BufReader<ChildStderr>,
}

impl Speaking {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap());
        Self { child, lines }
    }

    /// The next line of its standard error.
    pub(crate) fn message(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line
    }

    pub(crate) fn status(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Speaking {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(pid: u32, name: &str) {
    let sent = Command::new("sh")
        .args(["-c", &format!("kill -{name} {pid}")])
        .status();
    assert!(sent.unwrap().success());
}

/// Whether a process runs. A zombie does not.
pub(crate) fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    state.is_some_and(|state| !"ZX".contains(state))
}

/// A path that does not exist yet. The file is removed when the value is dropped.
pub(crate) struct Mark(pub(crate) PathBuf);

impl Mark {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("interlock-cli-{}-{name}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// A session that observes, and takes locks as a client in another language does.
pub(crate) struct Session(pub(crate) PgConnection);

impl Session {
    pub(crate) fn of(database: &Database) -> Self {
        Self(database.connect())
    }

    pub(crate) fn sql(&mut self, sql: &str) {
        self.0.batch_execute(sql).unwrap();
    }

    pub(crate) fn number(&mut self, expression: &str) -> i64 {
        let number = sql::<BigInt>(&format!("({expression})::bigint"));
        diesel::select(number).get_result(&mut self.0).unwrap()
    }

    pub(crate) fn text(&mut self, expression: &str) -> String {
        let text = sql::<Text>(&format!("({expression})::text"));
        diesel::select(text).get_result(&mut self.0).unwrap()
    }

    /// Lets the server read its files again. The sessions read them after the process that lets
    /// new sessions in.
    pub(crate) fn reload(&mut self) {
        let read_at = self.text("pg_conf_load_time()");
        self.sql("SELECT pg_reload_conf()");
        eventually("the files were read", || {
            self.text("pg_conf_load_time()") != read_at
        });
    }

    pub(crate) fn pid(&mut self) -> i64 {
        self.number("pg_backend_pid()")
    }

    pub(crate) fn take(&mut self, name: &str) {
        self.sql(&format!("SELECT pg_advisory_lock({})", id(name)));
    }

    pub(crate) fn release(&mut self, name: &str) {
        self.sql(&format!("SELECT pg_advisory_unlock({})", id(name)));
    }

    /// The number of sessions that hold advisory locks of this database (`true`), or wait for them.
    pub(crate) fn locks(&mut self, is_granted: bool) -> i64 {
        self.number(&format!(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted = {is_granted}
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        ))
    }

    /// Ends the sessions that hold advisory locks of this database.
    pub(crate) fn end_holders(&mut self) {
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
        );
    }
}

/// The number of a lock.
pub(crate) fn id(name: &str) -> String {
    LockKey::from(name.to_owned()).id().unwrap().to_string()
}

/// Waits for at most a minute until the condition holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not within a minute: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
