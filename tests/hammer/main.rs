//! Semaphores and throttles under the hammer: processes in Rust and in Python claim and attempt as
//! fast as they can, some of them are killed in the middle of it, and judges of our own look for what
//! was handed out twice.
//!
//! `scripts/hammer` runs it, with the package that the Python programs need. The program starts
//! itself again for the clients that use this crate.

mod account;
mod attempts;
mod clients;
mod dice;
mod fragile;
mod holder;
mod log;
mod lowering;
mod report;
mod semaphore;
mod spacing;
mod throttle;

use std::env;
use std::process::ExitCode;
use std::time::Duration;

use crate::report::Report;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["hold", url, address, slots, ref services @ ..] => {
            holder::run(url, address, slots.parse().unwrap(), services);
            ExitCode::SUCCESS
        }
        ["attempt", url, connections, keys] => {
            attempts::run(url, connections.parse().unwrap(), keys.parse().unwrap());
            ExitCode::SUCCESS
        }
        ["--seconds", seconds] => match seconds.parse() {
            Ok(seconds @ 1..) => hammer(seconds),
            _ => usage(),
        },
        [] => hammer(60),
        _ => usage(),
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: scripts/hammer [--seconds SECONDS]");
    ExitCode::from(2)
}

fn hammer(seconds: u32) -> ExitCode {
    let whole = Duration::from_secs(seconds.into());
    let reports = [
        semaphore::hammer(whole),
        lowering::hammer((whole / 6).max(Duration::from_secs(4))),
        throttle::hammer(whole / 2),
        throttle::hammer_keys((whole / 10).max(Duration::from_secs(6))),
    ];
    report::print(&reports);
    if reports.iter().all(Report::is_clean) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
