//! Copies of the database on another server, as a move, an upgrade or a restored backup makes them. The first copy has the
//! definition alone. The second has rows whose ids its sequence does not know, as logical replication leaves them.

use std::error::Error as _;

use diesel::connection::SimpleConnection;
use diesel_interlock::{
    Admission, Check, Decision, DeclaredResources, Error, Throttle, migrations,
};
use workbench::Database;

use super::Injector;
use crate::fault::COPIES;
use crate::subjects::{CALLS, Resource, SEMAPHORES};

/// Ended requests, as the table of the other server has them.
const REPLICATED: &str = "INSERT INTO resource_control.service_request \
    (id, service, slot, created_at, expires_at, completed_at) OVERRIDING SYSTEM VALUE \
    SELECT id, 'long', 0, now(), now() + interval '1 min', now() FROM generate_series(1, 1000) AS id \
    ON CONFLICT DO NOTHING";

const SET_SEQUENCE: &str = "SELECT setval(pg_get_serial_sequence('resource_control.service_request', 'id'), max(id)) \
    FROM resource_control.service_request";

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&COPIES, |injector, kind| {
        let Some(definition) = injector.primary.definition() else {
            injector.pause(10, 50);
            return;
        };
        if let Some(problem) = problem_of_a_copy(&definition) {
            injector.log.violation(format!("copy: {problem}"));
        }
        injector.log.fault(kind, []);
        injector.pause(500, 2500);
    });
}

/// The operations that fail on a copy.
fn problem_of_a_copy(definition: &str) -> Option<String> {
    let database = Database::new();
    // The commands of psql are left out.
    let lines = definition.lines().filter(|line| !line.starts_with('\\'));
    let statements: Vec<_> = lines.collect();
    database
        .connect()
        .batch_execute(&statements.join("\n"))
        .expect("what pg_dump wrote can be run");

    let conn = &mut database.connect();
    if let Err(error) = migrations::install(conn) {
        return Some(format!("install fails: {}", in_full(&error)));
    }
    if let Err(error) = diesel_interlock::sync::<Resource>(conn) {
        return Some(format!("sync fails: {}", in_full(&error)));
    }
    for resource in Resource::ALL {
        match Throttle::of(*resource).details("a copy").attempt_on(conn) {
            Ok(Decision::Granted(_)) => {}
            other => {
                return Some(format!(
                    "{resource:?} was never taken, and returns {other:?}"
                ));
            }
        }
    }
    match CALLS.cost(CALLS.quota().burst).check_on(conn) {
        Ok(Check::Allowed(_)) => {}
        other => return Some(format!("a rate limit is full, and returns {other:?}")),
    }
    for semaphore in &SEMAPHORES {
        match semaphore.claim_on(conn).map(Admission::admitted) {
            Ok(Some(_)) => {}
            other => {
                return Some(format!(
                    "{:?} is free, and returns {other:?}",
                    semaphore.service()
                ));
            }
        }
    }

    conn.batch_execute(REPLICATED).expect("rows are copied");
    conn.batch_execute("DELETE FROM resource_control.service_request WHERE completed_at IS NULL")
        .expect("rows are deleted");
    let [_, semaphore, _] = &SEMAPHORES;
    // An error that names the sequence is right. The result that the semaphore is full would be wrong.
    if let Ok(None) = semaphore.claim_on(conn).map(Admission::admitted) {
        return Some(
            "the sequence is behind, nothing is in flight, and a claim finds it full".into(),
        );
    }
    conn.batch_execute(SET_SEQUENCE)
        .expect("the sequence can be set");
    match semaphore.claim_on(conn).map(Admission::admitted) {
        Ok(Some(_)) => None,
        other => Some(format!(
            "nothing is in flight, the sequence is set, and a claim returns {other:?}"
        )),
    }
}

fn in_full(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
