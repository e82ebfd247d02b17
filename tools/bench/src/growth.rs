//! What becomes of the rates as tables grow: a log of ten million finished requests and a million keys, beside empty tables.

use workbench::Database;

use crate::Bench;
use crate::compare::Boxed;
use crate::report::Report;
use crate::server::{self, pool};
use crate::{rate_limits, semaphores, throttles};

const CLIENTS: usize = 8;
const AIM: Option<f64> = Some(0.9);

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let (rows, keys) = (bench.rows, bench.rows / 10);
    let (full, empty) = (bench.server.database(), bench.server.database());
    server::run(&full, &log(rows));
    server::run(&full, "VACUUM ANALYZE resource_control.service_request");
    server::run(&full, &throttled(keys));
    rate_limits::fill(&full, keys);
    rate_limits::fill(&empty, 10_000.min(keys));
    server::run(&full, "CHECKPOINT");

    let mut row = |work: &str, make: &dyn Fn(&Database) -> Boxed| {
        report.row(work, CLIENTS, AIM, make(&full), make(&empty));
    };
    let log = format!("after {rows} logged requests / without");
    row(
        &format!("semaphore, claim and release, {log}"),
        &|database| semaphores::claims(database, CLIENTS),
    );
    let taken = [&full, &empty].map(|database| semaphores::fill(&pool(database, 1)));
    row(&format!("semaphore, refusal, {log}"), &|database| {
        semaphores::refusals(database, CLIENTS)
    });
    drop(taken);
    let many = format!("with {keys} keys / without");
    row(&format!("throttle, denied, {many}"), &|database| {
        throttles::denied(database, CLIENTS)
    });
    row(&format!("throttle, granted, {many}"), &|database| {
        throttles::granted(database, CLIENTS)
    });
    let apart = |database: &Database| {
        if database.name() == full.name() {
            keys / 10_000
        } else {
            1
        }
    };
    row(
        &format!("rate limit, allowed, with {keys} keys / with 10000"),
        &|database| rate_limits::allowed(database, CLIENTS, apart(database).max(1)),
    );
    row(&format!("rate limit, limited, {many}"), &|database| {
        rate_limits::limited(database, CLIENTS)
    });
}

/// Fills the log, with the indexes in place.
fn log(rows: u32) -> String {
    format!(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at, completed_at, details)
            SELECT 'geocoder', n % 64, now() - interval '1 day', now() - interval '23 hours', now() - interval '1 day', 'web-1'
                FROM generate_series(1, {rows}) AS n"
    )
}

fn throttled(keys: u32) -> String {
    format!(
        "INSERT INTO resource_control.throttle (name, key, last_granted, throttle_interval, details)
            SELECT 'hourly', 'customer ' || n, now(), interval '1 hour', 'web-1' FROM generate_series(1, {keys}) AS n;
         ANALYZE resource_control.throttle"
    )
}
