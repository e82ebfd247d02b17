//! The semaphore, one client at a time.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Timestamptz;
use diesel_interlock::schema::resource_control::service_request;
use diesel_interlock::{Admission, Attempt, Error, Semaphore, migrations};
use workbench::Database;

use crate::support::{Expect, Observer, eventually};

const GEOCODER: Semaphore = Semaphore::named("geocoder", 2, Duration::from_secs(30));

/// A database with the schema.
pub(crate) fn database() -> Database {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    database
}

/// Lets the requests in flight to the service expire now.
pub(crate) fn expire(conn: &mut PgConnection, service: &str) {
    diesel::update(service_request::table.filter(service_request::service.eq(service)))
        .set(service_request::expires_at.eq(diesel::dsl::now))
        .execute(conn)
        .unwrap();
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
