//! Overdue requests that another session has locked, is marking, or is renewing.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;

use super::{FOUR, ONE, PATIENT};
use crate::half::Semaphore;
use crate::half::prelude::*;
use crate::semaphores::{claim_in_sql, database, expire, fill, log, request};
use crate::support::{Expect, Observer, backend_pid, eventually, number, setting, truth};

/// Keeps a test in which a claim waits for its own thread from hanging.
const BOUNDED: &str = "SET statement_timeout = '20s'";

/// Renews the request in a transaction that stays open, so that it looks overdue to everyone else.
fn renew_unseen(conn: &mut PgConnection, open: &mut PgConnection, id: i64) {
    open.batch_execute("BEGIN").unwrap();
    loop {
        diesel::sql_query(
            "UPDATE resource_control.service_request SET expires_at = clock_timestamp() + '200ms'",
        )
        .execute(conn)
        .unwrap();
        // A slow machine may be late.
        if ONE.renew_on(open, id).unwrap().is_some() {
            break;
        }
    }
    eventually("it looks overdue", || {
        truth(
            conn,
            "SELECT expires_at < clock_timestamp() FROM resource_control.service_request",
        )
    });
}

#[test]
fn an_overdue_row_that_is_locked_keeps_only_its_own_slot() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(BOUNDED).unwrap();
    let stuck = FOUR.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "geocoder");
    open.batch_execute(&format!(
        "BEGIN; SELECT FROM resource_control.service_request WHERE id = {} FOR UPDATE",
        stuck.id
    ))
    .unwrap();
    conn.batch_execute("SET lock_timeout = '50ms'").unwrap();
    let claims = fill(&FOUR, conn);
    assert_eq!(claims.len(), 3);
    assert!(claims.iter().all(|claim| claim.slot != stuck.slot));
    assert!(request(conn, stuck.id).is_unmarked());
    open.batch_execute("COMMIT").unwrap();
    assert_eq!(
        FOUR.claim_on(conn).unwrap().expect_acquired().slot,
        stuck.slot
    );
    assert!(request(conn, stuck.id).timed_out_at.is_some());
}

#[test]
fn where_only_locked_overdue_rows_are_left_a_claim_waits_a_moment_and_is_refused() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(BOUNDED).unwrap();
    let twenty = Semaphore::named("geocoder", 20, Duration::from_secs(30));
    let late = fill(&twenty, conn);
    expire(conn, "geocoder");
    open.batch_execute("BEGIN; SELECT FROM resource_control.service_request FOR UPDATE")
        .unwrap();
    conn.batch_execute("SET lock_timeout = '3s'; BEGIN; SET LOCAL lock_timeout = '4s'")
        .unwrap();
    let start = Instant::now();
    assert!(!claim_in_sql(conn, "geocoder", 20));
    let waited = start.elapsed();
    // One quarter of a second in total, not one for each of twenty.
    assert!(waited >= Duration::from_millis(200), "{waited:?}");
    assert!(waited < Duration::from_secs(3), "{waited:?}");
    assert_eq!(setting(conn, "lock_timeout"), "4s");
    conn.batch_execute("COMMIT").unwrap();
    assert_eq!(setting(conn, "lock_timeout"), "3s");
    assert_eq!(log(conn).len(), 20);

    // All requests but one.
    open.batch_execute(&format!(
        "COMMIT; BEGIN; SELECT FROM resource_control.service_request WHERE id <> {} FOR UPDATE",
        late[7].id
    ))
    .unwrap();
    conn.batch_execute("BEGIN; SET LOCAL lock_timeout = '4s'")
        .unwrap();
    assert!(claim_in_sql(conn, "geocoder", 20));
    assert_eq!(setting(conn, "lock_timeout"), "4s");
    conn.batch_execute("COMMIT").unwrap();
    assert_eq!(setting(conn, "lock_timeout"), "3s");
    let log = log(conn);
    assert_eq!(log[20].slot, late[7].slot);
    assert_eq!(log[20].id, late[19].id + 1, "no id was drawn in vain");
}

/// Leaves only overdue requests, and a claim that has marked them and taken a slot, in a transaction that stays open.
fn claim_among_overdue(two: &Semaphore, conn: &mut PgConnection, open: &mut PgConnection) {
    conn.batch_execute("TRUNCATE resource_control.service_request")
        .unwrap();
    fill(two, conn);
    expire(conn, "geocoder");
    open.batch_execute("BEGIN").unwrap();
    assert!(claim_in_sql(open, "geocoder", 2));
}

/// If only overdue requests are left, and another claim is marking them, a claim waits for that claim's commit.
#[test]
fn a_claim_waits_for_another_that_marks_its_slot() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let two = Semaphore::named("geocoder", 2, Duration::from_secs(30));
    let mut observer = Observer::of(&database);
    // A slow machine may not commit within the quarter of a second.
    let waited = (0..20).any(|_| {
        claim_among_overdue(&two, conn, open);
        let (sender, pid) = channel();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let conn = &mut database.connect();
                sender.send(backend_pid(conn)).unwrap();
                two.claim_on(conn).unwrap().admitted().is_some()
            });
            let waits = format!(
                "EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pid = {})",
                pid.recv().unwrap()
            );
            while !waiter.is_finished() && !truth(observer.conn(), &waits) {}
            open.batch_execute("COMMIT").unwrap();
            waiter.join().unwrap()
        })
    });
    assert!(waited);
    assert!(two.claim_on(conn).unwrap().is_full());
}

/// Another claim marks both requests and commits, between the read of a claim and its search.
#[test]
fn a_claim_finds_the_slot_that_another_one_has_freed_meanwhile() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let two = Semaphore::named("geocoder", 2, Duration::from_secs(30));
    let mut observer = Observer::of(&database);
    let waiting = "(SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'relation')";
    // The order in which a claim tries the slots is random.
    for _ in 0..10 {
        claim_among_overdue(&two, conn, open);
        std::thread::scope(|scope| {
            // Keeps the claim from marking until the other one has committed.
            let barred = scope.spawn(|| {
                let bar =
                    "BEGIN; LOCK TABLE resource_control.service_request IN SHARE MODE; COMMIT";
                database.connect().batch_execute(bar).unwrap();
            });
            while number(observer.conn(), waiting) < 1 {}
            let claim = scope.spawn(|| two.claim_on(&mut database.connect()).unwrap());
            while number(observer.conn(), waiting) < 2 && !claim.is_finished() {}
            open.batch_execute("COMMIT").unwrap();
            barred.join().unwrap();
            assert!(claim.join().unwrap().admitted().is_some());
        });
        assert!(two.claim_on(conn).unwrap().is_full());
    }
}

#[test]
fn a_request_that_is_being_renewed_is_not_taken_over() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(BOUNDED).unwrap();
    let held = ONE.claim_on(conn).unwrap().expect_acquired();
    renew_unseen(conn, open, held.id);
    assert!(ONE.claim_on(conn).unwrap().is_full());
    open.batch_execute("COMMIT").unwrap();
    assert!(ONE.claim_on(conn).unwrap().is_full());
    assert_eq!(log(conn).len(), 1);
    assert!(ONE.complete_on(conn, held.id).unwrap());
}

/// The holder renewed it in time, in a transaction that a claim waits for.
#[test]
fn a_request_whose_renewal_was_waited_for_is_not_taken_over() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let mut observer = Observer::of(&database);
    let held = ONE.claim_on(conn).unwrap().expect_acquired();
    // A slow machine may not commit within the quarter of a second that the claim waits.
    for _ in 0..5 {
        expire(conn, "geocoder");
        open.batch_execute(
            "BEGIN; UPDATE resource_control.service_request SET expires_at = now() + interval '1 hour'",
        )
        .unwrap();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| ONE.claim_on(&mut database.connect()).unwrap().is_full());
            while !waiter.is_finished() && observer.all_waiting() == 0 {}
            open.batch_execute("COMMIT").unwrap();
            assert!(waiter.join().unwrap());
        });
    }
    assert_eq!(log(conn).len(), 1);
    assert!(ONE.complete_on(conn, held.id).unwrap());
}

#[test]
fn a_request_that_is_being_renewed_counts_where_there_were_more_slots() {
    let eight = Semaphore::named("geocoder", 8, Duration::from_secs(30));
    // The first slot beyond the lowered number, and one above it.
    for kept in [4, 6] {
        let database = database();
        let (conn, open) = (&mut database.connect(), &mut database.connect());
        conn.batch_execute(BOUNDED).unwrap();
        for claim in fill(&eight, conn) {
            if claim.slot != kept {
                assert!(eight.complete_on(conn, claim.id).unwrap());
            }
        }
        let id = log(conn).into_iter().find(|r| r.is_unmarked()).unwrap().id;
        open.batch_execute("BEGIN").unwrap();
        diesel::sql_query(format!(
            "UPDATE resource_control.service_request SET expires_at = clock_timestamp() + '200ms' WHERE id = {id}"
        ))
        .execute(conn)
        .unwrap();
        assert!(eight.renew_on(open, id).unwrap().is_some());
        eventually("it looks overdue", || {
            truth(
                conn,
                &format!(
                    "SELECT expires_at < clock_timestamp() FROM resource_control.service_request WHERE id = {id}"
                ),
            )
        });
        let claimed = fill(&FOUR, conn).len();
        assert!(
            claimed <= 3,
            "{claimed} beside the one that is being renewed"
        );
        open.batch_execute("COMMIT").unwrap();
        assert_eq!(claimed + fill(&FOUR, conn).len(), 3);
    }
}

/// The foreign key of the insert holds a lock on the row, which does not prevent marking it.
#[test]
fn an_overdue_request_that_an_open_insert_references_is_marked() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let late = ONE.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "geocoder");
    conn.batch_execute(
        "CREATE TABLE replies (request bigint REFERENCES resource_control.service_request)",
    )
    .unwrap();
    open.batch_execute(&format!("BEGIN; INSERT INTO replies VALUES ({})", late.id))
        .unwrap();
    assert!(ONE.claim_on(conn).unwrap().admitted().is_some());
    assert!(request(conn, late.id).timed_out_at.is_some());
}

/// By the committed row the request has expired, but its holder is renewing it.
#[test]
fn a_completion_waits_for_the_renewal_before_it() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    let held = ONE.claim_on(conn).unwrap().expect_acquired();
    let mut observer = Observer::of(&database);
    renew_unseen(conn, open, held.id);
    std::thread::scope(|scope| {
        let completed = scope.spawn(|| {
            conn.batch_execute(PATIENT).unwrap();
            ONE.complete_on(conn, held.id).unwrap()
        });
        eventually("the completion waits", || observer.all_waiting() == 1);
        open.batch_execute("COMMIT").unwrap();
        assert!(completed.join().unwrap());
    });
    let row = request(conn, held.id);
    assert!(row.completed_at.is_some() && row.timed_out_at.is_none());
}

/// Each attempt at a slot keeps an advisory lock until the transaction ends, and the server has room for few thousand.
#[test]
fn among_thousands_of_locked_overdue_rows_a_claim_is_refused_soon_and_holds_few_locks() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() FROM generate_series(0, 2999) AS slot",
    )
    .unwrap();
    open.batch_execute("BEGIN; SELECT FROM resource_control.service_request FOR UPDATE")
        .unwrap();
    conn.batch_execute("BEGIN").unwrap();
    let start = Instant::now();
    assert!(!claim_in_sql(conn, "geocoder", 3000));
    // One slot after the other took twelve seconds.
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    let held = number(
        conn,
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    );
    assert!(held <= 4, "{held} advisory locks");
    conn.batch_execute("COMMIT").unwrap();

    // The claim finds the only one that is not locked.
    open.batch_execute(
        "COMMIT; BEGIN; SELECT FROM resource_control.service_request WHERE slot <> 1234 FOR UPDATE",
    )
    .unwrap();
    let thousands = Semaphore::named("geocoder", 3000, Duration::from_secs(30));
    assert_eq!(
        thousands.claim_on(conn).unwrap().expect_acquired().slot,
        1234
    );
}

#[test]
fn of_very_many_overdue_requests_a_claim_marks_a_thousand() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
         SELECT 'geocoder', slot, now(), now() FROM generate_series(0, 1499) AS slot",
    )
    .unwrap();
    let many = Semaphore::named("geocoder", 1500, Duration::from_secs(30));
    let claim = many.claim_on(conn).unwrap().expect_acquired();
    let marked: Vec<_> = log(conn)
        .into_iter()
        .filter(|request| request.timed_out_at.is_some())
        .collect();
    assert_eq!(marked.len(), 1000);
    assert!(
        marked.iter().all(|request| request.id <= 1000),
        "the oldest"
    );
    assert!(marked.iter().any(|request| request.slot == claim.slot));
}

#[test]
fn an_overdue_request_is_marked_when_its_slot_is_needed_or_by_pruning() {
    let database = database();
    let (conn, open) = (&mut database.connect(), &mut database.connect());
    // So many slots that eight guesses seldom find the overdue one.
    let hundred = Semaphore::named("geocoder", 100, Duration::from_secs(30));
    let late = hundred.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "geocoder");
    let other = hundred.claim_on(conn).unwrap().expect_acquired();
    assert!(request(conn, late.id).is_unmarked());
    // With one slot, the request is beyond the number of slots, so the claim marks it.
    expire(conn, "geocoder");
    let one = ONE.claim_on(conn).unwrap().expect_acquired();
    for overdue in [&late, &other] {
        assert!(request(conn, overdue.id).timed_out_at.is_some());
    }
    assert!(ONE.complete_on(conn, one.id).unwrap());

    let four = fill(&FOUR, conn);
    expire(conn, "geocoder");
    let live = Semaphore::named("mailer", 1, Duration::from_secs(30));
    let live = live.claim_on(conn).unwrap().expect_acquired();
    open.batch_execute(&format!(
        "BEGIN; SELECT FROM resource_control.service_request WHERE id = {} FOR UPDATE",
        four[0].id
    ))
    .unwrap();
    let prune = "resource_control.prune_service_requests('1 day', 2)";
    assert_eq!(number(conn, prune), 0);
    // The oldest requests except the locked one.
    let unmarked = four
        .iter()
        .map(|claim| request(conn, claim.id).is_unmarked());
    assert_eq!(unmarked.collect::<Vec<_>>(), [true, false, false, true]);
    let marked = request(conn, four[1].id);
    assert!(marked.timed_out_at.unwrap() >= marked.expires_at);
    open.batch_execute("COMMIT").unwrap();
    assert_eq!(number(conn, prune), 0);
    assert_eq!(number(conn, prune), 0);
    let unmarked: Vec<_> = log(conn)
        .into_iter()
        .filter(|one| one.is_unmarked())
        .map(|one| one.id)
        .collect();
    assert_eq!(unmarked, [live.id]);
}
