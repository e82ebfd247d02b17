//! What becomes of the figures as tables grow: a log of ten million finished requests, a million keys, ten thousand
//! resources, beside empty tables.

use std::time::{Duration, Instant};

use diesel_interlock::{Semaphore, ThrottledResource};

use crate::Bench;
use crate::churn;
use crate::harness::{Contenders, compare};
use crate::libpq::Session;
use crate::report::{Report, at_least};
use crate::semaphores;
use crate::server::BenchDatabase;
use crate::session_locks;
use crate::throttles::{self, Resource};

/// How large the tables are.
struct Sizes {
    some: u32,
    many: u32,
    keys: u32,
    resources: u32,
}

const FULL: Sizes = Sizes {
    some: 1_000_000,
    many: 10_000_000,
    keys: 1_000_000,
    resources: 10_000,
};

const QUICK: Sizes = Sizes {
    some: 10_000,
    many: 100_000,
    keys: 10_000,
    resources: 200,
};

const EMPTY: &str = "empty tables";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let sizes = if bench.options.quick { QUICK } else { FULL };
    let began = Instant::now();
    let empty = throttles::prepared(&bench.server);
    let some = throttles::prepared(&bench.server);
    log(&some, sizes.some);
    let many = throttles::prepared(&bench.server);
    log(&many, sizes.many);
    keys(&many, sizes.keys);
    resources(&many, sizes.resources);
    many.session().query("CHECKPOINT");
    let with_some = format!("a log of {}", sizes.some);
    let with_many = format!("a log of {}", sizes.many);
    let with_keys = format!("{} keys, {} resources", sizes.keys, sizes.resources);
    println!(
        "\n(growth: tables filled in {} s)",
        began.elapsed().as_secs()
    );

    // Each contender on each database, all taking turns; the first database is what the others are compared with.
    let by_size = |report: &mut Report,
                   scenario,
                   number,
                   places: &[(&str, &BenchDatabase)],
                   make: &dyn Fn(&str, &BenchDatabase) -> _| {
        report.scenario(scenario, number);
        let contenders: Contenders = places
            .iter()
            .map(|(name, database)| make(name, database))
            .collect();
        let rates = compare(bench.options.plan(), contenders);
        for (name, _) in &places[1..] {
            report.ratio(&rates, name, EMPTY, at_least(0.9));
        }
    };
    let logs = [
        (EMPTY, &empty),
        (with_some.as_str(), &some),
        (with_many.as_str(), &many),
    ];
    for number in [1, 8] {
        by_size(
            report,
            "growth: claim and release",
            number,
            &logs,
            &|name, database| semaphores::ours(name, database, number),
        );
    }
    let filled = logs.map(|(_, database)| semaphores::fill_ours(database));
    by_size(report, "growth: refusal", 8, &logs, &|name, database| {
        semaphores::refusals(name, database, 8)
    });
    drop(filled);
    in_flight(bench, report);

    let tables = [(EMPTY, &empty), (with_keys.as_str(), &many)];
    by_size(
        report,
        "growth: throttle, denied",
        8,
        &tables,
        &|name, database| throttles::ours(name, database, 8, Resource::Hourly, |_| None, false),
    );
    by_size(
        report,
        "growth: throttle, granted",
        1,
        &tables,
        &|name, database| throttles::ours(name, database, 1, Resource::AtOnce, |_| None, true),
    );
    by_size(
        report,
        "growth: throttle, denied for a key",
        8,
        &tables,
        &|name, database| {
            throttles::ours(
                name,
                database,
                8,
                Resource::Hourly,
                throttles::one_key,
                false,
            )
        },
    );
    by_size(
        report,
        "growth: throttle, granted for a key",
        8,
        &tables,
        &|name, database| {
            throttles::ours(
                name,
                database,
                8,
                Resource::AtOnce,
                throttles::one_key,
                true,
            )
        },
    );
    by_size(
        report,
        "growth: throttle, granted for a new key",
        8,
        &tables,
        &|name, database| {
            throttles::ours(
                name,
                database,
                8,
                Resource::Hourly,
                |_| Some(throttles::new_key()),
                true,
            )
        },
    );
    let all = [(EMPTY, &empty), ("all of it", &many)];
    by_size(
        report,
        "growth: session lock",
        8,
        &all,
        &|name, database| session_locks::ours(name, &database.pool(8), 8),
    );
}

/// Claims where very many requests are in flight. They come as rows; what is timed are claims.
fn in_flight(bench: &Bench, report: &mut Report) {
    const SLOTS: u32 = 32_767;
    let semaphore = Semaphore::named("geocoder", SLOTS, Duration::from_secs(3600));
    let database = bench.server.database();
    let pool = churn::pool_of(&database, 1);
    report.scenario(
        "growth, without waiting for the disk: claims of 32,767 slots",
        1,
    );
    for number in [10, 1_000, 10_000, SLOTS - 1, SLOTS] {
        database.session().query(&format!(
            "TRUNCATE resource_control.service_request; \
             INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
             SELECT 'geocoder', slot, now(), now() + '1 hour' FROM generate_series(0, {number} - 1) slot \
             ORDER BY random(); \
             ANALYZE resource_control.service_request"
        ));
        let pair = || semaphores::claim_and_release(&pool, &semaphore);
        match number {
            SLOTS => {
                let refusal = || semaphores::be_refused(&pool, &semaphore);
                report.figure("refusal, all taken", "µs", semaphores::time_of(refusal));
            }
            _ => {
                let what = format!("claim and release, {number} in flight");
                let most = if number > 10_000 { 1_000.0 } else { 500.0 };
                report.figure_within(&what, "µs", semaphores::time_of(pair), most);
            }
        }
        let bare = semaphores::bare_time(Session::connect(&churn::without_disk(&database)));
        report.figure(
            &format!("bare insert and update by key, {number} in flight"),
            "µs",
            bare,
        );
    }
}

/// Fills the log, with the indexes in place, as a service does in the course of time.
fn log(database: &BenchDatabase, number: u32) {
    let mut session = database.session();
    session.query(&semaphores::finished_requests(number));
    session.query("VACUUM ANALYZE resource_control.service_request");
    let count = session
        .query("SELECT count(*)::text FROM resource_control.service_request")
        .text(0);
    assert_eq!(count, number.to_string());
}

fn keys(database: &BenchDatabase, number: u32) {
    let mut session = database.session();
    session.query(&format!(
        "INSERT INTO resource_control.throttled_key (resource_id, key, last_locked, last_locker_details) \
         SELECT '{}', 'customer ' || n, now(), 'web-1 pid 7' FROM generate_series(1, {number}) n",
        Resource::Hourly.label()
    ));
    session.query("VACUUM ANALYZE resource_control.throttled_key");
}

fn resources(database: &BenchDatabase, number: u32) {
    let mut session = database.session();
    let labels: Vec<u32> = (1..=number).collect();
    for labels in labels.chunks(500) {
        let statements = labels.iter().map(|label| {
            format!(
                "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'resource {label}';"
            )
        });
        session.query(&statements.collect::<String>());
    }
    session.query(&format!(
        "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) \
         SELECT ('resource ' || n)::resource_control.throttled_resource_enum, '1 hour' FROM generate_series(1, {number}) n"
    ));
    session.query("VACUUM ANALYZE resource_control.throttled_resource");
}
