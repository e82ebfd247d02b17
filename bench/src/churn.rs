//! What becomes of claims as the day goes on: each leaves a dead row and dead index entries behind, which PostgreSQL
//! cleans up, unless somebody's snapshot might still see them.
//!
//! The hours are compressed: commits do not wait for the disk here (`synchronous_commit` off), which is measured elsewhere.

use std::time::{Duration, Instant};

use diesel_interlock::PgPool;

use crate::Bench;
use crate::harness::{Ratio, median};
use crate::libpq::Session;
use crate::report::{NO_GOAL, Report};
use crate::semaphores::{self, semaphore};
use crate::server::{BenchDatabase, pool};

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
    let patience = Duration::from_secs(120);
    let database = bench.server.database();
    let mut session = database.session();
    session.query("ALTER SYSTEM SET autovacuum_naptime = '1s'");
    session.query("SELECT pg_reload_conf()");

    report.scenario(
        "churn, without waiting for the disk: an hour of 50 claims a second",
        CONNECTIONS,
    );
    let mut contender = semaphores::ours_of("ours", &pool_of(&database, CONNECTIONS), CONNECTIONS);
    let slice = Duration::from_millis(500);
    contender.run(slice);
    let (began, mut rates, mut done) = (Instant::now(), Vec::new(), 0.0);
    while done < claims && began.elapsed() < patience {
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
    sizes(&database, report);

    session.query("ALTER SYSTEM RESET autovacuum_naptime");
    session.query("SELECT pg_reload_conf()");
}

/// A transaction that stays open for hours, somewhere in the database, while a hundred thousand requests come and go.
///
/// They come in batches that take every slot, as rows, and leave behind what as many claims would. What is timed are
/// claims.
fn snapshot(bench: &Bench, report: &mut Report) {
    let requests: u32 = if bench.options.quick { 10_000 } else { 100_000 };
    let database = bench.server.database();
    let pool = pool_of(&database, 1);
    report.scenario(
        "churn, without waiting for the disk: claims under one long-open snapshot",
        1,
    );
    let claim_time = || semaphores::time_of(|| one_claim(&pool));
    let refusal_time = || {
        let taken: Vec<_> = (0..semaphore().slots())
            .map(|_| semaphore().try_acquire(&pool).unwrap().admitted())
            .collect();
        assert!(taken.iter().all(Option::is_some));
        semaphores::time_of(|| semaphores::be_refused(&pool, &semaphore()))
    };
    let bare_time = || semaphores::bare_time(Session::connect(&without_disk(&database)));
    come_and_go(&database, requests / 10);
    report.figure("claim and release before", "µs", claim_time());
    report.figure("refusal before", "µs", refusal_time());
    report.figure("bare insert and update before", "µs", bare_time());

    let mut reader = database.session();
    reader.query("BEGIN ISOLATION LEVEL REPEATABLE READ");
    reader.query("SELECT count(*) FROM resource_control.service_request");
    for part in 1..=4 {
        come_and_go(&database, requests / 4);
        report.figure_within(
            &format!("claim and release after {} requests", requests / 4 * part),
            "µs",
            claim_time(),
            1_500.0,
        );
    }
    report.figure_within("refusal after them", "µs", refusal_time(), 300.0);
    report.figure("bare insert and update after them", "µs", bare_time());
    sizes(&database, report);
    reader.query("COMMIT");
    let closed = Instant::now();
    one_claim(&pool);
    report.figure(
        "the first claim and release after it closed",
        "µs",
        closed.elapsed().as_secs_f64() * 1e6,
    );
    report.figure("claim and release once it closed", "µs", claim_time());
}

fn come_and_go(database: &BenchDatabase, number: u32) {
    let mut session = Session::connect(&without_disk(database));
    let come = session.prepare(
        "come",
        &format!(
            "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
             SELECT 'geocoder', slot, now(), now() + '1 hour' FROM generate_series(0, {}) slot",
            semaphore().slots() - 1
        ),
    );
    let go = session.prepare(
        "go",
        "UPDATE resource_control.service_request SET completed_at = now() \
         WHERE service = 'geocoder' AND id > $1 AND completed_at IS NULL AND timed_out_at IS NULL",
    );
    let last = session.prepare(
        "last",
        "SELECT coalesce(max(id), 0) FROM resource_control.service_request",
    );
    for _ in 0..number / semaphore().slots() {
        let before = session.run(&last, &[]).bigint(0);
        session.run(&come, &[]);
        let ended = session.run(&go, &[before]).changed();
        assert_eq!(ended, u64::from(semaphore().slots()));
    }
}

pub(crate) fn pool_of(database: &BenchDatabase, size: usize) -> PgPool {
    pool(&without_disk(database), size, false)
}

/// How to connect so that commits do not wait for the disk.
pub(crate) fn without_disk(database: &BenchDatabase) -> String {
    database.url_with("-c%20synchronous_commit%3Doff")
}

fn one_claim(pool: &PgPool) {
    semaphores::claim_and_release(pool, &semaphore());
}

fn sizes(database: &BenchDatabase, report: &mut Report) {
    let mut session = database.session();
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
