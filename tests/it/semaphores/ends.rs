//! How requests end (completed, timed out, renewed), and what a late completion changes.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;

use super::{GEOCODER, database, expire, fill, log, request};
use crate::half::prelude::*;
use crate::half::{Error, Semaphore, schema::resource_control::service_request};
use crate::support::{Expect, assert_matches, truth};

#[test]
fn the_release_of_a_permit_that_timed_out_says_so_and_changes_nothing() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let one_slot = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let mut late = one_slot.try_acquire(&pool).unwrap().expect_acquired();
    expire(conn, "geocoder");
    let next = one_slot.try_acquire(&pool).unwrap().expect_acquired();
    assert_eq!(late.claim().slot, next.claim().slot);
    assert_matches!(late.renew(), Err(Error::TimedOut { .. }));
    assert!(late.remaining().is_zero());
    let id = late.fencing_token();
    let released = late.release();
    assert_matches!(
        released,
        Err(Error::TimedOut { service, id: theirs })
            if service == "geocoder" && *theirs == id
    );
    assert!(one_slot.try_acquire(&pool).unwrap().is_full());
    next.release().unwrap();
}

#[test]
fn an_expired_request_has_ended_before_anyone_claims() {
    let database = database();
    let conn = &mut database.connect();
    let [renewed, completed] = [(); 2].map(|()| GEOCODER.claim_on(conn).unwrap().expect_acquired());
    expire(conn, "geocoder");
    assert_eq!(GEOCODER.renew_on(conn, renewed.id).unwrap(), None);
    assert!(request(conn, renewed.id).is_unmarked());

    assert!(!GEOCODER.complete_on(conn, completed.id).unwrap());
    let marked = request(conn, completed.id);
    assert!(marked.timed_out_at.unwrap() >= marked.expires_at);
    assert_eq!(marked.completed_at, None);
    assert!(!GEOCODER.complete_on(conn, completed.id).unwrap());
    assert_eq!(GEOCODER.renew_on(conn, completed.id).unwrap(), None);
    assert_eq!(request(conn, completed.id), marked);
}

#[test]
fn a_request_is_completed_once() {
    let database = database();
    let conn = &mut database.connect();
    let claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    assert!(GEOCODER.complete_on(conn, claim.id).unwrap());
    let completed = log(conn);
    assert!(completed[0].completed_at.unwrap() >= claim.created_at);
    assert_eq!(completed[0].timed_out_at, None);
    for id in [claim.id, claim.id + 1, 0, i64::MIN, i64::MAX] {
        assert!(!GEOCODER.complete_on(conn, id).unwrap());
        assert_eq!(GEOCODER.renew_on(conn, id).unwrap(), None);
    }
    assert_eq!(log(conn), completed);
}

#[test]
fn a_late_end_of_any_kind_leaves_the_next_holder_alone() {
    let database = database();
    let conn = &mut database.connect();
    let one_slot = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let late = one_slot.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "geocoder");
    let next = one_slot.claim_on(conn).unwrap().expect_acquired();
    let (timed_out, held) = (request(conn, late.id), request(conn, next.id));
    assert!(timed_out.timed_out_at.unwrap() <= next.created_at);

    assert!(!one_slot.complete_on(conn, late.id).unwrap());
    assert_eq!(one_slot.renew_on(conn, late.id).unwrap(), None);
    assert_eq!(log(conn), [timed_out, held.clone()]);

    // An ORM's save() writes every column as it was at the claim, except the one that was set.
    diesel::update(service_request::table.find(late.id))
        .set((
            service_request::service.eq("geocoder"),
            service_request::slot.eq(late.slot),
            service_request::created_at.eq(late.created_at),
            service_request::expires_at.eq(late.expires_at),
            service_request::completed_at.eq(diesel::dsl::now),
            service_request::timed_out_at.eq(None::<DateTime<Utc>>),
            service_request::details.eq(""),
        ))
        .execute(conn)
        .unwrap();
    let saved = request(conn, late.id);
    assert_eq!(request(conn, next.id), held);
    assert!(!one_slot.complete_on(conn, late.id).unwrap());
    assert_eq!(one_slot.renew_on(conn, late.id).unwrap(), None);
    assert!(one_slot.claim_on(conn).unwrap().is_full());
    assert_eq!(log(conn), [saved, held]);
    assert!(one_slot.complete_on(conn, next.id).unwrap());
}

#[test]
fn a_renewal_extends_and_never_shortens() {
    let database = database();
    let conn = &mut database.connect();
    let claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    let extended = GEOCODER.renew_on(conn, claim.id).unwrap().unwrap();
    assert!(extended > claim.expires_at);
    let hour = Semaphore::named("geocoder", 2, Duration::from_secs(3600));
    let later = hour.renew_on(conn, claim.id).unwrap().unwrap();
    assert!(later - extended > TimeDelta::seconds(3500));
    assert_eq!(GEOCODER.renew_on(conn, claim.id).unwrap(), Some(later));
    let renewed = request(conn, claim.id);
    assert_eq!(renewed.expires_at, later);
    assert_eq!(renewed.created_at, claim.created_at);
}

#[test]
fn a_claim_marks_what_is_overdue_in_its_own_service_and_a_refusal_nothing() {
    let database = database();
    let conn = &mut database.connect();
    let (a, b) = (
        Semaphore::named("a", 3, Duration::from_secs(30)),
        Semaphore::named("b", 2, Duration::from_secs(30)),
    );
    fill(&a, conn);
    fill(&b, conn);
    expire(conn, "b");
    let before = log(conn);
    assert!(a.claim_on(conn).unwrap().is_full());
    assert_eq!(log(conn), before);

    expire(conn, "a");
    let claim = a.claim_on(conn).unwrap().expect_acquired();
    let after = log(conn);
    for request in &after[..3] {
        assert!(request.timed_out_at.unwrap() >= request.expires_at);
        assert!(request.timed_out_at.unwrap() <= claim.created_at);
        assert_eq!(request.completed_at, None);
    }
    assert_eq!(after[3..5], before[3..5], "those of the other service");
    assert!(after[5].is_unmarked());
}

/// As a client in another language may mark it, before or after its expiry.
#[test]
fn what_was_marked_as_timed_out_stays_ended() {
    let database = database();
    let conn = &mut database.connect();
    let claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    conn.batch_execute("UPDATE resource_control.service_request SET timed_out_at = now()")
        .unwrap();
    assert!(!GEOCODER.complete_on(conn, claim.id).unwrap());
    assert_eq!(GEOCODER.renew_on(conn, claim.id).unwrap(), None);
    assert_eq!(fill(&GEOCODER, conn).len(), 2);
}

#[test]
fn what_was_completed_is_not_marked_as_timed_out_later() {
    let database = database();
    let conn = &mut database.connect();
    let completed = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    assert!(GEOCODER.complete_on(conn, completed.id).unwrap());
    let late = fill(&GEOCODER, conn);
    conn.batch_execute("UPDATE resource_control.service_request SET expires_at = now()")
        .unwrap();
    assert!(GEOCODER.claim_on(conn).unwrap().admitted().is_some());
    for late in late {
        assert!(request(conn, late.id).timed_out_at.is_some());
    }
    assert_eq!(request(conn, completed.id).timed_out_at, None);
}

#[test]
fn a_renewal_and_a_late_completion_leave_the_other_requests_alone() {
    let database = database();
    let conn = &mut database.connect();
    let [first, second] = &fill(&GEOCODER, conn)[..] else {
        panic!("two slots");
    };
    let before = request(conn, first.id);
    assert!(GEOCODER.renew_on(conn, second.id).unwrap().is_some());
    assert_eq!(request(conn, first.id), before);
    expire(conn, "geocoder");
    assert!(!GEOCODER.complete_on(conn, second.id).unwrap());
    assert!(request(conn, second.id).timed_out_at.is_some());
    assert!(request(conn, first.id).is_unmarked());
}

#[test]
fn an_overdue_request_is_nothing_to_wait_for() {
    let database = database();
    let conn = &mut database.connect();
    let claims = fill(&GEOCODER, conn);
    conn.batch_execute(&format!(
        "UPDATE resource_control.service_request SET expires_at = now() WHERE id = {}",
        claims[0].id
    ))
    .unwrap();
    // With one slot, which the other request has.
    let is_full = "SELECT id IS NULL AND next_expiry > decided_at \
                  FROM resource_control.admit_service_request('geocoder', 1, '30 s', '')";
    assert!(truth(conn, is_full));
}
