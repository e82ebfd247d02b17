//! What a part of the hammering came to.

/// Figures for the table, and whatever should not have been.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) part: &'static str,
    /// Everything that clients got an answer to.
    pub(crate) operations: usize,
    /// Slots claimed, or resources granted.
    pub(crate) claims: usize,
    pub(crate) refusals: usize,
    /// Processes, and sessions of the database.
    pub(crate) kills: (usize, usize),
    /// What was seen, and what would be allowed.
    pub(crate) most_in_flight: Option<(usize, usize)>,
    pub(crate) grants_of_possible: Option<(usize, usize)>,
    pub(crate) remarks: Vec<String>,
    violations: Vec<String>,
}

/// How many violations of a part are printed.
const SHOWN: usize = 20;

impl Report {
    pub(crate) fn of(part: &'static str) -> Self {
        Self {
            part,
            ..Self::default()
        }
    }

    /// Notes a violation unless it is so.
    pub(crate) fn check(&mut self, is_so: bool, violation: impl FnOnce() -> String) {
        if !is_so {
            self.violations.push(violation());
        }
    }

    pub(crate) fn violated(&mut self, violations: impl IntoIterator<Item = String>) {
        self.violations.extend(violations);
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }
}

pub(crate) fn print(reports: &[Report]) {
    println!(
        "{:<10} {:>10} {:>8} {:>8} {:>9} {:>9} {:>15}",
        "", "operations", "claims", "refusals", "kills", "in flight", "grants"
    );
    for report in reports {
        let of = |figures: Option<(usize, usize)>| match figures {
            Some((some, all)) => format!("{some} of {all}"),
            None => "-".to_owned(),
        };
        println!(
            "{:<10} {:>10} {:>8} {:>8} {:>9} {:>9} {:>15}",
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
            println!("{}: VIOLATED: {violation}", report.part);
        }
        if violations.len() > SHOWN {
            println!("{}: {} violations in all", report.part, violations.len());
        }
    }
}
