//! Throttles that sixteen connections attempt at every isolation level, half of them in Python.
//!
//! No client has a wrong clock, because a client's clock cannot matter: a client sends the resource, the key and the
//! details, and no time. The time zone of a session and the age of its transaction could matter. The sessions here have a
//! time zone with daylight saving time, and some transactions are old.

use std::thread;
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_interlock::{migrations, sync, throttled_resources};
use workbench::Database;

use super::attempts;
use super::changes;
use super::clients::{Clients, Language, Program};
use super::report::Report;
use super::spacing;
use crate::role::Role;

throttled_resources! {
    pub(super) enum Resource {
        Contended = "contended" every Duration::from_millis(100),
        ContendedByKey = "contended by key" every Duration::from_secs(2),
    }
}

const KEYS: usize = 1000;

/// Attempts one resource, while a transaction holds a lock on its key all the time.
pub(super) fn run(duration: Duration) -> Report {
    let mut report = Report::of("throttle");
    let database = database();
    let conn = &mut database.connect();
    let open = &mut database.connect();
    open.batch_execute("BEGIN; INSERT INTO contention.report VALUES ('contended')")
        .unwrap();
    let until = attempt(&mut report, &database, duration, 0);
    open.batch_execute("COMMIT").unwrap();
    let wait = duration / report.operations.max(1) as u32;
    let granted = spacing::check(&mut report, conn, Resource::Contended, wait, until);
    report.check(granted == 1, || "the resource was never granted".to_owned());
    report
}

/// Attempts a thousand keys of one resource, each from its first attempt on.
pub(super) fn run_keys(duration: Duration) -> Report {
    let mut report = Report::of("keys");
    let database = database();
    let until = attempt(&mut report, &database, duration, KEYS);
    let conn = &mut database.connect();
    // At least half of the attempts choose their key at random.
    let wait = duration * KEYS as u32 * 2 / report.operations.max(1) as u32;
    let granted = spacing::check(&mut report, conn, Resource::ContendedByKey, wait, until);
    report.check(granted == KEYS, || {
        format!("only {granted} keys were granted")
    });
    let again = grant_all_again(conn);
    report.check(again == KEYS as i64, || {
        format!("only {again} keys were granted when all were due")
    });
    report
}

/// Attempts each key once when all are due. Returns how many attempts are granted.
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

/// Attempts as fast as sixteen connections can. Returns the end of that time by the database clock.
fn attempt(
    report: &mut Report,
    database: &Database,
    duration: Duration,
    keys: usize,
) -> DateTime<Utc> {
    let role = Role::Attempts(attempts::Settings {
        url: database.url(),
        connections: 2,
        keys,
    });
    let levels = [
        "read committed",
        "repeatable read",
        "serializable",
        "read committed",
    ];
    let programs = levels.into_iter().flat_map(|isolation| {
        [Language::Rust, Language::Python("attempts.py")]
            .map(|language| Program::new("attempts", language, isolation, role.clone()))
    });
    let mut clients = Clients::start(programs);
    clients.begin();
    thread::sleep(duration);
    let until = changes::clock(&mut database.connect());
    let (messages, violations) = clients.end();
    report.violated(violations);
    report.violated(
        messages
            .unknown
            .iter()
            .map(|line| format!("a client wrote an unknown message: {line}")),
    );
    report.operations = messages.operations();
    report.claims = messages.grants;
    report.refusals = messages.attempts - messages.grants;
    until
}
