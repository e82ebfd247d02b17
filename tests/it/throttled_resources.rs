//! A throttled resource beside what other sessions do with it, and what a grant costs.

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::sql_types::Timestamptz;

use crate::half::prelude::*;
use crate::half::{Database, Decision, Denial, DenialReason, Error, Throttle};
use crate::support::{Observer, assert_matches, attempt, eventually, is_granted, number, truth};
use crate::throttles::{Resource, age, database};

const REBUILD: Throttle<Resource> = Throttle::of(Resource::Rebuild);

/// Other sessions can read the resources, and wait when they take one.
const CLOSE_THE_GATE: &str =
    "BEGIN; LOCK TABLE resource_control.throttled_resource IN EXCLUSIVE MODE";

/// An attempt on a session of its own.
fn attempt_as_waiter(conn: &mut PgConnection) -> Decision {
    conn.batch_execute("SET lock_timeout = '20s'").unwrap();
    attempt(conn, &REBUILD, "waiter")
}

/// Attempts the resource on a session that has read it while it was due, after another session has taken it. Returns that
/// session, which `prepare` has been given first, and its denial.
fn attempt_second(
    database: &Database,
    prepare: impl FnOnce(&mut PgConnection) + Send,
) -> (PgConnection, Denial) {
    let conn = &mut database.connect();
    let mut observer = Observer::of(database);
    conn.batch_execute(CLOSE_THE_GATE).unwrap();
    std::thread::scope(|scope| {
        let second = scope.spawn(|| {
            let mut conn = database.connect();
            prepare(&mut conn);
            let denial = attempt_as_waiter(&mut conn).denied();
            (conn, denial.expect("it was granted twice"))
        });
        eventually("the second has read", || observer.waiters_for_tables() == 1);
        let first = attempt(conn, &REBUILD, "first");
        assert!(first.granted().is_some());
        conn.batch_execute("COMMIT").unwrap();
        second.join().unwrap()
    })
}

/// A resource that was due when it was read may be taken before it can be locked.
#[test]
fn an_attempt_that_comes_second_to_the_row_is_denied() {
    let (_, denial) = attempt_second(&database(), |_| {});
    assert_eq!(denial.reason, DenialReason::TooSoon);
    assert_eq!(denial.holder.as_deref(), Some("first"));
}

/// Otherwise others would be denied until its transaction ends, however often the resource is due meanwhile.
#[test]
fn a_denied_attempt_keeps_no_lock_in_its_transaction() {
    let database = database();
    let (mut second, _) = attempt_second(&database, |conn| {
        conn.batch_execute("BEGIN").unwrap();
    });
    assert!(truth(
        &mut second,
        "pg_current_xact_id_if_assigned() IS NULL"
    ));
    let conn = &mut database.connect();
    age(conn, "15 seconds");
    let third = attempt(conn, &REBUILD, "third");
    assert!(third.granted().is_some());
}

/// A rule or a trigger of somebody else may keep the row as it was: then all would be granted. PostgreSQL itself refuses
/// to return a row where a rule replaces the update.
#[test]
fn nothing_is_granted_that_was_not_written() {
    let database = database();
    let conn = &mut database.connect();
    let key = REBUILD.key(1);
    assert!(is_granted(conn, &key, "me"));
    age(conn, "15 seconds");
    for table in ["throttled_resource", "throttled_key"] {
        conn.batch_execute(&format!(
            "CREATE RULE keep AS ON UPDATE TO resource_control.{table} DO INSTEAD NOTHING"
        ))
        .unwrap();
    }
    for throttle in [&REBUILD, &key] {
        let refused = throttle.details("me").attempt_on(conn);
        assert_matches!(refused, Err(Error::Database(_)));
    }
    for table in ["throttled_resource", "throttled_key"] {
        conn.batch_execute(&format!(
            "DROP RULE keep ON resource_control.{table};
            CREATE FUNCTION keep_{table}() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
            CREATE TRIGGER skip BEFORE UPDATE ON resource_control.{table}
                FOR EACH ROW EXECUTE FUNCTION keep_{table}()"
        ))
        .unwrap();
    }
    for throttle in [REBUILD, key] {
        let denial = attempt(conn, &throttle, "me").denied().unwrap();
        assert_eq!(denial.reason, DenialReason::BeingTaken);
    }
}

/// `CREATE INDEX` locks a table like that: rows of it can be locked meanwhile, but not written.
#[test]
fn a_grant_whose_write_waited_for_the_table_begins_after_the_wait() {
    let database = database();
    let conn = &mut database.connect();
    let mut observer = Observer::of(&database);
    let known = REBUILD.key("known");
    assert!(is_granted(conn, &known, "me"));
    age(conn, "15 seconds");
    for throttle in [REBUILD, known, REBUILD.key("new")] {
        conn.batch_execute(
            "BEGIN;
            LOCK TABLE resource_control.throttled_resource, resource_control.throttled_key IN SHARE MODE",
        )
        .unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                throttle
                    .details("waiter")
                    .attempt_on(&mut database.connect())
            });
            eventually("the attempt waits", || observer.waiters_for_tables() == 1);
            let now: chrono::DateTime<chrono::Utc> =
                diesel::select(sql::<Timestamptz>("clock_timestamp()"))
                    .get_result(conn)
                    .unwrap();
            conn.batch_execute("COMMIT").unwrap();
            let granted = waiter.join().unwrap().unwrap().granted().unwrap();
            assert!(granted.granted_at >= now);
        });
    }
}

#[test]
fn a_grant_that_waited_for_the_table_begins_after_the_wait() {
    let database = database();
    let conn = &mut database.connect();
    let mut observer = Observer::of(&database);
    conn.batch_execute(CLOSE_THE_GATE).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| attempt_as_waiter(&mut database.connect()));
        eventually("the attempt waits", || observer.waiters_for_tables() == 1);
        let now: chrono::DateTime<chrono::Utc> =
            diesel::select(sql::<Timestamptz>("clock_timestamp()"))
                .get_result(conn)
                .unwrap();
        conn.batch_execute("COMMIT").unwrap();
        assert!(waiter.join().unwrap().granted().unwrap().granted_at >= now);
    });
}

/// The hint is the time after which the session that takes it could itself have been denied.
#[test]
fn a_resource_that_is_being_taken_comes_with_a_hint_when_to_retry() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    open.batch_execute("BEGIN").unwrap();
    for throttle in [REBUILD, REBUILD.key(1)] {
        let taken = attempt(open, &throttle, "taker");
        assert!(taken.granted().is_some());
    }
    for call in [
        "attempt_throttled_resource('cache rebuild', 'me')",
        "attempt_throttled_key('cache rebuild', '1', 'me')",
    ] {
        let is_hinted = format!(
            "SELECT being_taken AND retry_after = '15 s' AND next_at = decided_at + retry_after \
             FROM resource_control.{call}"
        );
        assert!(truth(conn, &is_hinted), "{call}");
    }
}

/// The next version of each row has room in its page, however full the table is.
#[test]
fn a_grant_does_not_write_to_the_index() {
    let database = database();
    let conn = &mut database.connect();
    let names: Vec<_> = (0..16).map(|number| format!("number {number}")).collect();
    for name in &names {
        let add = "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE";
        conn.batch_execute(&format!("{add} '{name}'")).unwrap();
    }
    // Rows so large that few fill a page.
    conn.batch_execute(
        "INSERT INTO resource_control.throttled_resource \
         SELECT label, '1 s', '2026-01-01', repeat('x', 1900) \
         FROM unnest(enum_range(NULL::resource_control.throttled_resource_enum)) AS label \
         WHERE label::text LIKE 'number %'",
    )
    .unwrap();
    conn.batch_execute("BEGIN").unwrap();
    for name in &names {
        let call = format!("resource_control.lock_throttled_resource('{name}', repeat('y', 1900))");
        assert!(truth(conn, &call));
    }
    let [updated, beside] = ["updated", "hot_updated"].map(|what| {
        let table = "'resource_control.throttled_resource'::regclass";
        number(conn, &format!("pg_stat_get_xact_tuples_{what}({table})"))
    });
    assert_eq!((updated, beside), (16, 16));
}

/// The operator stands in the way of every comparison of resources.
#[test]
fn no_search_path_changes_a_decision() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE SCHEMA impostor; \
         CREATE FUNCTION impostor.never(\
             resource_control.throttled_resource_enum, resource_control.throttled_resource_enum) \
             RETURNS boolean LANGUAGE sql AS 'SELECT false'; \
         CREATE OPERATOR impostor.= (FUNCTION = impostor.never, \
             LEFTARG = resource_control.throttled_resource_enum, \
             RIGHTARG = resource_control.throttled_resource_enum)",
    )
    .unwrap();
    for settings in ["impostor, pg_catalog", "''"] {
        age(conn, "15 seconds");
        let conn = &mut database.connect();
        conn.batch_execute(&format!("SET search_path = {settings}"))
            .unwrap();
        let call = "resource_control.lock_throttled_resource('cache rebuild', 'me')";
        assert!(truth(conn, call), "{settings}");
        assert!(!truth(conn, call), "{settings}");
        let key = REBUILD.key(1);
        assert!(is_granted(conn, &key, "me"));
        assert!(!is_granted(conn, &key, "me"));
        assert!(!is_granted(conn, &REBUILD, "me"));
    }
}
