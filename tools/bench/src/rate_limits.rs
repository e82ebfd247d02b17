//! Checks of rate limits.

use diesel_interlock::{Quota, RateLimit};
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, threads};
use crate::pgbench::{Mode, pgbench, script_of};
use crate::report::Report;
use crate::server::{pool, run as execute};

const CLIENTS: usize = 8;
/// How many keys the clients check, in any order.
pub(crate) const KEYS: u32 = 10_000;
static WIDE: RateLimit = RateLimit::named("wide", Quota::per_second(1_000_000));
static USED_UP: RateLimit = RateLimit::named("used up", Quota::per_day(1));

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    fill(&database, KEYS);
    execute(
        &database,
        &format!(
            "CREATE TABLE counter (key text PRIMARY KEY, value bigint NOT NULL, at timestamptz NOT NULL) WITH (fillfactor = 50);
             INSERT INTO counter SELECT n, 0, now() FROM generate_series(0, {KEYS} - 1) AS n;
             ANALYZE counter; GRANT ALL ON counter TO bench"
        ),
    );
    let update = format!(
        "\\set key random(0, {KEYS} - 1)\nUPDATE counter SET value = value + 1, at = clock_timestamp() WHERE key = :key::text;\n"
    );
    let update = pgbench(
        bench,
        &database,
        CLIENTS,
        Mode::Prepared,
        "-c synchronous_commit=off",
        update.as_str(),
    );
    let work = "rate limit, allowed, 10,000 keys / an asynchronous UPDATE by `pgbench`";
    report.row(
        work,
        CLIENTS,
        Some(0.7),
        allowed(&database, CLIENTS, 1),
        update,
    );

    for number in [1, CLIENTS] {
        let ours = limited(&database, number);
        let one = pool(&database, 1);
        let _ = USED_UP.check(&one).expect("it can be checked");
        let day = "1 day";
        let values = ["used up", "", "86400000000", "1", "0 s", day];
        let script = script_of(&one, "UPDATE resource_control.rate_limit", &values);
        let pgbench = pgbench(bench, &database, number, Mode::Prepared, "", script);
        let work = "rate limit, limited / `pgbench` of the statement";
        report.row(work, number, Some(0.85), ours, pgbench);
    }
}

/// Gives so many keys a row.
pub(crate) fn fill(database: &Database, keys: u32) {
    execute(
        database,
        &format!(
            "INSERT INTO resource_control.rate_limit (name, key, since, spent_at, full_at, unit_us, burst)
                SELECT 'wide', n::text, now(), now(), now(), 1, 1000000 FROM generate_series(0, {keys} - 1) AS n;
             ANALYZE resource_control.rate_limit"
        ),
    );
}

/// Threads that are allowed, for 10,000 keys that are so far apart.
pub(crate) fn allowed(database: &Database, number: usize, apart: u32) -> Boxed {
    let pool = pool(database, number);
    threads(number, |_| {
        let pool = pool.clone();
        move || {
            let limit = WIDE.key(fastrand::u32(0..KEYS) * apart);
            assert!(limit.check(&pool).expect("it can be checked").is_allowed());
        }
    })
}

/// Threads that are limited.
pub(crate) fn limited(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    let _ = USED_UP.check(&pool).expect("it can be checked");
    threads(number, |_| {
        let pool = pool.clone();
        move || {
            assert!(
                USED_UP
                    .check(&pool)
                    .expect("it can be checked")
                    .is_limited()
            )
        }
    })
}
