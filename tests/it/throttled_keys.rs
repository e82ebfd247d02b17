//! Keys of a throttle beside what other sessions do with them.

use std::time::Duration;

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{Database, DenialReason, Error, Throttle};
use crate::support::{Observer, assert_matches, attempt, eventually, is_granted, number, truth};
use crate::throttles::{Resource, age, database};

const REBUILD: Throttle<Resource> = Throttle::of(Resource::Rebuild);

/// Turns a wait for another session's lock into an error.
const IMPATIENT: &str = "SET lock_timeout = '2s'";

/// Lets others read the keys, and makes sessions that take, insert or delete one wait.
const CLOSE_THE_GATE: &str = "BEGIN; LOCK TABLE resource_control.throttled_key IN EXCLUSIVE MODE";

fn is_key_granted(conn: &mut PgConnection, key: i32) -> bool {
    is_granted(conn, &REBUILD.key(key), "me")
}

fn prune(conn: &mut PgConnection, batch: i32) -> i64 {
    let call = format!("resource_control.prune_throttled_keys({batch})");
    number(conn, &call)
}

/// Makes the call on a session of its own, which reads that key 1 is due and waits; then does `first` and
/// commits it; returns what the call then returned.
fn overtaken<T: Send>(
    database: &Database,
    first: impl FnOnce(&mut PgConnection),
    call: impl FnOnce(&mut PgConnection) -> T + Send,
) -> T {
    let conn = &mut database.connect();
    assert!(is_key_granted(conn, 1));
    age(conn, "15 seconds");
    let mut observer = Observer::of(database);
    conn.batch_execute(CLOSE_THE_GATE).unwrap();
    std::thread::scope(|scope| {
        let call = scope.spawn(|| {
            let conn = &mut database.connect();
            conn.batch_execute("SET lock_timeout = '20s'").unwrap();
            call(conn)
        });
        eventually("the call has read", || observer.waiters_for_tables() == 1);
        first(conn);
        conn.batch_execute("COMMIT").unwrap();
        call.join().unwrap()
    })
}

#[test]
fn a_first_attempt_keeps_no_other_key_and_no_other_resource_waiting() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    open.batch_execute("BEGIN").unwrap();
    assert!(is_key_granted(open, 1));
    conn.batch_execute(IMPATIENT).unwrap();
    assert!(!is_key_granted(conn, 1));
    assert!(is_key_granted(conn, 2));
    let import = Throttle::of(Resource::Import).key(1);
    assert!(is_granted(conn, &import, "me"));
}

/// The earlier holder is not named, because the session that takes the key may have it in a moment.
#[test]
fn while_a_key_is_taken_again_its_last_holder_is_not_told() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    assert!(is_key_granted(conn, 1));
    age(conn, "15 seconds");
    open.batch_execute("BEGIN").unwrap();
    assert!(is_key_granted(open, 1));
    let denial = attempt(conn, &REBUILD.key(1), "me").denied();
    let denial = denial.unwrap();
    assert_eq!(denial.reason, DenialReason::BeingTaken);
    assert_eq!((denial.holder, denial.held_since), (None, None));
}

/// As a client in another language may have it.
#[test]
fn a_row_that_another_session_has_locked_is_being_taken_and_is_not_pruned() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    for key in 0..3 {
        assert!(is_key_granted(conn, key));
    }
    age(conn, "15 seconds");
    open.batch_execute(
        "BEGIN; SELECT FROM resource_control.throttled_key WHERE key = '1' FOR UPDATE",
    )
    .unwrap();
    conn.batch_execute(IMPATIENT).unwrap();
    let denial = attempt(conn, &REBUILD.key(1), "me").denied();
    let denial = denial.unwrap();
    assert_eq!(denial.reason, DenialReason::BeingTaken);
    assert_eq!(denial.retry_after, Duration::from_secs(15));
    assert_eq!(prune(conn, 100), 2);
    open.batch_execute("COMMIT").unwrap();
    assert!(is_key_granted(conn, 1));
}

/// `FOR UPDATE` would be denied here: the insert's foreign key holds a lock on the key's row.
#[test]
fn an_open_insert_that_references_a_key_does_not_deny_it() {
    let database = database();
    let (open, conn) = (&mut database.connect(), &mut database.connect());
    assert!(is_key_granted(conn, 1));
    age(conn, "15 seconds");
    conn.batch_execute(
        "CREATE TABLE runs (resource resource_control.throttled_resource_enum, key text, \
         FOREIGN KEY (resource, key) REFERENCES resource_control.throttled_key)",
    )
    .unwrap();
    open.batch_execute("BEGIN; INSERT INTO runs VALUES ('cache rebuild', '1')")
        .unwrap();
    assert!(is_key_granted(conn, 1));
}

/// What was due when it was read may have been taken before it could be locked.
#[test]
fn an_attempt_that_comes_second_to_the_lock_of_a_key_is_denied() {
    let second = |conn: &mut PgConnection| attempt(conn, &REBUILD.key(1), "second").denied();
    let take = |conn: &mut PgConnection| assert!(is_key_granted(conn, 1));
    let denial = overtaken(&database(), take, second).expect("it was granted twice");
    assert_eq!(denial.reason, DenialReason::TooSoon);
    assert_eq!(denial.holder.as_deref(), Some("me"));
}

#[test]
fn a_key_that_is_taken_while_it_is_about_to_be_pruned_stays() {
    let database = database();
    let take = |conn: &mut PgConnection| assert!(is_key_granted(conn, 1));
    assert_eq!(overtaken(&database, take, |conn| prune(conn, 100)), 0);
    assert!(!is_key_granted(&mut database.connect(), 1));
}

#[test]
fn a_key_that_is_pruned_while_it_is_about_to_be_taken_is_granted() {
    let database = database();
    let pruned = |conn: &mut PgConnection| assert_eq!(prune(conn, 100), 1);
    assert!(overtaken(&database, pruned, |conn| is_key_granted(conn, 1)));
    assert!(!is_key_granted(&mut database.connect(), 1));
}

#[test]
fn a_denied_attempt_at_a_key_keeps_no_lock_in_its_transaction() {
    let database = database();
    let take = |conn: &mut PgConnection| assert!(is_key_granted(conn, 1));
    let mut loser = overtaken(&database, take, |_| {
        let mut conn = database.connect();
        conn.batch_execute("SET lock_timeout = '20s'; BEGIN")
            .unwrap();
        assert!(!is_key_granted(&mut conn, 1));
        conn
    });
    assert!(truth(
        &mut loser,
        "pg_current_xact_id_if_assigned() IS NULL"
    ));
    assert_eq!(Observer::of(&database).all_held(), 0);
    let conn = &mut database.connect();
    age(conn, "15 seconds");
    assert!(is_key_granted(conn, 1));
}

/// With a million keys the read takes a second.
#[test]
fn pruning_denies_no_key_while_it_reads() {
    let database = database();
    let (gate, conn) = (&mut database.connect(), &mut database.connect());
    let import = Throttle::of(Resource::Import);
    for key in 0..100 {
        assert!(is_key_granted(conn, key));
        assert!(is_granted(conn, &import.key(key), "me"));
    }
    age(conn, "15 seconds");
    // Pruning waits before it reads the second resource's keys.
    gate.batch_execute(
        "CREATE OR REPLACE FUNCTION resource_control.elapsed(span interval) RETURNS interval \
         LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN \
             IF span = '100 ms' AND current_setting('it.pause', true) = 'on' THEN \
                 PERFORM pg_catalog.pg_advisory_lock_shared(1); \
             END IF; \
             RETURN span; \
         END $$; \
         SELECT pg_advisory_lock(1)",
    )
    .unwrap();
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let pruning = scope.spawn(|| {
            let conn = &mut database.connect();
            conn.batch_execute("SET it.pause = 'on'; SET lock_timeout = '20s'")
                .unwrap();
            prune(conn, 1000)
        });
        eventually("it waits", || observer.all_waiting() == 1);
        let granted = (0..100).filter(|key| is_key_granted(conn, *key)).count();
        gate.batch_execute("SELECT pg_advisory_unlock(1)").unwrap();
        assert_eq!((granted, pruning.join().unwrap()), (100, 100));
    });
}

#[test]
fn pruning_holds_no_advisory_lock() {
    let database = database();
    let conn = &mut database.connect();
    for key in 0..10 {
        assert!(is_key_granted(conn, key));
    }
    age(conn, "15 seconds");
    conn.batch_execute("BEGIN").unwrap();
    assert_eq!(prune(conn, 100), 10);
    assert_eq!(Observer::of(&database).all_held(), 0);
}

/// However many others are read before it.
#[test]
fn pruning_finds_one_key_among_many_that_are_not_due() {
    let database = database();
    let conn = &mut database.connect();
    for key in 0..10 {
        assert!(is_key_granted(conn, key));
    }
    conn.batch_execute(
        "UPDATE resource_control.throttled_key SET last_locked = '-infinity' WHERE key = '9'",
    )
    .unwrap();
    assert_eq!((prune(conn, 1), prune(conn, 1)), (1, 0));
    assert!(is_key_granted(conn, 9));
}

#[test]
fn pruning_no_keys_is_fine() {
    let database = database();
    let conn = &mut database.connect();
    assert_eq!(prune(conn, 100), 0);
    assert!(is_key_granted(conn, 1));
    age(conn, "15 seconds");
    for batch in [0, -1, i32::MIN] {
        assert_eq!(prune(conn, batch), 0);
    }
    assert_eq!(prune(conn, i32::MAX), 1);
}

/// Not a duplicate, which would be no reason to repeat it.
#[test]
fn a_first_attempt_that_the_snapshot_does_not_show_is_a_serialization_failure() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    let failed = conn.build_transaction().repeatable_read().run(|conn| {
        diesel::sql_query("SELECT 1").execute(conn)?;
        assert!(is_key_granted(other, 1));
        REBUILD.key(1).details("me").attempt_on(conn).map(drop)
    });
    assert_matches!(failed, Err(Error::StrictIsolation));
}

#[test]
fn pruning_takes_what_has_passed_and_never_gives_a_key_out_twice() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(IMPATIENT).unwrap();
    for key in 0..10 {
        assert!(is_key_granted(conn, key));
    }
    assert_eq!(prune(conn, 100), 0);
    age(conn, "15 seconds");
    assert!(is_key_granted(conn, 0));

    // One is about to be taken: its row is locked, and not yet written.
    let about = &mut database.connect();
    about
        .batch_execute(
            "BEGIN; SELECT FROM resource_control.throttled_key WHERE key = '2' FOR NO KEY UPDATE",
        )
        .unwrap();

    // One is being taken, in a transaction that goes on.
    let open = &mut database.connect();
    open.batch_execute("BEGIN").unwrap();
    assert!(is_key_granted(open, 1));
    assert_eq!(prune(conn, 3), 3);
    assert_eq!(prune(conn, 100), 4);
    about.batch_execute("COMMIT").unwrap();
    assert_eq!(prune(conn, 100), 1);
    open.batch_execute("COMMIT").unwrap();
    assert!(!is_key_granted(conn, 1));

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
    assert!(is_granted(conn, &import, "other"));
    assert!(is_key_granted(conn, 1));
    age(conn, "15 seconds");
    assert!(is_key_granted(conn, 1));
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
