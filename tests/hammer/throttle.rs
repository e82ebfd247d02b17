//! Throttles, with sixteen connections that attempt the same at every isolation level, half of them
//! in Python.
//!
//! No client's clock is wrong here, since none could matter: what a client sends is the resource, the
//! key and the details, and no time. What it might have wrong is its session's time zone, which is
//! one where the clocks change, and the age of its transaction.

use std::thread;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_interlock::{migrations, sync, throttled_resources};
use workbench::Database;

use crate::account;
use crate::clients::{Clients, Code, Program};
use crate::report::Report;
use crate::spacing;

throttled_resources! {
    pub(crate) enum Resource {
        Hammered = "hammered" every Duration::from_millis(100),
        HammeredByKey = "hammered by key" every Duration::from_secs(2),
    }
}

const KEYS: usize = 1000;

/// One resource, and a transaction that holds on to its key all the time.
pub(crate) fn hammer(duration: Duration) -> Report {
    let mut report = Report::of("throttle");
    let database = database();
    let conn = &mut database.connect();
    let open = &mut database.connect();
    open.batch_execute("BEGIN; INSERT INTO hammer.report VALUES ('hammered')")
        .unwrap();
    let until = attempt(&mut report, &database, duration, 0);
    open.batch_execute("COMMIT").unwrap();
    let wait = duration / report.operations.max(1) as u32;
    let granted = spacing::check(&mut report, conn, Resource::Hammered, wait, until);
    report.check(granted == 1, || "it was never granted".to_owned());
    report
}

/// A thousand keys of one resource, each with its first attempt.
pub(crate) fn hammer_keys(duration: Duration) -> Report {
    let mut report = Report::of("keys");
    let database = database();
    let until = attempt(&mut report, &database, duration, KEYS);
    let conn = &mut database.connect();
    // At least half of the attempts come at random.
    let wait = duration * KEYS as u32 * 2 / report.operations.max(1) as u32;
    let granted = spacing::check(&mut report, conn, Resource::HammeredByKey, wait, until);
    report.check(granted == KEYS, || {
        format!("only {granted} keys were granted")
    });
    let again = grant_all_again(conn);
    report.check(again == KEYS as i64, || {
        format!("only {again} keys were granted when all were due")
    });
    report
}

/// Attempts each key once when all are due; answers how many are granted.
fn grant_all_again(conn: &mut PgConnection) -> i64 {
    conn.batch_execute(
        "SELECT pg_sleep_until(max(last_locked) + interval '2 s') FROM resource_control.throttled_key",
    )
    .unwrap();
    let granted = "(SELECT count(*) FILTER (WHERE granted) FROM resource_control.throttled_key, \
         resource_control.attempt_throttled_key(resource_id, key, 'again'))";
    diesel::select(sql::<BigInt>(granted))
        .get_result(conn)
        .unwrap()
}

fn database() -> Database {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    conn.batch_execute(include_str!("grants.sql")).unwrap();
    database
}

/// Attempts as fast as sixteen connections can. Answers until when, by the database's clock.
fn attempt(
    report: &mut Report,
    database: &Database,
    duration: Duration,
    keys: usize,
) -> DateTime<Utc> {
    let (url, keys) = (database.url(), keys.to_string());
    let levels = [
        "read committed",
        "repeatable read",
        "serializable",
        "read committed",
    ];
    let programs = levels.into_iter().flat_map(|isolation| {
        [Code::Rust("attempt"), Code::Python("attempts.py")]
            .map(|code| Program::new("attempts", code, isolation).arguments(&[&url, "2", &keys]))
    });
    let mut clients = Clients::start(programs);
    clients.begin();
    thread::sleep(duration);
    let until = account::clock(&mut database.connect());
    let (said, violations) = clients.end();
    report.violated(violations);
    report.violated(said.nonsense.iter().map(|line| format!("it said {line}")));
    report.operations = said.operations();
    report.claims = said.grants;
    report.refusals = said.attempts - said.grants;
    until
}
