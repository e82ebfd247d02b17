//! A semaphore of four slots: clients of this crate, of the stored functions and of the article's
//! steps, and a killer among them.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;

use crate::account::{self, BY_THE_ARTICLE};
use crate::clients::{Clients, Code, Program, Said};
use crate::dice::Dice;
use crate::fragile::Fragile;
use crate::log;
use crate::report::Report;

const SLOTS: usize = 4;
const SERVICE: &str = "geocoder";

pub(crate) const HOLDER: Code = Code::Rust("hold");
pub(crate) const FUNCTIONS: Code = Code::Python("functions.py");
const ARTICLE: Code = Code::Python("article.py");

pub(crate) fn hammer(duration: Duration) -> Report {
    let mut report = Report::of("semaphore");
    let database = account::database();
    let conn = &mut database.connect();
    let service = Fragile::start();
    let clients = [
        Program::new("by the crate", HOLDER, "read committed"),
        Program::new("by the crate", HOLDER, "repeatable read"),
        Program::new("by the crate", HOLDER, "serializable"),
        Program::new("by the functions", FUNCTIONS, "read committed"),
        Program::new("by the functions", FUNCTIONS, "serializable"),
        Program::new(BY_THE_ARTICLE, ARTICLE, "read committed"),
        Program::new(BY_THE_ARTICLE, ARTICLE, "read committed"),
    ];
    let arguments = [&database.url(), &service.address(), "4", SERVICE];
    let mut clients = Clients::start(clients.map(|program| program.arguments(&arguments)));

    report.kills = kill_again_and_again(&mut clients, conn, Instant::now() + duration);
    let end = account::clock(conn);
    let (said, violations) = clients.end();
    report.violated(violations);
    judge(&mut report, conn, &service, &said);
    let (lost, killed) = (said.failed.len(), report.kills.1);
    report.check(lost <= killed, || {
        format!(
            "{lost} answers were lost with {killed} sessions: {:#?}",
            said.failed
        )
    });

    let requests = account::requests(conn);
    log::check_answers(&mut report, &requests, &said);
    log::check_successions(&mut report, &requests);
    let most = log::check_number_in_flight(&mut report, &requests, |_| SLOTS);
    let idle = log::check_slots_come_back(&mut report, &requests, end);
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
        format!("somebody had no slot: {claims:?}")
    });
    // In a short run, or on a slow machine, it may be so.
    let nobody_was_late = said.timed_out.is_empty() && said.claimed.len() > 2000;
    report.check(!nobody_was_late, || "nobody was late".to_owned());
    let expired = requests.iter().filter(|request| request.expired()).count();
    report.remarks.push(format!(
        "claims {claims:?}; {expired} were not ended in time, and their slots claimed again {} ms later at most",
        idle.num_milliseconds()
    ));
    report.remarks.push(format!(
        "{} releases of ours came late, {lost} answers were lost with their sessions, {} calls came too late",
        said.timed_out.len(),
        service.turned_away()
    ));
    report
}

/// Kills a process each second, and four sessions, most of them in the middle of a transaction.
/// Answers how many of each.
fn kill_again_and_again(
    clients: &mut Clients,
    conn: &mut PgConnection,
    end: Instant,
) -> (usize, usize) {
    let mut dice = Dice::new();
    let mut killed = (0, 0);
    // Not before everybody had a chance to begin.
    let mut process_at = Instant::now() + Duration::from_secs(2);
    let mut session_at = process_at;
    while Instant::now() < end {
        if Instant::now() > process_at {
            clients.kill(dice.below(clients.count()));
            killed.0 += 1;
            process_at = Instant::now() + dice.milliseconds(500..1500);
        }
        if Instant::now() > session_at && terminate_one(conn, dice.one_in(4)) {
            killed.1 += 1;
            session_at = Instant::now() + dice.milliseconds(100..400);
        }
        thread::sleep(Duration::from_millis(2));
    }
    killed
}

/// Ends a session that is at something: one that has changed a row and not yet committed, or any.
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

/// What holds for every hammering of a semaphore.
pub(crate) fn judge(report: &mut Report, conn: &mut PgConnection, service: &Fragile, said: &Said) {
    report.operations = said.operations();
    report.claims = said.claimed.len();
    report.refusals = said.refused;
    report.most_in_flight = Some((service.most_in_flight(), SLOTS));
    report.violated(service.violations());
    report.violated(account::wrong_changes(conn));
    report.violated(said.nonsense.iter().map(|line| format!("it said {line}")));
}
