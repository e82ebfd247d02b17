//! The tables: a row for each comparison or rate, as soon as it is there, and at last all of them
//! for the page.

use std::fmt::{self, Display};

use crate::compare::{Boxed, Comparison, Plan, Spread, compare, measure};

/// A comparison with a reference.
pub(crate) struct Ratio {
    pub(crate) work: String,
    pub(crate) clients: usize,
    pub(crate) compared: Comparison,
    pub(crate) aim: Option<f64>,
}

/// Operations per second, without a reference.
struct Rate {
    work: String,
    clients: usize,
    rate: Spread,
}

pub(crate) struct Report {
    plan: Plan,
    pub(crate) ratios: Vec<Ratio>,
    rates: Vec<Rate>,
}

pub(crate) const RATIOS: &str =
    "| work | clients | ours, per second | reference, per second | ratio | aim |
|---|---:|---:|---:|---:|---:|";
pub(crate) const RATES: &str = "| work | clients | per second | eight rounds in ten |
|---|---:|---:|---:|";

impl Report {
    pub(crate) const fn new(plan: Plan) -> Self {
        Self {
            plan,
            ratios: Vec::new(),
            rates: Vec::new(),
        }
    }

    /// Compares ours with a reference, and prints the row.
    pub(crate) fn row(
        &mut self,
        work: &str,
        clients: usize,
        aim: Option<f64>,
        ours: Boxed,
        reference: Boxed,
    ) {
        let ratio = Ratio {
            work: work.to_owned(),
            clients,
            compared: compare(self.plan, ours, reference),
            aim,
        };
        println!("{ratio}");
        self.ratios.push(ratio);
    }

    /// Measures a rate, and prints the row.
    pub(crate) fn rate(&mut self, work: &str, clients: usize, contender: Boxed) {
        let rate = Rate {
            work: work.to_owned(),
            clients,
            rate: measure(self.plan, contender),
        };
        println!("{rate}");
        self.rates.push(rate);
    }

    /// The table of the ratios.
    pub(crate) fn ratios(&self) -> String {
        table(RATIOS, &self.ratios)
    }

    /// The table of the rates.
    pub(crate) fn rates(&self) -> String {
        table(RATES, &self.rates)
    }
}

fn table(head: &str, rows: &[impl Display]) -> String {
    let rows = rows.iter().map(|row| format!("\n{row}"));
    format!("{head}{}", rows.collect::<String>())
}

impl Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { work, clients, .. } = self;
        let Comparison {
            ours,
            reference,
            ratio: Spread { median, low, high },
        } = self.compared;
        let missed = if self.is_missed() { " (missed)" } else { "" };
        let aim = self
            .aim
            .map_or(String::new(), |aim| format!("{aim}{missed}"));
        write!(
            f,
            "| {work} | {clients} | {} | {} | {median:.2} ({low:.2} to {high:.2}) | {aim} |",
            rounded(ours),
            rounded(reference)
        )
    }
}

impl Ratio {
    pub(crate) fn is_missed(&self) -> bool {
        // As the table rounds it.
        let ratio = (self.compared.ratio.median * 100.0).round() / 100.0;
        self.aim.is_some_and(|aim| ratio < aim)
    }
}

impl Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { work, clients, .. } = self;
        let [median, low, high] = [self.rate.median, self.rate.low, self.rate.high].map(rounded);
        write!(f, "| {work} | {clients} | {median} | {low} to {high} |")
    }
}

/// Three digits count.
fn rounded(rate: f64) -> String {
    let unit = 10_f64.powf((rate.max(1.0).log10().floor() - 2.0).max(0.0));
    let digits = format!("{:.0}", (rate / unit).round() * unit);
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}
