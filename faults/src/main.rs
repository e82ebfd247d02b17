//! Campaigns against processes that use `diesel_interlock`, and the checks of what the crate promises.
//!
//! Run by `scripts/faults`. One binary has all the roles: a campaign starts servers, poolers, proxies and workers,
//! injects faults, and checks; the workers, which are processes of the same binary or Python programs, use the
//! primitives and report the results. There are two kinds of campaigns:
//!
//! - `campaign.rs` injects faults into workers that use every primitive through pools;
//! - `contention.rs` lets many workers compete for the same slots and throttles, and kills some of them.

mod campaign;
mod chance;
mod check;
mod clock;
mod contention;
mod fault;
mod half;
mod options;
mod record;
mod role;
mod subjects;
mod worker;

use std::process::ExitCode;

use self::options::Kind;
use self::role::{Role, WORKER};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if let [first, role] = &arguments[..]
        && first == WORKER
    {
        return Role::run(&role.to_string_lossy());
    }
    match options::parse(lexopt::Parser::from_args(arguments)) {
        Ok(Kind::Faults(options)) => campaign::run(options),
        Ok(Kind::Contention(duration)) => contention::run(duration),
        Err(problem) => {
            eprintln!("{problem}\n\n{}", options::USAGE);
            ExitCode::from(2)
        }
    }
}
