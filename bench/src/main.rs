//! How fast the crate is, beside what users would write instead, on one throwaway server. `scripts/bench --help` says more.

mod compare;
mod growth;
mod locks;
mod pgbench;
mod rate_limits;
mod report;
mod semaphores;
mod server;
mod throttles;

use std::process::ExitCode;
use std::time::Duration;

use crate::compare::Plan;
use crate::report::Report;
use crate::server::Server;

const HELP: &str = "\
Usage: scripts/bench [--seconds S] [--rounds N] [--rows N] [SECTION...]

Prints a table in Markdown: the contenders of a row take turns, and a ratio is the median over the rounds.

Sections: locks, async, semaphores, throttles, rate_limits, growth (default: all)

  --seconds S  how long a turn takes (default: 1)
  --rounds N   how many turns each contender has (default: 7)
  --rows N     how large the log of `growth` is (default: 10000000); keys are a tenth of that
";

/// What all sections need.
struct Bench {
    server: Server,
    plan: Plan,
    rows: u32,
}

type Section = fn(&Bench, &mut Report);

const SECTIONS: [(&str, Section); 6] = [
    ("locks", locks::blocking),
    ("async", locks::asynchronous),
    ("semaphores", semaphores::run),
    ("throttles", throttles::run),
    ("rate_limits", rate_limits::run),
    ("growth", growth::run),
];

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

    let (mut seconds, mut rounds, mut rows, mut chosen) = (1.0, 7, 10_000_000, Vec::new());
    let mut arguments = lexopt::Parser::from_env();
    while let Some(argument) = arguments.next()? {
        match argument {
            Long("seconds") => seconds = arguments.value()?.parse()?,
            Long("rounds") => rounds = arguments.value()?.parse()?,
            Long("rows") => rows = arguments.value()?.parse()?,
            Long("help") | Short('h') => {
                print!("{HELP}");
                return Ok(());
            }
            Value(name) => {
                let known = |(known, _): &&(&str, Section)| name == *known;
                match SECTIONS.iter().find(known) {
                    Some((_, section)) => chosen.push(*section),
                    None => return Err(format!("no section {name:?}\n\n{HELP}").into()),
                }
            }
            other => return Err(other.unexpected().into()),
        }
    }
    if chosen.is_empty() {
        chosen = SECTIONS.map(|(_, section)| section).to_vec();
    }
    let turn = Duration::try_from_secs_f64(seconds)?;
    if turn.is_zero() || rounds == 0 || rows < 10_000 {
        return Err("a turn, a round and 10,000 rows at least".into());
    }
    let bench = Bench {
        server: Server::start(),
        plan: Plan { rounds, turn },
        rows,
    };
    let mut report = Report::begin(&bench.server, bench.plan);
    for section in chosen {
        section(&bench, &mut report);
    }
    Ok(())
}
