//! `pgbench -M prepared`: what the server's own benchmark makes of a statement.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::harness::Contender;
use crate::server::{BenchDatabase, Server, cores};

/// A script that `pgbench` runs again and again.
pub(crate) struct Pgbench {
    name: String,
    clients: usize,
    program: PathBuf,
    address: (String, u16),
    database: String,
    script: String,
    variables: Vec<(String, String)>,
}

impl Pgbench {
    pub(crate) fn new(
        name: &str,
        server: &Server,
        database: &BenchDatabase,
        clients: usize,
        script: &str,
    ) -> Self {
        Self {
            name: name.to_owned(),
            clients,
            program: server.cluster.binaries().join("pgbench"),
            address: server.address(),
            database: database.name().to_owned(),
            script: script.to_owned(),
            variables: Vec::new(),
        }
    }

    /// Sets a variable, which becomes a parameter of the prepared statement.
    pub(crate) fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Whether the script runs without an error, once for each client.
    pub(crate) fn succeeds_once(&self) -> bool {
        let output = self.execute(&["-t", "1"]);
        output.status.success()
    }

    fn execute(&self, how_long: &[&str]) -> Output {
        let (clients, threads) = (
            self.clients.to_string(),
            self.clients.min(cores()).to_string(),
        );
        let mut command = Command::new(&self.program);
        command
            .args(["-M", "prepared", "-n", "-f", "-"])
            .args(["-c", &clients, "-j", &threads])
            .args(how_long)
            .args(["-U", "postgres", "-h", &self.address.0])
            .args(["-p", &self.address.1.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .env("LC_ALL", "C");
        for (name, value) in &self.variables {
            command.args(["-D", &format!("{name}={value}")]);
        }
        let mut child = command.arg(&self.database).spawn().unwrap_or_else(|error| {
            panic!(
                "cannot start {}: {error}; it comes with the server, or with a package of its own (Fedora: \
                 postgresql-contrib)",
                self.program.display()
            )
        });
        // Closed at once, which is the end of the script.
        let mut input = child.stdin.take().expect("it is a pipe");
        input
            .write_all(self.script.as_bytes())
            .expect("pgbench reads its script");
        drop(input);
        child.wait_with_output().expect("pgbench can be waited for")
    }
}

/// What a slice must be to be worth two seconds.
const LONG: Duration = Duration::from_millis(400);

impl Contender for Pgbench {
    fn name(&self) -> &str {
        &self.name
    }

    /// It takes whole seconds. Its sessions are new each time and begin with catalogues to read and functions to compile,
    /// so the first of two seconds does not count; a short slice, for a quick look, is one second in which that does.
    fn run(&mut self, slice: Duration) -> f64 {
        let output = if slice < LONG {
            self.execute(&["-T", "1"])
        } else {
            self.execute(&["-T", "2", "-P", "1"])
        };
        let text = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        let progress = text.lines().rev().filter_map(|line| {
            line.strip_prefix("progress: ")?
                .split(' ')
                .nth(2)?
                .parse()
                .ok()
        });
        let total = text
            .lines()
            .filter_map(|line| line.strip_prefix("tps = ")?.split(' ').next()?.parse().ok());
        let rate: Option<f64> = progress.chain(total).next();
        let rate = rate.filter(|_| output.status.success());
        rate.unwrap_or_else(|| panic!("pgbench failed:\n{text}"))
    }
}
