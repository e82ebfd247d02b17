//! A campaign of faults against processes that use `diesel_interlock`, and an observer that checks what was promised.
//!
//! Run by `scripts/faults`. One binary, two roles: the campaign starts servers, poolers, proxies and workers, injects the
//! faults, and checks; the workers, which it starts as processes of the same binary, use every primitive through pools
//! and tell what they were told.

mod campaign;
mod check;
mod clock;
mod fault;
mod options;
mod random;
mod record;
mod subjects;
mod worker;

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((role, rest)) if role == "worker" => worker::run(rest),
        _ => match options::Options::parse(&arguments) {
            Ok(options) => campaign::run(options),
            Err(problem) => {
                eprintln!("{problem}\n{}", options::USAGE);
                ExitCode::from(2)
            }
        },
    }
}
