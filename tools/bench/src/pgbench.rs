//! `pgbench`: what the server's own benchmark makes of SQL.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use diesel::prelude::*;
use diesel::sql_types::Text;
use diesel_interlock::PgPool;
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, Contender};
use crate::server::ROLE;

/// A script that `pgbench` runs again and again.
struct Pgbench {
    command: Vec<String>,
    options: String,
    script: String,
}

/// SQL and backslash commands, and `-D name=value`.
pub(crate) struct Script {
    sql: String,
    variables: Vec<String>,
}

impl Script {
    /// The script after these commands.
    pub(crate) fn after(mut self, commands: &str) -> Self {
        self.sql.insert_str(0, commands);
        self
    }
}

impl From<&str> for Script {
    fn from(sql: &str) -> Self {
        Self {
            sql: sql.to_owned(),
            variables: Vec::new(),
        }
    }
}

/// How the statements are sent.
#[derive(Clone, Copy)]
pub(crate) enum Mode {
    Prepared,
    /// As text, as an application does whose database layer has no prepared statements.
    Text,
}

/// A contender of so many clients. `settings` are those of their sessions, as `-c name=value`.
pub(crate) fn pgbench(
    bench: &Bench,
    database: &Database,
    clients: usize,
    mode: Mode,
    settings: &str,
    script: impl Into<Script>,
) -> Boxed {
    let script = script.into();
    let cluster = bench.server.cluster();
    let program = cluster.binaries().join("pgbench");
    let mode = match mode {
        Mode::Prepared => "prepared",
        Mode::Text => "simple",
    };
    let socket = cluster.directory().display().to_string();
    // A thread for each, as ours.
    let clients = clients.to_string();
    let command = [
        &program.display().to_string(),
        "-n",
        "-M",
        mode,
        "-f",
        "-",
        "-c",
        &clients,
        "-j",
        &clients,
        "-U",
        ROLE,
        "-h",
        &socket,
        "-p",
        "5432",
        database.name(),
    ];
    let mut command = command.map(str::to_owned).to_vec();
    for variable in script.variables {
        command.extend(["-D".to_owned(), variable]);
    }
    Box::new(Pgbench {
        command,
        options: settings.to_owned(),
        script: script.sql,
    })
}

impl Contender for Pgbench {
    /// It takes whole seconds, and reports each. Its sessions are new each time, and begin with catalogues to read and functions to
    /// compile, so the first second does not count.
    fn run(&mut self, turn: Duration) -> f64 {
        let seconds = turn.as_secs_f64().ceil() as u64 + 1;
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .args(["-P", "1", "-T", &seconds.to_string()])
            .env("LC_ALL", "C")
            .env("PGOPTIONS", &self.options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", self.command[0]));
        let mut input = child.stdin.take().expect("it is a pipe");
        input
            .write_all(self.script.as_bytes())
            .expect("pgbench reads its script");
        drop(input);
        let output = child.wait_with_output().expect("it can be waited for");
        let text = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        let is_good = output.status.success() && !text.contains("aborted");
        assert!(is_good, "pgbench failed:\n{text}\n{}", self.script);
        let number = |prefix: &str, word: usize| {
            let mut lines = text.lines().filter_map(|line| line.strip_prefix(prefix));
            let found = lines.next()?.trim().split(' ').nth(word)?;
            found.parse::<f64>().ok()
        };
        let first = number("progress: ", 0).zip(number("progress: ", 2));
        let all = number("number of transactions actually processed: ", 0);
        let (first, all) = first
            .zip(all)
            .unwrap_or_else(|| panic!("pgbench did not tell its rate:\n{text}"));
        let (until, rate) = first;
        (all - until * rate) / (seconds as f64 - until)
    }
}

#[derive(QueryableByName)]
struct Prepared {
    #[diesel(sql_type = Text)]
    statement: String,
    #[diesel(sql_type = Text)]
    types: String,
}

/// The script of a statement that the crate has prepared on a connection of the pool, which contains `needle`, with these values for
/// its parameters. So `pgbench` sends just what the crate sends. A value that begins with a colon is a variable of pgbench.
pub(crate) fn script_of(pool: &PgPool, needle: &str, values: &[&str]) -> Script {
    let prepared: Prepared = diesel::sql_query(
        "SELECT statement, array_to_string(parameter_types::text[], ',') AS types FROM pg_prepared_statements
            WHERE strpos(statement, $1) > 0 AND statement NOT LIKE '%pg_prepared_statements%'",
    )
    .bind::<Text, _>(needle)
    .get_result(&mut pool.get().expect("the pool has a connection"))
    .expect("the crate has prepared the statement");
    let types: Vec<&str> = prepared.types.split(',').collect();
    assert_eq!(types.len(), values.len(), "{}", prepared.statement);
    let (mut sql, mut variables) = (prepared.statement.replace('\n', " "), Vec::new());
    for (at, (value, of_type)) in values.iter().zip(&types).enumerate().rev() {
        let name = match *value {
            // pgbench has no empty variables.
            "" => "''".to_owned(),
            variable if variable.starts_with(':') => variable.to_owned(),
            value => {
                variables.push(format!("p{at}={value}"));
                format!(":p{at}")
            }
        };
        sql = sql.replace(&format!("${}", at + 1), &format!("{name}::{of_type}"));
    }
    Script {
        sql: format!("{sql};\n"),
        variables,
    }
}
