//! The semaphore, one client at a time.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Timestamptz;
use diesel_interlock::schema::resource_control::service_request;
use diesel_interlock::{Admission, Attempt, Claim, Error, Semaphore, migrations};
use workbench::Database;

use crate::support::{Expect, Observer, eventually, number, truth};

const GEOCODER: Semaphore = Semaphore::named("geocoder", 2, Duration::from_secs(30));

/// A database with the schema.
pub(crate) fn database() -> Database {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    database
}

/// Lets the requests in flight to the service expire now.
pub(crate) fn expire(conn: &mut PgConnection, service: &str) {
    let in_flight = service_request::table
        .filter(service_request::service.eq(service))
        .filter(service_request::completed_at.is_null())
        .filter(service_request::timed_out_at.is_null());
    diesel::update(in_flight)
        .set(service_request::expires_at.eq(diesel::dsl::now))
        .execute(conn)
        .unwrap();
}

/// A row of the log.
#[derive(Debug, Clone, PartialEq, Queryable)]
pub(crate) struct Request {
    pub(crate) id: i64,
    pub(crate) service: String,
    pub(crate) slot: i16,
    pub(crate) created_at: DateTime<Utc>,
    pub(crate) expires_at: DateTime<Utc>,
    pub(crate) completed_at: Option<DateTime<Utc>>,
    pub(crate) timed_out_at: Option<DateTime<Utc>>,
    pub(crate) details: String,
}

impl Request {
    pub(crate) fn is_unmarked(&self) -> bool {
        self.completed_at.is_none() && self.timed_out_at.is_none()
    }
}

/// All requests, the oldest first.
pub(crate) fn log(conn: &mut PgConnection) -> Vec<Request> {
    service_request::table
        .order(service_request::id)
        .load(conn)
        .unwrap()
}

pub(crate) fn request(conn: &mut PgConnection, id: i64) -> Request {
    service_request::table.find(id).first(conn).unwrap()
}

/// Claims a slot in plain SQL, in whatever transaction is open; answers whether there was one.
pub(crate) fn claim_in_sql(conn: &mut PgConnection, service: &str, slots: i32) -> bool {
    let claim = format!(
        "SELECT count(*) FROM resource_control.claim_service_request('{service}', {slots}, '30 s')"
    );
    number(conn, &claim) == 1
}

/// Claims as many slots as there are, on the given connection.
pub(crate) fn fill(semaphore: &Semaphore, conn: &mut PgConnection) -> Vec<Claim> {
    std::iter::from_fn(|| semaphore.claim_on(conn).unwrap().acquired()).collect()
}

#[test]
fn as_many_permits_as_slots_and_no_connection_is_held() {
    let database = database();
    let pool = database.pool(1);
    let one = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let two = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert_ne!(one.claim().slot, two.claim().slot);
    assert!(two.fencing_token() > one.fencing_token());
    assert!(GEOCODER.try_acquire(&pool).unwrap().is_busy());
    one.release().unwrap();
    let three = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert!(three.remaining() > Duration::from_secs(29));
    drop(three);
    drop(two);
    let conn = &mut database.connect();
    let completed: i64 = service_request::table
        .filter(service_request::completed_at.is_not_null())
        .count()
        .get_result(conn)
        .unwrap();
    assert_eq!(completed, 3);
}

#[test]
fn a_full_semaphore_tells_when_the_first_request_expires() {
    let database = database();
    let pool = database.pool(1);
    let _one = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let other = Semaphore::named("geocoder", 2, Duration::from_secs(7));
    let _two = other.try_acquire(&pool).unwrap().expect_acquired();
    match GEOCODER.admit(&pool).unwrap() {
        Admission::Full(full) => {
            assert_eq!(full.retry_after_secs(), 7);
            assert!(full.retry_after < Duration::from_secs(7));
        }
        Admission::Admitted(permit) => panic!("{permit:?}"),
    }
}

#[test]
fn a_permit_that_timed_out_is_told_so_and_changes_nothing() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let one_slot = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let mut late = one_slot.try_acquire(&pool).unwrap().expect_acquired();
    expire(conn, "geocoder");
    let next = one_slot.try_acquire(&pool).unwrap().expect_acquired();
    assert_eq!(late.claim().slot, next.claim().slot);
    assert!(matches!(late.renew(), Err(Error::TimedOut { .. })));
    assert!(late.remaining().is_zero());
    let id = late.fencing_token();
    let released = late.release();
    assert!(
        matches!(&released, Err(Error::TimedOut { service, id: theirs }) if service == "geocoder" && *theirs == id),
        "{released:?}"
    );
    assert!(one_slot.try_acquire(&pool).unwrap().is_busy());
    next.release().unwrap();
}

#[test]
fn a_claim_inside_a_transaction_is_refused_whoever_opened_it() {
    let database = database();
    let conn = &mut database.connect();
    let refused = conn.transaction(|conn| GEOCODER.claim_on(conn).map(drop));
    assert!(
        matches!(refused, Err(Error::ClaimInTransaction)),
        "{refused:?}"
    );

    conn.batch_execute("BEGIN").unwrap();
    let refused = GEOCODER.claim_on(conn);
    assert!(
        matches!(refused, Err(Error::ClaimInTransaction)),
        "{refused:?}"
    );
    conn.batch_execute("COMMIT").unwrap();
    let in_flight = service_request::table
        .filter(service_request::completed_at.is_null())
        .count();
    assert_eq!(in_flight.get_result(conn), Ok(0));

    let pool = database.pool(1);
    pool.get().unwrap().batch_execute("BEGIN").unwrap();
    let refused = GEOCODER.try_acquire(&pool);
    assert!(
        matches!(refused, Err(Error::TransactionInPool)),
        "{refused:?}"
    );
    let Attempt::Acquired(_permit) = GEOCODER.try_acquire(&pool).unwrap() else {
        panic!("the slot of an undone claim is taken");
    };
    assert_eq!(in_flight.get_result(conn), Ok(1));
}

#[test]
fn a_claim_that_waited_for_the_table_begins_after_the_wait() {
    let database = database();
    let article = &mut database.connect();
    article
        .batch_execute(
            "BEGIN; LOCK TABLE resource_control.service_request IN SHARE ROW EXCLUSIVE MODE",
        )
        .unwrap();
    let claim = std::thread::scope(|scope| {
        let claim = scope.spawn(|| GEOCODER.claim_on(&mut database.connect()).unwrap());
        let mut observer = Observer::of(&database);
        eventually("the claim waits", || observer.waiters_for_tables() == 1);
        let unlocked_at: DateTime<Utc> = diesel::select(sql::<Timestamptz>("clock_timestamp()"))
            .get_result(article)
            .unwrap();
        article.batch_execute("COMMIT").unwrap();
        let claim = claim.join().unwrap().expect_acquired();
        assert!(claim.created_at > unlocked_at, "{claim:?}, {unlocked_at}");
        claim
    });
    assert_eq!(claim.expires_at - claim.created_at, TimeDelta::seconds(30));
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
fn a_late_end_of_whatever_kind_leaves_the_next_holder_alone() {
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

    // An ORM's save() writes every column as it was at the claim, but for the one that was set.
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
    assert!(one_slot.claim_on(conn).unwrap().is_busy());
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
    assert!(a.claim_on(conn).unwrap().is_busy());
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

#[test]
fn slots_are_counted_per_service_and_the_row_says_what_was_claimed() {
    let database = database();
    let conn = &mut database.connect();
    let semaphore = Semaphore::new("tenant 7's Größe 🦀", 3, Duration::from_millis(1500))
        .details("web-3 pid 811");
    let claims = fill(&semaphore, conn);
    let mut slots: Vec<_> = claims.iter().map(|claim| claim.slot).collect();
    slots.sort();
    assert_eq!(slots, [0, 1, 2]);
    assert_eq!(fill(&GEOCODER, conn).len(), 2);
    let row = request(conn, claims[0].id);
    assert_eq!(row.service, "tenant 7's Größe 🦀");
    assert_eq!(row.details, "web-3 pid 811");
    assert_eq!(
        row.expires_at - row.created_at,
        TimeDelta::milliseconds(1500)
    );
    assert_eq!(
        (row.slot, row.created_at, row.expires_at),
        (claims[0].slot, claims[0].created_at, claims[0].expires_at)
    );
}

#[test]
fn a_handle_tells_what_it_was_made_of() {
    let semaphore = Semaphore::named("geocoder", 7, Duration::from_secs(30));
    assert_eq!(semaphore.service(), "geocoder");
    assert_eq!(semaphore.slots(), 7);
    assert_eq!(semaphore.timeout(), Duration::from_secs(30));
}

#[test]
fn of_one_slot_the_ids_ascend_whichever_session_claims() {
    let database = database();
    let mut sessions = [database.connect(), database.connect()];
    let semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let mut last = 0;
    for session in [0, 1, 0, 1] {
        let conn = &mut sessions[session];
        let claim = semaphore.claim_on(conn).unwrap().expect_acquired();
        assert!(claim.id > last);
        last = claim.id;
        assert!(semaphore.complete_on(conn, claim.id).unwrap());
    }
}

#[test]
fn a_claim_that_is_not_committed_keeps_its_own_slot_alone() {
    let database = database();
    let (open, other) = (&mut database.connect(), &mut database.connect());
    // Which slot is claimed first is chance.
    for _ in 0..12 {
        let claim = GEOCODER.claim_on(other).unwrap().expect_acquired();
        open.batch_execute("BEGIN").unwrap();
        assert!(claim_in_sql(open, "geocoder", 2));
        assert!(GEOCODER.complete_on(other, claim.id).unwrap());
        let claim = GEOCODER.claim_on(other).unwrap().expect_acquired();
        assert!(GEOCODER.complete_on(other, claim.id).unwrap());
        open.batch_execute("ROLLBACK").unwrap();
    }
}

#[test]
fn a_claim_that_is_not_committed_keeps_no_other_service_waiting() {
    let database = database();
    let (one, two) = (&mut database.connect(), &mut database.connect());
    one.batch_execute(
        "BEGIN; SELECT * FROM resource_control.claim_service_request('mailer', 1, '1 minute')",
    )
    .unwrap();
    let semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let _ = semaphore.claim_on(two).unwrap().expect_acquired();
}

#[test]
fn the_table_keeps_no_request_without_a_service_or_with_an_impossible_slot_or_one_that_is_taken() {
    let database = database();
    let conn = &mut database.connect();
    for (service, slot, is_kept) in [
        ("'geocoder'", 0, true),
        ("'geocoder'", 0, false),
        ("''", 0, false),
        ("repeat('x', 1001)", 0, false),
        ("'geocoder'", -1, false),
    ] {
        let kept = conn.batch_execute(&format!(
            "INSERT INTO resource_control.service_request (service, slot, created_at, expires_at) \
             VALUES ({service}, {slot}, now(), now())"
        ));
        assert_eq!(kept.is_ok(), is_kept, "{service} {slot}");
    }
}

/// As a client in another language may mark it, whatever the time.
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
    let late = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    conn.batch_execute("UPDATE resource_control.service_request SET expires_at = now()")
        .unwrap();
    assert!(GEOCODER.claim_on(conn).unwrap().acquired().is_some());
    assert!(request(conn, late.id).timed_out_at.is_some());
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
    // Of one slot: the other request has it.
    let answer = "SELECT id IS NULL AND next_expiry > answered_at \
                  FROM resource_control.admit_service_request('geocoder', 1, '30 s', '')";
    assert!(truth(conn, answer));
}

#[test]
fn the_log_is_as_old_as_the_ends_of_its_requests() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request \
             (service, slot, created_at, expires_at, completed_at) \
         VALUES ('geocoder', 0, now() - interval '2 hours', now() + interval '2 hours', now() - interval '1 hour'), \
             ('geocoder', 1, now() - interval '2 hours', now() - interval '1 hour', now())",
    )
    .unwrap();
    let pruned = "resource_control.prune_service_requests('30 minutes', 10)";
    assert_eq!(number(conn, pruned), 1);
    assert_eq!(log(conn)[0].slot, 1);
}

#[test]
fn a_year_of_the_log_is_twelve_times_thirty_days() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "INSERT INTO resource_control.service_request \
             (service, slot, created_at, expires_at, completed_at) \
         SELECT 'geocoder', 0, ended, ended, ended \
         FROM (SELECT now() - days * interval '24 hours' AS ended FROM (VALUES (358), (362)) AS old (days)) AS old",
    )
    .unwrap();
    let pruned = "resource_control.prune_service_requests('12 months', 10)";
    assert_eq!(number(conn, pruned), 1);
}

#[test]
fn a_request_does_not_choose_its_own_token() {
    let database = database();
    let conn = &mut database.connect();
    let chosen = conn.batch_execute(
        "INSERT INTO resource_control.service_request (id, service, slot, created_at, expires_at) \
         VALUES (7, 'geocoder', 0, now(), now())",
    );
    assert!(chosen.is_err());
}
