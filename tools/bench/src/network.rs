//! Sessions and round trips of each operation over a slow network, by `scripts/campaign network`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

pub(crate) const ROUND_TRIP: &str = "60";

/// What it measured of an operation over a pool.
struct Line {
    sessions: f64,
    round_trips: String,
}

/// The table of all operations.
pub(crate) fn run(root: &Path) -> String {
    let output = Command::new(root.join("scripts/campaign"))
        .args(["network", "--round-trip", ROUND_TRIP])
        .stderr(Stdio::inherit())
        .output()
        .expect("scripts/campaign network can be started");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "scripts/campaign network failed:\n{text}"
    );
    let pools = ["r2d2", "deadpool", "bb8"];
    let mut operations: BTreeMap<&str, BTreeMap<&str, Line>> = BTreeMap::new();
    for line in text.lines() {
        if let Some((operation, pool, line)) = parse(line) {
            operations.entry(operation).or_default().insert(pool, line);
        }
    }
    assert!(!operations.is_empty(), "no operation:\n{text}");
    let mut table = "| operation | new sessions per 100 | round trips: r2d2 | deadpool | bb8 |
|---|---:|---:|---:|---:|"
        .to_owned();
    for (operation, lines) in operations {
        let sessions = lines.values().map(|line| line.sessions).fold(0.0, f64::max);
        table += &format!("\n| {operation} | {sessions:.0} |");
        for pool in pools {
            let line = lines.get(pool);
            table += &format!(" {} |", line.map_or("", |line| &line.round_trips));
        }
    }
    println!("{table}");
    table
}

/// An operation, a pool, and what was measured without jitter.
fn parse(line: &str) -> Option<(&str, &str, Line)> {
    let (operation, rest) = line.split_at_checked(36)?;
    let mut words = rest.split_whitespace();
    let pool = words.next()?;
    let delay = rest.split_once('+')?;
    let mut words = delay.1.split_whitespace();
    if delay.0.split_whitespace().nth(1)? != ROUND_TRIP || words.next()? != "0" {
        return None;
    }
    let line = Line {
        sessions: words.next()?.parse().ok()?,
        round_trips: words.next()?.to_owned(),
    };
    Some((operation.trim(), pool, line))
}
