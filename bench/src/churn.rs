//! What becomes of claims as the day goes on: each leaves a dead row and dead index entries behind, which PostgreSQL
//! cleans up, unless somebody's snapshot might still see them.

use std::time::{Duration, Instant};

use diesel_interlock::{Attempt, PgPool};

use crate::Bench;
use crate::harness::{Ratio, median};
use crate::report::{NO_GOAL, Report};
use crate::semaphores::{self, semaphore};
use crate::site::Place;

const CONNECTIONS: usize = 8;

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    hour(bench, report);
    snapshot(bench, report);
}

/// An hour of fifty claims a second, as fast as they go, while autovacuum looks every second instead of every minute.
fn hour(bench: &Bench, report: &mut Report) {
    let claims = if bench.options.quick {
        6_000.0
    } else {
        180_000.0
    };
    let place = bench.site.place();
    let mut session = place.session();
    session.query("ALTER SYSTEM SET autovacuum_naptime = '1s'");
    session.query("SELECT pg_reload_conf()");

    report.scenario("churn: an hour of 50 claims a second", CONNECTIONS);
    let mut contender = semaphores::ours("ours", &place, CONNECTIONS);
    let slice = Duration::from_millis(500);
    contender.run(slice);
    let (mut rates, mut done) = (Vec::new(), 0.0);
    while done < claims {
        rates.push(contender.run(slice));
        done += rates[rates.len() - 1] * slice.as_secs_f64();
    }
    let tenth = rates.len().div_ceil(10);
    let (first, last) = (median(&rates[..tenth]), &rates[rates.len() - tenth..]);
    let ratios: Vec<f64> = last.iter().map(|rate| rate / first).collect();
    let (ours, reference) = (median(last), first);
    let ratio = Ratio {
        ours,
        reference,
        ratios,
    };
    report.add_ratio(
        "claims and releases: last tenth / first tenth",
        "operations/s",
        &ratio,
        NO_GOAL,
    );
    report.figure("claims", "claims", done);
    sizes(&place, report);

    session.query("ALTER SYSTEM RESET autovacuum_naptime");
    session.query("SELECT pg_reload_conf()");
}

/// A transaction that stays open for hours, somewhere in the database.
fn snapshot(bench: &Bench, report: &mut Report) {
    let (claims, patience) = if bench.options.quick {
        (3_000.0, Duration::from_secs(10))
    } else {
        (100_000.0, Duration::from_secs(150))
    };
    let place = bench.site.place();
    let pool = place.pool(1);
    report.scenario("churn: claims under one long-open snapshot", CONNECTIONS);
    let mut contender = semaphores::ours("ours", &place, CONNECTIONS);
    contender.run(Duration::from_millis(300));
    report.figure(
        "claim and release before",
        "µs, median of one connection",
        claim_time(&pool),
    );

    let mut reader = place.session();
    reader.query("BEGIN ISOLATION LEVEL REPEATABLE READ");
    reader.query("SELECT count(*) FROM resource_control.service_request");
    let (began, mut done) = (Instant::now(), 0.0);
    for part in 1..=4 {
        while done < claims * f64::from(part) / 4.0 && began.elapsed() < patience {
            let slice = Duration::from_millis(250);
            done += contender.run(slice) * slice.as_secs_f64();
        }
        let what = format!(
            "claim and release after {:.0} claims",
            (done / 100.0).round() * 100.0
        );
        report.figure(&what, "µs, median of one connection", claim_time(&pool));
    }
    sizes(&place, report);
    reader.query("COMMIT");
    // The first claims afterwards clean up what they meet.
    let first = one_claim(&pool);
    report.figure("the first claim and release after it closed", "µs", first);
    contender.run(Duration::from_millis(300));
    report.figure(
        "claim and release once it closed",
        "µs, median of one connection",
        claim_time(&pool),
    );
}

fn claim_time(pool: &PgPool) -> f64 {
    let times: Vec<f64> = (0..50).map(|_| one_claim(pool)).collect();
    median(&times)
}

fn one_claim(pool: &PgPool) -> f64 {
    let sent = Instant::now();
    let Attempt::Acquired(permit) = semaphore().try_acquire(pool).unwrap() else {
        panic!("a slot is free")
    };
    permit.release().unwrap();
    sent.elapsed().as_secs_f64() * 1e6
}

fn sizes(place: &Place, report: &mut Report) {
    let mut session = place.session();
    let mut size = |relation: &str| -> f64 {
        let question = format!("SELECT pg_relation_size('resource_control.{relation}')::text");
        session.query(&question).text(0).parse::<f64>().unwrap() / 1024.0
    };
    report.figure("size of the table", "KiB", size("service_request"));
    report.figure(
        "size of the index of those in flight",
        "KiB",
        size("service_request_in_flight"),
    );
}
