//! Keys of a throttle beside what other sessions do with them.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::{DenialReason, Error, Throttle};
use workbench::Database;

use crate::support::{Observer, eventually, number};
use crate::throttles::{Resource, age, database};

const REBUILD: Throttle<Resource> = Throttle::of(Resource::Rebuild);

/// Turns a wait for another session's lock into an error.
const IMPATIENT: &str = "SET lock_timeout = '2s'";

/// Makes whoever is about to lock a key, on a session that has this set, wait for the gate.
const PAUSE: &str = "SET it.pause = 'on'; SET lock_timeout = '20s'";

fn is_granted(conn: &mut PgConnection, key: i32) -> bool {
    let decision = REBUILD.key(key).attempt(conn, "me").unwrap();
    decision.granted().is_some()
}

fn prune(conn: &mut PgConnection, batch: i32) -> i64 {
    let call = format!("resource_control.prune_throttled_keys({batch})");
    number(conn, &call)
}

/// Gives key 1 out while the call, on a session of its own, has read that it is due and stands before its lock; answers
/// what the call then did.
fn overtaken<T: Send>(database: &Database, call: impl FnOnce(&mut PgConnection) -> T + Send) -> T {
    let (conn, gate) = (&mut database.connect(), &mut database.connect());
    gate.batch_execute(
        "CREATE OR REPLACE FUNCTION resource_control.throttled_key_lock(\
             resource resource_control.throttled_resource_enum, key text) RETURNS bigint \
         LANGUAGE plpgsql AS $$ BEGIN \
             IF current_setting('it.pause', true) = 'on' THEN PERFORM pg_advisory_lock_shared(1); END IF; \
             RETURN hashtextextended(key, hashtextextended(resource::text, 20000101000003)); \
         END $$; \
         SELECT pg_advisory_lock(1)",
    )
    .unwrap();
    assert!(is_granted(conn, 1));
    age(conn, "15 seconds");
    let mut observer = Observer::of(database);
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let conn = &mut database.connect();
            conn.batch_execute(PAUSE).unwrap();
            call(conn)
        });
        eventually("the call has read", || observer.all_waiting() == 1);
        assert!(is_granted(conn, 1));
        gate.batch_execute("SELECT pg_advisory_unlock(1)").unwrap();
        call.join().unwrap()
    })
}

#[test]
fn a_first_attempt_keeps_no_other_key_and_no_other_resource_waiting() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    open.batch_execute("BEGIN").unwrap();
    assert!(is_granted(open, 1));
    conn.batch_execute(IMPATIENT).unwrap();
    assert!(!is_granted(conn, 1));
    assert!(is_granted(conn, 2));
    let import = Throttle::of(Resource::Import).key(1);
    assert!(import.attempt(conn, "me").unwrap().granted().is_some());
}

/// Nobody is named who had it before, since whoever takes it may have it in a moment.
#[test]
fn while_a_key_is_taken_again_its_last_holder_is_not_told() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    assert!(is_granted(conn, 1));
    age(conn, "15 seconds");
    open.batch_execute("BEGIN").unwrap();
    assert!(is_granted(open, 1));
    let denial = REBUILD.key(1).attempt(conn, "me").unwrap().denied();
    let denial = denial.unwrap();
    assert_eq!(denial.reason, DenialReason::BeingTaken);
    assert_eq!((denial.holder, denial.held_since), (None, None));
}

/// As a client in another language may have it.
#[test]
fn a_row_that_somebody_has_locked_is_being_taken_and_is_not_pruned() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    for key in 0..3 {
        assert!(is_granted(conn, key));
    }
    age(conn, "15 seconds");
    open.batch_execute(
        "BEGIN; SELECT FROM resource_control.throttled_key WHERE key = '1' FOR UPDATE",
    )
    .unwrap();
    conn.batch_execute(IMPATIENT).unwrap();
    let denial = REBUILD.key(1).attempt(conn, "me").unwrap().denied();
    let denial = denial.unwrap();
    assert_eq!(denial.reason, DenialReason::BeingTaken);
    assert_eq!(denial.retry_after, Duration::from_secs(15));
    assert_eq!(prune(conn, 100), 2);
    open.batch_execute("COMMIT").unwrap();
    assert!(is_granted(conn, 1));
}

/// `FOR UPDATE` would be denied here: the insert's foreign key holds a lock on the key's row.
#[test]
fn an_open_insert_that_references_a_key_does_not_deny_it() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    assert!(is_granted(conn, 1));
    age(conn, "15 seconds");
    conn.batch_execute(
        "CREATE TABLE runs (resource resource_control.throttled_resource_enum, key text, \
         FOREIGN KEY (resource, key) REFERENCES resource_control.throttled_key)",
    )
    .unwrap();
    open.batch_execute("BEGIN; INSERT INTO runs VALUES ('cache rebuild', '1')")
        .unwrap();
    assert!(is_granted(conn, 1));
}

/// What was due when it was read may have been taken before it could be locked.
#[test]
fn an_attempt_that_comes_second_to_the_lock_of_a_key_is_denied() {
    let second = |conn: &mut PgConnection| REBUILD.key(1).attempt(conn, "second").unwrap().denied();
    let denial = overtaken(&database(), second).expect("it was granted twice");
    assert_eq!(denial.reason, DenialReason::TooSoon);
    assert_eq!(denial.holder.as_deref(), Some("me"));
}

#[test]
fn a_key_that_is_taken_while_it_is_about_to_be_pruned_stays() {
    let database = database();
    assert_eq!(overtaken(&database, |conn| prune(conn, 100)), 0);
    assert!(!is_granted(&mut database.connect(), 1));
}

/// Not a duplicate, which would be no reason to repeat it.
#[test]
fn a_first_attempt_that_the_snapshot_does_not_show_is_a_serialization_failure() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    let failed = conn.build_transaction().repeatable_read().run(|conn| {
        diesel::sql_query("SELECT 1").execute(conn)?;
        assert!(is_granted(other, 1));
        REBUILD.key(1).attempt(conn, "me").map(drop)
    });
    assert!(matches!(failed, Err(Error::StrictIsolation)), "{failed:?}");
}

#[test]
fn pruning_takes_what_has_passed_and_never_gives_a_key_out_twice() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(IMPATIENT).unwrap();
    for key in 0..10 {
        assert!(is_granted(conn, key));
    }
    assert_eq!(prune(conn, 100), 0);
    age(conn, "15 seconds");
    assert!(is_granted(conn, 0));

    // One is about to be taken: locked, and its row not yet touched.
    let about = &mut database.connect();
    about
        .batch_execute(
            "BEGIN; SELECT pg_advisory_xact_lock(resource_control.throttled_key_lock('cache rebuild', '2'))",
        )
        .unwrap();

    // One is being taken, in a transaction that goes on.
    let open = &mut database.connect();
    open.batch_execute("BEGIN").unwrap();
    assert!(is_granted(open, 1));
    assert_eq!(prune(conn, 3), 3);
    assert_eq!(prune(conn, 100), 4);
    about.batch_execute("COMMIT").unwrap();
    assert_eq!(prune(conn, 100), 1);
    open.batch_execute("COMMIT").unwrap();
    assert!(!is_granted(conn, 1));

    // Keys whose resource is gone are of no use to anybody.
    conn.batch_execute("DELETE FROM resource_control.throttled_resource")
        .unwrap();
    assert_eq!(prune(conn, 100), 2);
}

#[test]
fn a_grant_leaves_the_same_key_of_another_resource_alone() {
    let database = database();
    let conn = &mut database.connect();
    let import = Throttle::of(Resource::Import).key(1);
    assert!(import.attempt(conn, "other").unwrap().granted().is_some());
    assert!(is_granted(conn, 1));
    age(conn, "15 seconds");
    assert!(is_granted(conn, 1));
    let others =
        "SELECT count(*) FROM resource_control.throttled_key WHERE last_locker_details = 'other'";
    assert_eq!(number(conn, others), 1);
}

#[test]
fn the_table_keeps_no_key_twice_nor_without_a_text_or_a_holder() {
    let database = database();
    let conn = &mut database.connect();
    for (key, details, is_kept) in [
        ("k", "me", true),
        ("k", "me", false),
        ("", "me", false),
        ("l", "  ", false),
    ] {
        let kept = conn.batch_execute(&format!(
            "INSERT INTO resource_control.throttled_key VALUES ('cache rebuild', '{key}', now(), '{details}')"
        ));
        assert_eq!(kept.is_ok(), is_kept, "{key:?} {details:?}");
    }
}
