//! The summary that a campaign prints at its end.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::event_log::Events;
use crate::check::Findings;
use crate::fault::Fault;
use crate::half::Half;
use crate::record::{Outcome, Primitive};

/// How many violations of a kind are printed in full.
const PRINTED: usize = 5;

/// Returns the summary as text.
pub(super) fn of(events: &Events, findings: &Findings, looked: u64) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, events, findings, looked);
    text
}

fn write(text: &mut String, events: &Events, findings: &Findings, looked: u64) -> std::fmt::Result {
    for half in Half::ALL {
        if !events.operations.keys().any(|(of, ..)| *of == half) {
            continue;
        }
        writeln!(text, "\n{} operations", half.name())?;
        for what in Primitive::ALL {
            write!(text, "  {:<20}", what.name())?;
            for outcome in Outcome::ALL {
                let number = events.operations.get(&(half, what, outcome)).unwrap_or(&0);
                write!(text, "{number:>9} {}", outcome.name())?;
            }
            writeln!(text)?;
        }
    }
    writeln!(
        text,
        "faults, the longest time until everyone hit by one had succeeded again, and who inflicted it on itself"
    )?;
    for kind in Fault::all() {
        let number = events.faults.get(&kind).unwrap_or(&0);
        let name = kind.name();
        let recovery = events.longest_recovery.get(&kind);
        let recovery = recovery.map_or(String::new(), |longest| {
            format!("{:>8.2} s", longest.as_secs_f64())
        });
        let halves: Vec<String> = Half::ALL
            .into_iter()
            .filter_map(|half| {
                let number = events.inflicted.get(&(half, kind))?;
                Some(format!("{number} {}", half.name()))
            })
            .collect();
        let line = format!(
            "  {name:<40}{number:>7}{recovery:>10}  {}",
            halves.join(", ")
        );
        writeln!(text, "{}", line.trim_end())?;
    }
    writeln!(text, "examined")?;
    writeln!(text, "  {:<40}{looked:>7}", "looks at the server's locks")?;
    for (what, number) in &findings.examined {
        writeln!(text, "  {what:<40}{number:>7}")?;
    }
    let asynchronous = events.history.failovers.iter().filter(|f| !f.synchronous);
    writeln!(
        text,
        "lost by {} asynchronous failovers, as documented",
        asynchronous.count()
    )?;
    for (what, number) in &findings.losses {
        writeln!(text, "  {what:<40}{number:>7}")?;
    }
    let violations = violations(events, findings);
    let mut sorts: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for violation in &violations {
        sorts.entry(sort(violation)).or_default().push(violation);
    }
    for (sort, violations) in sorts {
        for violation in violations.iter().take(PRINTED) {
            writeln!(text, "VIOLATION {violation}")?;
        }
        if violations.len() > PRINTED {
            writeln!(text, "{} of the sort \"{sort}\"", violations.len())?;
        }
    }
    if !violations.is_empty() {
        for outage in &events.history.outages {
            let failover = events
                .history
                .failovers
                .iter()
                .find(|f| f.began == outage.began);
            writeln!(
                text,
                "outage from {} to {}: {failover:?}",
                outage.began, outage.stopped
            )?;
        }
    }
    let stuck = violations.iter().filter(|text| text.contains("stuck:"));
    writeln!(text, "stuck locks: {}", stuck.count())?;
    writeln!(text, "violations: {}", violations.len())
}

/// The kind of a violation: its beginning without the numbers.
fn sort(violation: &str) -> String {
    let words = violation
        .split(' ')
        .filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()));
    words.take(4).collect::<Vec<_>>().join(" ")
}

/// The violations that the campaign and the checks found.
pub(super) fn violations<'a>(events: &'a Events, findings: &'a Findings) -> Vec<&'a str> {
    events
        .violations
        .iter()
        .chain(&findings.violations)
        .map(String::as_str)
        .collect()
}
