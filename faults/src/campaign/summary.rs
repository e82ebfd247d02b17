//! What a campaign prints at its end.

use std::fmt::Write;

use super::ledger::Book;
use crate::check::Findings;
use crate::record::{Outcome, Primitive};

/// How many violations are printed in full.
const PRINTED: usize = 20;

/// The summary, for people.
pub(super) fn of(book: &Book, findings: &Findings, looked: u64) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut text, book, findings, looked);
    text
}

fn write(text: &mut String, book: &Book, findings: &Findings, looked: u64) -> std::fmt::Result {
    writeln!(text, "\noperations")?;
    for what in Primitive::ALL {
        write!(text, "  {:<20}", what.name())?;
        for outcome in Outcome::ALL {
            let number = book.operations.get(&(what, outcome)).unwrap_or(&0);
            write!(text, "{number:>9} {}", outcome.name())?;
        }
        writeln!(text)?;
    }
    writeln!(
        text,
        "faults, and the longest time until everyone hit by one had succeeded again"
    )?;
    for (kind, number) in &book.faults {
        let recovery = book.longest_recovery.get(kind);
        let recovery = recovery.map_or(String::new(), |longest| {
            format!("{:>8.2} s", longest.as_secs_f64())
        });
        writeln!(text, "  {kind:<40}{number:>7}{recovery}")?;
    }
    writeln!(text, "examined")?;
    writeln!(text, "  {:<40}{looked:>7}", "looks at the server's locks")?;
    for (what, number) in &findings.examined {
        writeln!(text, "  {what:<40}{number:>7}")?;
    }
    let asynchronous = book.history.failovers.iter().filter(|f| !f.synchronous);
    writeln!(
        text,
        "lost by {} asynchronous failovers, as documented",
        asynchronous.count()
    )?;
    for (what, number) in &findings.losses {
        writeln!(text, "  {what:<40}{number:>7}")?;
    }
    let violations = violations(book, findings);
    for violation in violations.iter().take(PRINTED) {
        writeln!(text, "VIOLATION {violation}")?;
    }
    if !violations.is_empty() {
        for outage in &book.history.outages {
            let failover = book
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

/// All of them, whoever found them.
pub(super) fn violations<'a>(book: &'a Book, findings: &'a Findings) -> Vec<&'a str> {
    book.violations
        .iter()
        .chain(&findings.violations)
        .map(String::as_str)
        .collect()
}
