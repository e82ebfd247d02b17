//! The summary that a campaign prints at its end.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::ledger::Book;
use crate::check::Findings;
use crate::fault::Fault;
use crate::record::{Outcome, Primitive};

/// How many violations of a kind are printed in full.
const PRINTED: usize = 5;

/// Returns the summary as text.
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
    for kind in Fault::all() {
        let number = book.faults.get(&kind).unwrap_or(&0);
        let name = kind.name();
        let recovery = book.longest_recovery.get(&kind);
        let recovery = recovery.map_or(String::new(), |longest| {
            format!("{:>8.2} s", longest.as_secs_f64())
        });
        writeln!(text, "  {name:<40}{number:>7}{recovery}")?;
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

/// The kind of a violation: its beginning without the numbers.
fn sort(violation: &str) -> String {
    let words = violation
        .split(' ')
        .filter(|word| !word.contains(|letter: char| letter.is_ascii_digit()));
    words.take(4).collect::<Vec<_>>().join(" ")
}

/// The violations that the campaign and the checks found.
pub(super) fn violations<'a>(book: &'a Book, findings: &'a Findings) -> Vec<&'a str> {
    book.violations
        .iter()
        .chain(&findings.violations)
        .map(String::as_str)
        .collect()
}
