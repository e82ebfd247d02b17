//! The findings of `interlock doctor`, and a check that the remedy of a finding removes it.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use workbench::Cluster;

use super::{interlock, output};

/// The exit status and the findings.
#[track_caller]
pub(crate) fn found(url: &str, arguments: &str) -> (Option<i32>, Vec<Value>) {
    let mut command = interlock(url, &format!("doctor --json {arguments}"));
    let output = output(&mut command);
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{output:?}"));
    (output.status.code(), lines.as_array().unwrap().clone())
}

#[track_caller]
pub(crate) fn line(url: &str, arguments: &str, level: &str, word: &str) -> Value {
    let (_, lines) = found(url, arguments);
    let line = of(&lines, level, word);
    line.unwrap_or_else(|| panic!("no {level} of {word} in {lines:#?}"))
        .clone()
}

pub(crate) fn of<'a>(lines: &'a [Value], level: &str, word: &str) -> Option<&'a Value> {
    let is_it =
        |line: &&Value| line["level"] == level && line["found"].as_str().unwrap().contains(word);
    lines.iter().find(is_it)
}

/// Executes the remedy, as a superuser and with the program on the path. Asserts that `doctor` no
/// longer reports the finding, and returns its status.
#[track_caller]
pub(crate) fn remedied(
    url: &str,
    of_superuser: &str,
    arguments: &str,
    level: &str,
    word: &str,
) -> Option<i32> {
    let line = line(url, arguments, level, word);
    let all = paste(&line, of_superuser);
    let (status, lines) = found(url, arguments);
    let still = of(&lines, level, word);
    assert!(still.is_none(), "{word}, after {all}: {lines:#?}");
    status
}

/// Executes the remedy of a finding. Returns the commands.
#[track_caller]
pub(crate) fn paste(line: &Value, of_superuser: &str) -> String {
    let mut all = String::new();
    if let Some(sql) = line["sql"].as_str().filter(|sql| !sql.is_empty()) {
        assert!(sql.ends_with(';') || sql.contains("; --"), "{sql}");
        let mut psql = Command::new("psql");
        psql.args(["-qX", "-v", "ON_ERROR_STOP=1", of_superuser]);
        psql.env("PGOPTIONS", "-c statement_timeout=0 -c lock_timeout=0");
        all += &execute(psql, sql);
    }
    if let Some(shell) = line["shell"].as_str().filter(|shell| !shell.is_empty()) {
        let directory = Path::new(env!("CARGO_BIN_EXE_interlock")).parent().unwrap();
        let mut sh = Command::new("sh");
        sh.env("DATABASE_URL", of_superuser);
        sh.env("PATH", format!("{}:/usr/bin:/bin", directory.display()));
        // A command that asks for confirmation gets it.
        sh.args(["-c", &format!("{shell} <<END\ny\nEND")]);
        all += &execute(sh, "");
    }
    assert!(!all.is_empty(), "no remedy: {line}");
    all
}

#[track_caller]
fn execute(mut program: Command, text: &str) -> String {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{text}: {output:?}");
    format!("{program:?} {text}")
}

/// A server without the roles of other tests, set up as the checklist says.
pub(crate) fn healthy() -> Cluster {
    Cluster::builder()
        .setting("client_connection_check_interval", "10s")
        .setting("idle_in_transaction_session_timeout", "5min")
        .setting("max_prepared_transactions", "2")
        .start()
}

#[track_caller]
pub(crate) fn connects(url: &str) {
    let (status, lines) = found(url, "");
    assert_eq!(status, Some(0), "{lines:#?}");
}
