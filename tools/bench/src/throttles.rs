//! Attempts at throttles.

use std::time::Duration;

use diesel_interlock::Throttle;
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, threads};
use crate::pgbench::{Mode, pgbench, script_of};
use crate::report::Report;
use crate::server::pool;

const NEEDLE: &str = "UPDATE resource_control.throttle ";
static HOURLY: Throttle = Throttle::named("hourly", Duration::from_secs(3600));
/// Due again before the next attempt.
static AT_ONCE: Throttle = Throttle::named("at once", Duration::from_micros(1));

/// Beside `pgbench -M prepared` of the statement that the crate sends.
pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    let one = pool(&database, 1);
    let _ = HOURLY.attempt(&one).expect("it can be attempted");
    for number in [1, 8] {
        let ours = denied(&database, number);
        let script = script_of(&one, NEEDLE, &["hourly", "pgbench", "", "1 hour"]);
        let pgbench = pgbench(bench, &database, number, Mode::Prepared, "", script);
        let work = "throttle, denied / `pgbench` of the statement";
        report.row(work, number, Some(0.85), ours, pgbench);
    }
    let number = 8;
    let ours = granted(&database, number);
    for thread in 0..number {
        let _ = AT_ONCE.key(1000 + thread).attempt(&one);
    }
    let values = ["at once", "pgbench", ":key", "1 microsecond"];
    let script = script_of(&one, NEEDLE, &values).after("\\set key 1000 + :client_id\n");
    let pgbench = pgbench(bench, &database, number, Mode::Prepared, "", script);
    let work = "throttle, granted for a key / `pgbench` of the statement";
    report.row(work, number, Some(0.85), ours, pgbench);
}

/// Threads that are denied.
pub(crate) fn denied(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    let _ = HOURLY.attempt(&pool).expect("it can be attempted");
    threads(number, |_| {
        let pool = pool.clone();
        move || {
            let decision = HOURLY.attempt(&pool).expect("it can be attempted");
            assert!(!decision.is_granted(), "it was granted before");
        }
    })
}

/// Threads that are granted, each for a key of its own.
pub(crate) fn granted(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    threads(number, |thread| {
        let (pool, throttle) = (pool.clone(), AT_ONCE.key(thread));
        move || {
            let decision = throttle.attempt(&pool).expect("it can be attempted");
            assert!(decision.is_granted(), "it is due");
        }
    })
}
