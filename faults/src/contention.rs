//! The campaign of contention: Rust and Python processes claim slots, attempt throttles and check rate limits as fast as they
//! can, some of them are killed in the middle of an operation, and observers of its own look for slots, grants and units that
//! were given twice, and for units that were promised and not given.
//!
//! The Python programs are in `faults/clients/`. `scripts/faults` installs the package that they need.

pub(crate) mod attempts;
mod changes;
pub(crate) mod checks;
mod clients;
mod fewer_slots;
mod fragile_service;
pub(crate) mod holder;
mod rate_limit;
mod report;
mod request_log;
mod semaphore;
mod spacing;
mod throttle;

use std::process::ExitCode;
use std::time::Duration;

use self::report::Report;

/// Runs the six parts one after another, and prints a table of their figures. The first part takes `whole`.
pub(crate) fn run(whole: Duration) -> ExitCode {
    let reports = [
        semaphore::run(whole),
        fewer_slots::run((whole / 6).max(Duration::from_secs(4))),
        throttle::run(whole / 2),
        throttle::run_keys((whole / 10).max(Duration::from_secs(6))),
        rate_limit::run((whole / 5).max(Duration::from_secs(12))),
        rate_limit::run_local((whole / 15).max(Duration::from_secs(4))),
    ];
    report::print(&reports);
    if reports.iter().all(Report::is_clean) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
