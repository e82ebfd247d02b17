//! What the figures were taken on.

use std::fs;
use std::thread::available_parallelism;

use crate::compare::Plan;
use crate::server::{SETTINGS, Server};

/// The machine, its load without the contenders, the server, and how it was measured. To be called
/// before there is a contender.
pub(crate) fn describe(server: &Server, plan: Plan) -> String {
    let cores = available_parallelism().map_or(0, usize::from);
    let model = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown CPU".to_owned());
    let memory = field("/proc/meminfo", "MemTotal")
        .and_then(|it| it.trim_end_matches(" kB").parse::<f64>().ok())
        .map_or(String::new(), |kib| {
            format!(", {:.0} GiB of RAM", kib / 1024.0 / 1024.0)
        });
    let settings: Vec<_> = SETTINGS
        .iter()
        .map(|(name, value)| format!("`{name} = {value}`"))
        .collect();
    let load = load().map_or("unknown".to_owned(), |it| format!("{it:.1}"));
    format!(
        "{model}, {cores} cores{memory}; clients and server share them, over a Unix socket.
The load in the minute before was {load}.
{}, with {}.
{} rounds, in each of which every contender works for {:?}; `pgbench` for whole seconds.",
        server.version(),
        settings.join(",\n"),
        plan.rounds,
        plan.turn
    )
}

/// The load of the machine, averaged over the last minute.
fn load() -> Option<f64> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

/// The first value of that name, in a file of Linux.
fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = lines.find(|(it, _)| it.trim() == name)?;
    Some(value.trim().to_owned())
}
