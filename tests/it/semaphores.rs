//! The semaphore, one client at a time.

mod ends;
mod headers;

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::sql_types::Timestamptz;

use crate::half::prelude::*;
use crate::half::{
    Admission, Claim, Database, Error, Semaphore, error::Misplaced, migrations,
    schema::resource_control::service_request,
};
use crate::support::{Expect, Observer, assert_matches, eventually, number};

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

/// Claims a slot in plain SQL, in the transaction that is open. Returns whether a slot was free.
pub(crate) fn claim_in_sql(conn: &mut PgConnection, service: &str, slots: i32) -> bool {
    let claim = format!(
        "SELECT count(*) FROM resource_control.claim_service_request('{service}', {slots}, '30 s')"
    );
    number(conn, &claim) == 1
}

/// Claims all slots, on the given connection.
pub(crate) fn fill(semaphore: &Semaphore, conn: &mut PgConnection) -> Vec<Claim> {
    std::iter::from_fn(|| semaphore.claim_on(conn).unwrap().admitted()).collect()
}

#[test]
fn as_many_permits_as_slots_and_no_connection_is_held() {
    let database = database();
    let pool = database.pool(1);
    let one = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let two = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert_ne!(one.claim().slot, two.claim().slot);
    assert!(two.fencing_token() > one.fencing_token());
    assert!(GEOCODER.try_acquire(&pool).unwrap().is_full());
    one.release().unwrap();
    let three = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert!(three.remaining() > Duration::from_secs(29));
    drop(three);
    drop(two);
    let conn = &mut database.connect();
    eventually("all three are completed", || {
        let completed = service_request::table
            .filter(service_request::completed_at.is_not_null())
            .count();
        completed.get_result::<i64>(conn).unwrap() == 3
    });
}

#[test]
fn a_full_semaphore_tells_when_the_first_request_expires() {
    let database = database();
    let pool = database.pool(1);
    let _one = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let other = Semaphore::named("geocoder", 2, Duration::from_secs(7));
    let _two = other.try_acquire(&pool).unwrap().expect_acquired();
    match GEOCODER.try_acquire(&pool).unwrap() {
        Admission::Full(full) => {
            assert_eq!(full.retry_after_secs(), 7);
            assert!(full.retry_after < Duration::from_secs(7));
        }
        Admission::Admitted(permit) => panic!("{permit:?}"),
    }
}

#[test]
fn a_claim_inside_a_transaction_is_refused_however_it_was_opened() {
    let database = database();
    let conn = &mut database.connect();
    let refused = conn.transaction(|conn| GEOCODER.claim_on(conn).map(drop));
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::ClaimInTransaction))
    );

    conn.batch_execute("BEGIN").unwrap();
    let refused = GEOCODER.claim_on(conn);
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::ClaimInTransaction))
    );
    conn.batch_execute("COMMIT").unwrap();
    let in_flight = service_request::table
        .filter(service_request::completed_at.is_null())
        .count();
    assert_eq!(in_flight.get_result(conn), Ok(0));

    let pool = database.pool(1);
    pool.get().unwrap().batch_execute("BEGIN").unwrap();
    let refused = GEOCODER.try_acquire(&pool);
    assert_matches!(refused, Err(Error::TransactionInPool));
    let Admission::Admitted(_permit) = GEOCODER.try_acquire(&pool).unwrap() else {
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
    // The first slot is chosen at random.
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

/// Two names are equal if their bytes are equal, also if the collation of the argument says otherwise.
#[test]
fn the_collation_of_the_argument_changes_nothing() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    )
    .unwrap();
    let claim = |name: &str| {
        format!(
            "SELECT count(*) FROM resource_control.claim_service_request(('{name}'::text) COLLATE any_case, 1, '30 s')"
        )
    };
    assert_eq!(number(conn, &claim("geo")), 1);
    assert_eq!(number(conn, &claim("GEO")), 1);
    assert_eq!(number(conn, &claim("geo")), 0);
    expire(conn, "geo");
    assert_eq!(number(conn, &claim("GEO")), 0);
    assert_eq!(number(conn, &claim("geo")), 1);
    let lock = "count(DISTINCT resource_control.service_request_lock(name COLLATE any_case, 0)) \
                FROM (VALUES ('geo'), ('GEO')) AS n (name)";
    assert_eq!(number(conn, &format!("SELECT {lock}")), 2);
}

/// All requests beyond a lowered number of slots must end, and one more.
#[test]
fn a_full_semaphore_tells_when_a_slot_is_free_at_the_latest() {
    let database = database();
    let conn = &mut database.connect();
    for seconds in [100, 400, 200, 300] {
        let semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(seconds));
        let _ = semaphore.claim_on(conn).unwrap().expect_acquired();
    }
    for (slots, overdue, seconds) in [
        (4, 0, 100),
        (3, 0, 200),
        (2, 0, 300),
        (1, 0, 400),
        (2, 1, 300),
    ] {
        diesel::sql_query(format!(
            "UPDATE resource_control.service_request SET expires_at = clock_timestamp() \
             WHERE {overdue} = 1 AND expires_at < created_at + interval '101 s'"
        ))
        .execute(conn)
        .unwrap();
        let semaphore = Semaphore::named("geocoder", slots, Duration::from_secs(30));
        let Admission::Full(full) = semaphore.claim_on(conn).unwrap() else {
            panic!("{slots} slots have a free one");
        };
        let hint = full.retry_after_secs();
        assert!(hint <= seconds && hint + 60 > seconds, "{slots}: {full:?}");
    }
}
