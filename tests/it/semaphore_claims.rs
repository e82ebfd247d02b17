//! Claims beside transactions that other sessions have open.

mod overdue;

use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::result::DatabaseErrorKind;
use diesel::result::Error::DatabaseError;

use crate::half::prelude::*;
use crate::half::{Admission, Semaphore};
use crate::semaphores::{claim_in_sql, database, expire, fill, log, request};
use crate::support::{Expect, Observer, assert_matches, eventually, number, setting, truth};

const FOUR: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
const ONE: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));

/// Turns a wait for another session's lock into an error.
const IMPATIENT: &str = "SET lock_timeout = '2s'";

/// Keeps a test that fails while another thread waits from hanging.
const PATIENT: &str = "SET lock_timeout = '20s'";

/// The locks that the session holds, except a reader's locks and the lock of its own virtual transaction.
const MORE_THAN_A_READER_HOLDS: &str = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() \
    AND NOT (locktype = 'relation' AND mode = 'AccessShareLock') AND locktype <> 'virtualxid'";

fn assert_refused_by_reading(conn: &mut PgConnection, slots: i32) {
    conn.batch_execute(IMPATIENT).unwrap();
    conn.batch_execute("BEGIN").unwrap();
    assert!(!claim_in_sql(conn, "geocoder", slots));
    assert!(truth(conn, "pg_current_xact_id_if_assigned() IS NULL"));
    assert_eq!(number(conn, MORE_THAN_A_READER_HOLDS), 0);
    conn.batch_execute("COMMIT").unwrap();
}

#[test]
fn a_refusal_only_reads() {
    let database = database();
    let conn = &mut database.connect();
    fill(&FOUR, conn);
    assert_refused_by_reading(conn, 4);
    assert_refused_by_reading(conn, 3);
    assert_refused_by_reading(conn, 1);
}

#[test]
fn a_refusal_among_open_claims_only_reads() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    open.batch_execute("BEGIN").unwrap();
    for _ in 0..4 {
        assert!(claim_in_sql(open, "geocoder", 4));
    }
    assert_refused_by_reading(conn, 4);
}

#[test]
fn a_claim_passes_by_those_that_are_not_committed() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(IMPATIENT).unwrap();
    for _ in 0..8 {
        open.batch_execute("BEGIN").unwrap();
        for _ in 0..3 {
            assert!(claim_in_sql(open, "geocoder", 4));
        }
        let fourth = FOUR.claim_on(conn).unwrap().expect_acquired();
        assert!(FOUR.claim_on(conn).unwrap().is_full());
        open.batch_execute("ROLLBACK").unwrap();
        let others = fill(&FOUR, conn);
        assert_eq!(others.len(), 3);
        for claim in others.into_iter().chain([fourth]) {
            assert!(FOUR.complete_on(conn, claim.id).unwrap());
        }
    }
}

#[test]
fn a_claim_finds_the_only_slot_among_many_claims_that_are_not_committed() {
    const MANY: Semaphore = Semaphore::named("geocoder", 64, Duration::from_secs(30));
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    open.batch_execute("BEGIN").unwrap();
    for _ in 0..63 {
        assert!(claim_in_sql(open, "geocoder", 64));
    }
    for _ in 0..20 {
        let last = MANY.claim_on(conn).unwrap().expect_acquired();
        assert!(MANY.complete_on(conn, last.id).unwrap());
    }
}

/// No other claim can overtake a claim that has its id but has not inserted it yet.
#[test]
fn the_id_of_a_slot_is_drawn_by_one_at_a_time() {
    let database = database();
    let (gate, conn) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(
        "CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             IF NEW.details = 'slow' THEN PERFORM pg_advisory_xact_lock(1); END IF; \
             RETURN NEW; \
         END $$; \
         CREATE TRIGGER pause BEFORE INSERT ON resource_control.service_request \
             FOR EACH ROW EXECUTE FUNCTION pause()",
    )
    .unwrap();
    gate.batch_execute("SELECT pg_advisory_lock(1)").unwrap();
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let slow = scope.spawn(|| {
            let conn = &mut database.connect();
            conn.batch_execute(PATIENT).unwrap();
            ONE.details("slow").claim_on(conn).unwrap()
        });
        eventually("the slow claim has its id and waits", || {
            observer.all_waiting() == 1
        });
        for _ in 0..3 {
            assert!(ONE.claim_on(conn).unwrap().is_full());
        }
        gate.batch_execute("SELECT pg_advisory_unlock(1)").unwrap();
        assert!(slow.join().unwrap().admitted().is_some());
    });
    assert!(ONE.claim_on(conn).unwrap().is_full());
}

/// The error is not a duplicate, because a duplicate would not be retried.
#[test]
fn a_slot_whose_request_the_snapshot_does_not_show_is_a_serialization_failure() {
    // The second time the session assumes an old snapshot, and knows from the newest requests that the slot was free.
    for old_snapshot_until in ["", "99999999999"] {
        let database = database();
        let (conn, other) = (&mut database.connect(), &mut database.connect());
        let claim = ONE.claim_on(other).unwrap().expect_acquired();
        assert!(ONE.complete_on(other, claim.id).unwrap());
        conn.batch_execute(&format!(
            "SET resource_control.old_snapshot_until = '{old_snapshot_until}'; \
             BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1"
        ))
        .unwrap();
        assert!(ONE.claim_on(other).unwrap().admitted().is_some());
        let claim = "SELECT resource_control.claim_service_request('geocoder', 1, '30 s')";
        let failed = diesel::sql_query(claim).execute(conn);
        assert_matches!(
            failed,
            Err(DatabaseError(DatabaseErrorKind::SerializationFailure, _))
        );
    }
}

/// Other sessions claim slots after the call has begun and before it reads the requests.
#[test]
fn a_refusal_never_hints_at_a_wait_longer_than_the_timeout() {
    let database = database();
    let open = &mut database.connect();
    let mut observer = Observer::of(&database);
    open.batch_execute("BEGIN; LOCK TABLE resource_control.service_request")
        .unwrap();
    let admission = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let conn = &mut database.connect();
            conn.batch_execute(PATIENT).unwrap();
            ONE.claim_on(conn).unwrap()
        });
        eventually("the table is waited for", || observer.all_waiting() > 0);
        assert!(claim_in_sql(open, "geocoder", 1));
        open.batch_execute("COMMIT").unwrap();
        waiter.join().unwrap()
    });
    let Admission::Full(full) = admission else {
        panic!("{admission:?}")
    };
    assert!(full.retry_after <= ONE.timeout(), "{full:?}");
}

/// The claim reads the requests before it waits, and has to look once more. An attempt that the unique index refuses would have
/// read the clock too early.
#[test]
fn a_slot_that_is_taken_while_the_claim_waits_for_the_table_is_not_tried() {
    for old_snapshot_until in ["", "99999999999"] {
        let database = database();
        let open = &mut database.connect();
        let claim = ONE.claim_on(open).unwrap().expect_acquired();
        assert!(ONE.complete_on(open, claim.id).unwrap());
        let mut observer = Observer::of(&database);
        // Readers do not wait for this lock.
        open.batch_execute("BEGIN; LOCK TABLE resource_control.service_request IN EXCLUSIVE MODE")
            .unwrap();
        let admission = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let conn = &mut database.connect();
                conn.batch_execute(PATIENT).unwrap();
                conn.batch_execute(&format!(
                    "SET resource_control.old_snapshot_until = '{old_snapshot_until}'"
                ))
                .unwrap();
                ONE.claim_on(conn).unwrap()
            });
            eventually("the table is waited for", || observer.all_waiting() > 0);
            open.batch_execute(
                "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
                     VALUES ('geocoder', 0, now(), now() + interval '1 hour'); \
                 CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql \
                     AS $$ BEGIN RAISE EXCEPTION 'a taken slot was tried'; END $$; \
                 CREATE TRIGGER refuse BEFORE INSERT ON resource_control.service_request \
                     FOR EACH ROW EXECUTE FUNCTION refuse(); \
                 COMMIT",
            )
            .unwrap();
            waiter.join().unwrap()
        });
        assert!(admission.is_full());
    }
}

/// The clock decides, not the start of the transaction or of the statement.
#[test]
fn a_transaction_opened_long_ago_sees_the_present() {
    let database = database();
    let (conn, old) = (&mut database.connect(), &mut database.connect());
    old.batch_execute("BEGIN").unwrap();
    assert!(truth(old, "now() <= clock_timestamp()"));
    let renewed = ONE.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "geocoder");
    assert_eq!(ONE.renew_on(old, renewed.id).unwrap(), None);
    assert!(!ONE.complete_on(old, renewed.id).unwrap());
    let row = request(old, renewed.id);
    assert!(row.timed_out_at.unwrap() >= row.expires_at);
    old.batch_execute("COMMIT; BEGIN").unwrap();

    assert!(truth(old, "now() <= clock_timestamp()"));
    let two = Semaphore::named("geocoder", 2, Duration::from_secs(30));
    fill(&two, conn);
    expire(conn, "geocoder");
    old.batch_execute("SET LOCAL lock_timeout = '4s'").unwrap();
    assert!(claim_in_sql(old, "geocoder", 2));
    assert_eq!(setting(old, "lock_timeout"), "4s");
    let rows = log(old);
    let [.., one, other, new] = &rows[..] else {
        panic!("{rows:?}")
    };
    for overdue in [one, other] {
        assert!(overdue.timed_out_at.unwrap() >= overdue.expires_at);
    }
    assert!(new.created_at >= one.timed_out_at.unwrap());
    let extended = ONE.renew_on(old, new.id).unwrap().unwrap();
    assert!(extended > new.expires_at);
    assert!(ONE.complete_on(old, new.id).unwrap());
    assert!(request(old, new.id).completed_at.unwrap() >= new.created_at);
    old.batch_execute("COMMIT; BEGIN").unwrap();

    // One of two slots is free, so no claim needs the slot of this request.
    assert!(truth(old, "now() <= clock_timestamp()"));
    let overdue = two.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "geocoder");
    let pruned = "resource_control.prune_service_requests('1 day', 10)";
    assert_eq!(number(old, pruned), 0);
    let row = request(old, overdue.id);
    assert!(row.timed_out_at.unwrap() >= row.expires_at);
}

/// Two claims that see one free slot see the same one.
#[test]
fn of_fewer_slots_only_as_many_are_offered_as_requests_are_missing() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(IMPATIENT).unwrap();
    let eight = Semaphore::named("geocoder", 8, Duration::from_secs(30));
    let claims = fill(&eight, conn);
    assert!(FOUR.claim_on(conn).unwrap().is_full());
    let (kept, ended): (Vec<_>, Vec<_>) = claims.into_iter().partition(|claim| claim.slot >= 5);
    for (ended, claim) in (1..).zip(ended) {
        assert!(FOUR.complete_on(conn, claim.id).unwrap());
        if ended <= 4 {
            assert!(FOUR.claim_on(conn).unwrap().is_full(), "{ended} ended");
        }
    }
    for _ in 0..8 {
        open.batch_execute("BEGIN").unwrap();
        assert!(claim_in_sql(open, "geocoder", 4));
        assert!(FOUR.claim_on(conn).unwrap().is_full());
        open.batch_execute("ROLLBACK").unwrap();
    }
    assert!(FOUR.claim_on(conn).unwrap().expect_acquired().slot < 4);
    assert!(FOUR.claim_on(conn).unwrap().is_full());

    // Requests of crashed holders do not count.
    for claim in kept {
        assert!(FOUR.complete_on(conn, claim.id).unwrap());
    }
    fill(&eight, conn);
    expire(conn, "geocoder");
    assert_eq!(fill(&FOUR, conn).len(), 4);
    assert_eq!(fill(&eight, conn).len(), 4);
}

#[test]
fn the_last_of_very_many_slots_is_found_soon() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() + interval '1 hour' \
         FROM generate_series(0, 32766) AS slot WHERE slot <> 12345",
    )
    .unwrap();
    let all = Semaphore::named("geocoder", 32_767, Duration::from_secs(3600));
    let start = Instant::now();
    for _ in 0..20 {
        let claim = all.claim_on(conn).unwrap().expect_acquired();
        assert_eq!(claim.slot, 12345);
        assert!(all.claim_on(conn).unwrap().is_full());
        assert!(all.complete_on(conn, claim.id).unwrap());
    }
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
}
