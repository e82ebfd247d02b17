//! A rate limit that crowds of 2 to 64 clients check, half of them in Python: no window has more than was promised, and nearly
//! all that was promised is given.

use std::thread;
use std::time::Duration;

use diesel_interlock::migrations;
use workbench::Database;

use super::changes;
use super::checks;
use super::clients::{Clients, Language, Messages, Program};
use super::report::Report;
use crate::check::windows::{self, Use};
use crate::clock::Micros;
use crate::role::Role;

/// Units per second, which are also the burst. 64 clients want far more. So they use up the burst soon, and a machine that runs
/// none of them for a second loses no unit.
const CONTENDED: u32 = 50;
const CHUNKS: u32 = 200;

/// Checks a key of its own from each crowd, with a round trip for each check.
pub(super) fn run(duration: Duration) -> Report {
    let mut report = Report::of("rate limit");
    let database = database();
    for clients in [2, 8, 64] {
        let levels = [
            "read committed",
            "repeatable read",
            "serializable",
            "read committed",
        ];
        // Half of the clients are threads of Rust processes, and half of Python processes.
        let processes = if clients < 8 { 1 } else { 4 };
        let settings = checks::Settings {
            url: database.url(),
            threads: clients / 2 / processes,
            key: format!("{clients} clients"),
            n: CONTENDED,
            burst: CONTENDED,
            chunk: 0,
        };
        let role = Role::Checks(settings.clone());
        let programs = levels.into_iter().take(processes).flat_map(|isolation| {
            [Language::Rust, Language::Python("checks.py")]
                .map(|language| Program::new("checks", language, isolation, role.clone()))
        });
        let (messages, until) = check(&mut report, &database, programs, duration / 3);
        examine(&mut report, &settings, &messages, until, 0.99);
    }
    report
}

/// Checks one key from four processes that take several units at a time.
pub(super) fn run_local(duration: Duration) -> Report {
    let mut report = Report::of("local");
    let database = database();
    let settings = checks::Settings {
        url: database.url(),
        threads: 4,
        key: "chunks".to_owned(),
        n: CHUNKS,
        burst: CHUNKS,
        chunk: 10,
    };
    let role = Role::Checks(settings.clone());
    let program = Program::new("checks", Language::Rust, "read committed", role);
    let (messages, until) = check(&mut report, &database, vec![program; 4], duration);
    examine(&mut report, &settings, &messages, until, 0.98);
    report
}

fn database() -> Database {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    database
}

/// Checks as fast as the programs can. Returns the end of that time by the database clock, before the first of them stops.
fn check(
    report: &mut Report,
    database: &Database,
    programs: impl IntoIterator<Item = Program>,
    duration: Duration,
) -> (Messages, Micros) {
    let mut clients = Clients::start(programs);
    clients.begin();
    thread::sleep(duration);
    let until = changes::clock(&mut database.connect()).timestamp_micros();
    let (messages, violations) = clients.end();
    report.violated(violations);
    report.violated(
        (messages.unknown.iter()).map(|line| format!("a client wrote an unknown message: {line}")),
    );
    report.operations += messages.operations();
    report.claims += messages.grants;
    report.refusals += messages.attempts - messages.grants;
    (messages, until)
}

/// Checks that no window has too many units, and that all have at least this share of what was promised, from the first to the
/// last call that was allowed while all clients checked.
fn examine(
    report: &mut Report,
    settings: &checks::Settings,
    messages: &Messages,
    until: Micros,
    share: f64,
) {
    let key = &settings.key;
    let (allowed, grants) = (messages.allowed.len(), messages.grants);
    report.check(allowed == grants, || {
        format!("{key}: {grants} calls were allowed, and {allowed} were told")
    });
    let mut uses: Vec<_> = (messages.allowed.iter())
        .map(|&at| Use { at, units: 1 })
        .collect();
    if let Some(excess) = windows::worst(&uses, &[], settings.quota()) {
        report.violated([format!("{key}: above the promise: {excess:?}")]);
    }

    uses.retain(|it| it.at <= until);
    let (Some(first), Some(last)) = (uses.iter().min(), uses.iter().max()) else {
        report.violated([format!("{key}: no call was allowed")]);
        return;
    };
    let seconds = (last.at - first.at) as f64 / 1e6;
    let promised = f64::from(settings.burst) + seconds * f64::from(settings.n);
    let given = uses.len();
    // On a busy machine nobody may have checked for a moment. Those units are not lost, because the next calls get them.
    let to_come = f64::from(settings.n) / 2.0;
    report.check(given as f64 + to_come >= share * promised, || {
        format!("{key}: only {given} of {promised:.0} units were given in {seconds:.1} s")
    });
    report.remarks.push(format!(
        "{key}: {:.1} % of what was promised in {seconds:.1} s was given",
        given as f64 / promised * 100.0
    ));
    let (some, all) = report.grants_of_possible.unwrap_or_default();
    report.grants_of_possible = Some((some + given, all + promised as usize));
}
