//! The table: a row for each comparison, as soon as it is there.

use std::thread::available_parallelism;

use crate::compare::{Boxed, Comparison, Plan, compare};
use crate::server::Server;

pub(crate) struct Report {
    plan: Plan,
}

impl Report {
    /// Prints the head of the table.
    pub(crate) fn begin(server: &Server, plan: Plan) -> Self {
        let cores = available_parallelism().map_or(0, usize::from);
        println!(
            "{}, `fsync` on, Unix socket, clients and server on {cores} cores. {} turns of {:?} each; a ratio is the median of \
             the rounds, and one round in ten is below and one above what stands in parentheses.\n",
            server.version(),
            plan.rounds,
            plan.turn
        );
        println!("| work | clients | ours, per second | reference, per second | ratio | aim |");
        println!("|---|---:|---:|---:|---:|---:|");
        Self { plan }
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
        let Comparison {
            ours,
            reference,
            ratio,
            low,
            high,
        } = compare(self.plan, ours, reference);
        let aim = aim.map_or(String::new(), |aim| {
            format!("{aim}{}", if ratio < aim { " (missed)" } else { "" })
        });
        println!(
            "| {work} | {clients} | {} | {} | {ratio:.2} ({low:.2} to {high:.2}) | {aim} |",
            rounded(ours),
            rounded(reference)
        );
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
