//! A semaphore of four slots, claimed through this crate, through the stored functions and by the article's steps, while
//! processes and sessions are killed.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;

use super::changes::{self, BY_THE_ARTICLE};
use super::clients::{Clients, Language, Messages, Program};
use super::fragile_service::Fragile;
use super::holder;
use super::report::Report;
use super::request_log;
use crate::chance::Chance;
use crate::role::Role;
use fastrand::Rng;

const SLOTS: usize = 4;
const SERVICE: &str = "geocoder";

pub(super) const FUNCTIONS: Language = Language::Python("functions.py");
const ARTICLE: Language = Language::Python("article.py");

pub(super) fn run(duration: Duration) -> Report {
    let mut report = Report::of("semaphore");
    let database = changes::database();
    let conn = &mut database.connect();
    let service = Fragile::start();
    let role = Role::Holder(holder::Settings {
        url: database.url(),
        address: service.address(),
        slots: SLOTS as u32,
        services: vec![SERVICE.to_owned()],
    });
    let programs = [
        ("by the crate", Language::Rust, "read committed"),
        ("by the crate", Language::Rust, "repeatable read"),
        ("by the crate", Language::Rust, "serializable"),
        ("by the functions", FUNCTIONS, "read committed"),
        ("by the functions", FUNCTIONS, "serializable"),
        (BY_THE_ARTICLE, ARTICLE, "read committed"),
        (BY_THE_ARTICLE, ARTICLE, "read committed"),
    ];
    let mut clients =
        Clients::start(programs.map(|(name, language, isolation)| {
            Program::new(name, language, isolation, role.clone())
        }));

    report.kills = kill_repeatedly(&mut clients, conn, Instant::now() + duration);
    let end = changes::clock(conn);
    let (messages, violations) = clients.end();
    report.violated(violations);
    examine(&mut report, conn, &service, &messages);
    let (lost, killed) = (messages.failed.len(), report.kills.1);
    report.check(lost <= killed, || {
        format!(
            "{lost} operations failed, and only {killed} sessions were ended: {:#?}",
            messages.failed
        )
    });

    let requests = changes::requests(conn);
    request_log::check_messages(&mut report, &requests, &messages);
    request_log::check_successions(&mut report, &requests);
    let most = request_log::check_number_in_flight(&mut report, &requests, |_| SLOTS);
    let idle = request_log::check_slots_come_back(&mut report, &requests, end);
    report.check(most >= SLOTS, || format!("only {most} were in flight"));

    let mut claims = BTreeMap::from([
        ("by the crate", 0),
        ("by the functions", 0),
        (BY_THE_ARTICLE, 0),
    ]);
    for request in &requests {
        *claims.get_mut(request.details.as_str()).unwrap() += 1;
    }
    report.check(claims.values().all(|claims| *claims > 0), || {
        format!("one kind of client claimed no slot: {claims:?}")
    });
    // A short run, or a slow machine, may have no late release.
    let nobody_was_late = messages.timed_out.is_empty() && messages.claimed.len() > 2000;
    report.check(!nobody_was_late, || "no release was late".to_owned());
    let expired = requests.iter().filter(|request| request.expired()).count();
    report.remarks.push(format!(
        "claims {claims:?}; {expired} expired, and their slots were claimed again after at most {} ms",
        idle.num_milliseconds()
    ));
    report.remarks.push(format!(
        "{} releases came after the timeout, {lost} operations failed with their sessions, {} calls came after their deadline",
        messages.timed_out.len(),
        service.turned_away()
    ));
    report
}

/// Kills one process and four sessions each second, most of the sessions in the middle of a transaction. Returns how many
/// of each it killed.
fn kill_repeatedly(clients: &mut Clients, conn: &mut PgConnection, end: Instant) -> (usize, usize) {
    let mut random = Rng::new();
    let mut killed = (0, 0);
    // Every client has time to begin first.
    let mut process_at = Instant::now() + Duration::from_secs(2);
    let mut session_at = process_at;
    while Instant::now() < end {
        if Instant::now() > process_at {
            clients.kill(random.usize(..clients.count()));
            killed.0 += 1;
            process_at = Instant::now() + random.millis(500, 1499);
        }
        if Instant::now() > session_at && terminate_one(conn, random.one_in(4)) {
            killed.1 += 1;
            session_at = Instant::now() + random.millis(100, 399);
        }
        thread::sleep(Duration::from_millis(2));
    }
    killed
}

/// Ends the session of a client that has changed a row and not yet committed, or that is active.
fn terminate_one(conn: &mut PgConnection, any: bool) -> bool {
    let which = if any {
        "state = 'active'"
    } else {
        "backend_xid IS NOT NULL"
    };
    let terminated = diesel::sql_query(format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() \
         AND application_name LIKE 'by the %' AND {which} ORDER BY random() LIMIT 1"
    ))
    .execute(conn);
    terminated.unwrap() == 1
}

/// Adds the figures and the violations that all parts with a semaphore share.
pub(super) fn examine(
    report: &mut Report,
    conn: &mut PgConnection,
    service: &Fragile,
    messages: &Messages,
) {
    report.operations = messages.operations();
    report.claims = messages.claimed.len();
    report.refusals = messages.refused;
    report.most_in_flight = Some((service.most_in_flight(), SLOTS));
    report.violated(service.violations());
    report.violated(changes::wrong_changes(conn));
    report.violated(
        messages
            .unknown
            .iter()
            .map(|line| format!("a client wrote an unknown message: {line}")),
    );
}
