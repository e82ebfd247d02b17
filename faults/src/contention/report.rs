//! The figures and violations of one part of the campaign.

/// The figures for the table, and the violations.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) part: &'static str,
    /// All operations that returned a result to a client.
    pub(super) operations: usize,
    /// Slots claimed, or resources granted.
    pub(super) claims: usize,
    pub(super) refusals: usize,
    /// Processes, and sessions of the database.
    pub(super) kills: (usize, usize),
    /// The largest number that was seen, and the allowed one.
    pub(super) most_in_flight: Option<(usize, usize)>,
    pub(super) grants_of_possible: Option<(usize, usize)>,
    pub(super) remarks: Vec<String>,
    violations: Vec<String>,
}

/// How many violations of a part are printed.
const SHOWN: usize = 20;

impl Report {
    pub(super) fn of(part: &'static str) -> Self {
        Self {
            part,
            ..Self::default()
        }
    }

    /// Adds a violation unless the condition is met.
    pub(super) fn check(&mut self, is_so: bool, violation: impl FnOnce() -> String) {
        if !is_so {
            self.violations.push(violation());
        }
    }

    pub(super) fn violated(&mut self, violations: impl IntoIterator<Item = String>) {
        self.violations.extend(violations);
    }

    pub(super) fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }
}

pub(super) fn print(reports: &[Report]) {
    println!(
        "{:<12} {:>10} {:>8} {:>8} {:>9} {:>9} {:>15}",
        "", "operations", "claims", "refusals", "kills", "in flight", "grants"
    );
    for report in reports {
        let of = |figures: Option<(usize, usize)>| match figures {
            Some((some, all)) => format!("{some} of {all}"),
            None => "-".to_owned(),
        };
        println!(
            "{:<12} {:>10} {:>8} {:>8} {:>9} {:>9} {:>15}",
            report.part,
            report.operations,
            report.claims,
            report.refusals,
            format!("{} + {}", report.kills.0, report.kills.1),
            of(report.most_in_flight),
            of(report.grants_of_possible),
        );
    }
    for report in reports {
        for remark in &report.remarks {
            println!("{}: {remark}", report.part);
        }
        let violations = &report.violations;
        for violation in violations.iter().take(SHOWN) {
            println!("VIOLATION {}: {violation}", report.part);
        }
        if violations.len() > SHOWN {
            println!("{}: {} violations in all", report.part, violations.len());
        }
    }
}
