//! runlimit-postgres, as a program of its own: `bench/runlimit`.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::harness::Contender;
use crate::server::BenchDatabase;

/// Clients of runlimit-postgres that check one key again and again.
pub(crate) struct Runlimit {
    name: String,
    url: String,
    clients: usize,
    /// With 1, all checks but the first are denied.
    limit: u32,
}

impl Runlimit {
    pub(crate) fn new(name: &str, database: &BenchDatabase, clients: usize, limit: u32) -> Self {
        Self {
            name: name.to_owned(),
            url: database.url().to_owned(),
            clients,
            limit,
        }
    }

    /// The program beside this one, where scripts/bench builds it.
    fn program() -> PathBuf {
        let ours = std::env::current_exe().expect("this program has a path");
        ours.with_file_name("bench_runlimit")
    }
}

impl Contender for Runlimit {
    fn name(&self) -> &str {
        &self.name
    }

    fn run(&mut self, slice: Duration) -> f64 {
        let program = Self::program();
        let output = Command::new(&program)
            .arg(&self.url)
            .arg(self.clients.to_string())
            .arg(slice.as_millis().to_string())
            .arg(self.limit.to_string())
            .output()
            .unwrap_or_else(|error| {
                panic!(
                    "cannot start {}, which scripts/bench builds: {error}",
                    program.display()
                )
            });
        let rate = String::from_utf8_lossy(&output.stdout).trim().parse();
        let rate = rate.ok().filter(|_| output.status.success());
        rate.unwrap_or_else(|| {
            panic!(
                "runlimit-postgres failed:\n{}",
                String::from_utf8_lossy(&output.stderr)
            )
        })
    }
}
