//! How fast the crate is, beside what users would write instead, on one throwaway server. `scripts/bench --help` says more.

mod capacity;
mod chart;
mod compare;
mod growth;
mod locks;
mod machine;
mod network;
mod page;
mod peers;
mod pgbench;
mod rate_limits;
mod report;
mod semaphores;
mod server;
mod throttles;
mod transactions;

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use crate::compare::Plan;
use crate::report::Report;
use crate::server::Server;

const HELP: &str = "\
Usage: scripts/bench [--seconds S] [--rounds N] [--rows N] [--write] [SECTION...]

Prints tables in Markdown: the contenders of a row take turns, and a ratio is the median over the
rounds, with the ratios that one round in ten is below and above.

Sections: locks, async, semaphores, throttles, rate_limits, transactions, peers, growth,
          capacity, network (default: all)

  --seconds S  how long a turn takes (default: 1)
  --rounds N   how many turns each contender has (default: 7)
  --rows N     how large the log of `growth` is (default: 10000000); keys are a tenth of that
  --write      writes the figures into docs/performance.md and docs/performance.svg: the ratios,
               if all their sections ran, and those of `capacity` and `network`
";

/// What all sections need.
struct Bench {
    server: Server,
    plan: Plan,
    rows: u32,
}

type Section = fn(&Bench, &mut Report);

/// Compare ours with references.
const COMPARISONS: [(&str, Section); 8] = [
    ("locks", locks::blocking),
    ("async", locks::asynchronous),
    ("semaphores", semaphores::run),
    ("throttles", throttles::run),
    ("rate_limits", rate_limits::run),
    ("transactions", transactions::run),
    ("peers", peers::run),
    ("growth", growth::run),
];
const CAPACITY: &str = "capacity";
const NETWORK: &str = "network";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    use lexopt::prelude::*;

    let (mut seconds, mut rounds, mut rows, mut is_written) = (1.0, 7, 10_000_000, false);
    let mut chosen: Vec<String> = Vec::new();
    let names: Vec<&str> = (COMPARISONS.iter().map(|(name, _)| *name))
        .chain([CAPACITY, NETWORK])
        .collect();
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("seconds") => seconds = arguments.value()?.parse()?,
            Long("rounds") => rounds = arguments.value()?.parse()?,
            Long("rows") => rows = arguments.value()?.parse()?,
            Long("write") => is_written = true,
            Long("help") | Short('h') => {
                print!("{HELP}");
                return Ok(());
            }
            Value(name) => match names.iter().find(|known| name == **known) {
                Some(known) => chosen.push((*known).to_owned()),
                None => return Err(format!("no section {name:?}\n\n{HELP}").into()),
            },
            other => return Err(other.unexpected().into()),
        }
    }
    let turn = Duration::try_from_secs_f64(seconds)?;
    if turn.is_zero() || rounds == 0 || rows < 10_000 {
        return Err("a turn, a round and 10,000 rows at least".into());
    }
    let is_chosen = |name: &str| chosen.is_empty() || chosen.iter().any(|it| it == name);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("it is a directory of the repository");
    let bench = Bench {
        server: Server::start(),
        plan: Plan { rounds, turn },
        rows,
    };
    let machine = machine::describe(&bench.server, bench.plan);

    let comparisons: Vec<_> = COMPARISONS
        .iter()
        .filter(|(name, _)| is_chosen(name))
        .collect();
    if !comparisons.is_empty() {
        println!("{machine}\n\n{}", report::RATIOS);
        let mut report = Report::new(bench.plan);
        for (_, section) in &comparisons {
            section(&bench, &mut report);
        }
        if is_written && comparisons.len() == COMPARISONS.len() {
            let text = format!("{machine}\n\n{}", report.ratios());
            page::write(root, "ratios", &text)?;
            fs::write(
                root.join("docs/performance.svg"),
                chart::draw(&report.ratios),
            )?;
        }
    }
    if is_chosen(CAPACITY) {
        println!("\n{machine}\n\n{}", report::RATES);
        let mut report = Report::new(bench.plan);
        capacity::run(&bench, &mut report);
        if is_written {
            let text = format!("{machine}\n\n{}", report.rates());
            page::write(root, CAPACITY, &text)?;
        }
    }
    drop(bench);
    if is_chosen(NETWORK) {
        println!();
        let table = network::run(root);
        if is_written {
            page::write(root, NETWORK, &table)?;
        }
    }
    Ok(())
}
