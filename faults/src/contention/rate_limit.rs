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

/// How often a crowd tries to use up what was promised, each time with a key of its own. A machine that stops for longer than a
/// second loses units, and does not do so every time.
const TRIES: u32 = 3;

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
        for number in 1..=TRIES {
            let settings = checks::Settings {
                url: database.url(),
                threads: clients / 2 / processes,
                key: format!("{clients} clients, {number}"),
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
            let missing = examine(&mut report, &settings, &messages, until, 0.99);
            if is_enough(&mut report, missing, number) {
                break;
            }
        }
    }
    report
}

/// Checks one key from four processes that take several units at a time.
pub(super) fn run_local(duration: Duration) -> Report {
    let mut report = Report::of("local");
    let database = database();
    for number in 1..=TRIES {
        let settings = checks::Settings {
            url: database.url(),
            threads: 4,
            key: format!("chunks, {number}"),
            n: CHUNKS,
            burst: CHUNKS,
            chunk: 10,
        };
        let role = Role::Checks(settings.clone());
        let program = Program::new("checks", Language::Rust, "read committed", role);
        let (messages, until) = check(&mut report, &database, vec![program; 4], duration);
        let missing = examine(&mut report, &settings, &messages, until, 0.98);
        if is_enough(&mut report, missing, number) {
            break;
        }
    }
    report
}

/// Returns whether a crowd needs no further try. The last one must not miss anything.
fn is_enough(report: &mut Report, missing: Option<String>, number: u32) -> bool {
    let Some(missing) = missing else { return true };
    if number == TRIES {
        report.violated([missing]);
    } else {
        report.remarks.push(format!("{missing}: tried again"));
    }
    number == TRIES
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
/// last call that was allowed while all clients checked. Returns what is missing of that.
fn examine(
    report: &mut Report,
    settings: &checks::Settings,
    messages: &Messages,
    until: Micros,
    share: f64,
) -> Option<String> {
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
        return Some(format!("{key}: no call was allowed"));
    };
    let seconds = (last.at - first.at) as f64 / 1e6;
    let promised = f64::from(settings.burst) + seconds * f64::from(settings.n);
    let given = uses.len();
    // On a busy machine nobody may have checked for a moment. Those units are not lost, because the next calls get them.
    let to_come = f64::from(settings.n) / 2.0;
    report.remarks.push(format!(
        "{key}: {:.1} % of what was promised in {seconds:.1} s was given",
        given as f64 / promised * 100.0
    ));
    let (some, all) = report.grants_of_possible.unwrap_or_default();
    report.grants_of_possible = Some((some + given, all + promised as usize));
    (given as f64 + to_come < share * promised)
        .then(|| format!("{key}: only {given} of {promised:.0} units were given in {seconds:.1} s"))
}
