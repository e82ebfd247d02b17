//! Every way in which a permit ends.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{
    Admission, Error, IS_ASYNCHRONOUS, Permit, Semaphore, error::Misplaced,
    pool_in_test_transactions, pool_with_patience,
};
use crate::semaphores::{Request, database, expire, log, request};
use crate::support::{
    Expect, Observer, assert_after_drop, assert_matches, eventually, number, truth,
};

const GEOCODER: Semaphore = Semaphore::named("geocoder", 2, Duration::from_secs(30));
const LATE_RELEASES: &str = "it is released in the background";

#[test]
fn a_permit_can_be_sent_and_shared() {
    fn is_send_and_sync<T: Send + Sync + 'static>() {}
    is_send_and_sync::<Permit>();
}

#[test]
fn a_permit_may_end_on_another_thread() {
    let database = database();
    let permit = GEOCODER
        .try_acquire(&database.pool(1))
        .unwrap()
        .expect_acquired();
    let id = permit.claim().id;
    std::thread::spawn(move || permit.release())
        .join()
        .unwrap()
        .unwrap();
    assert!(request(&mut database.connect(), id).completed_at.is_some());
}

#[test]
fn dropping_does_not_wait_for_a_connection_and_the_release_follows() {
    let database = database();
    let pool = pool_with_patience(&database, 1, Duration::from_secs(60));
    let permits = [(); 2].map(|()| GEOCODER.try_acquire(&pool).unwrap().expect_acquired());
    let only = pool.get().unwrap();
    let start = Instant::now();
    drop(permits);
    assert!(start.elapsed() < Duration::from_secs(10));
    let conn = &mut database.connect();
    assert!(log(conn).iter().all(Request::is_unmarked));
    drop(only);
    eventually(LATE_RELEASES, || {
        log(conn)
            .iter()
            .all(|request| request.completed_at.is_some())
    });
    assert!(GEOCODER.try_acquire(&pool).unwrap().admitted().is_some());
}

#[test]
fn what_could_not_be_delivered_in_time_is_not_delivered_later() {
    let database = database();
    let conn = &mut database.connect();
    let (exhausted, other) = (database.pool(1), database.pool(1));
    let brief = Semaphore::named("geocoder", 2, Duration::from_millis(100));
    let permit = brief.try_acquire(&exhausted).unwrap().expect_acquired();
    let only = exhausted.get().unwrap();
    drop(permit);
    eventually("it has expired", || {
        truth(
            conn,
            "SELECT expires_at <= clock_timestamp() FROM resource_control.service_request",
        )
    });

    // Once the background thread has sent a release that was left to it later, it has also seen that the first one is
    // overdue.
    for _ in 0..2 {
        let second = GEOCODER
            .details("second")
            .try_acquire(&other)
            .unwrap()
            .expect_acquired();
        let id = second.claim().id;
        let busy = other.get().unwrap();
        drop(second);
        drop(busy);
        eventually(LATE_RELEASES, || request(conn, id).completed_at.is_some());
    }
    diesel::sql_query("UPDATE resource_control.service_request SET timed_out_at = NULL")
        .execute(conn)
        .unwrap();
    if IS_ASYNCHRONOUS {
        // Each permit has a task of its own, which may still wait for the connection for which it was waiting then.
        std::thread::sleep(Duration::from_millis(300));
    }
    drop(only);
    drop(exhausted.get().unwrap());
    assert!(log(conn)[0].is_unmarked());
}

#[test]
fn a_panic_gives_the_slot_back() {
    let database = database();
    let pool = database.pool(1);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        panic!("in the work");
    }));
    assert!(panicked.is_err());
    let conn = &mut database.connect();
    assert_after_drop("the slot is free", || log(conn)[0].completed_at.is_some());
    let _permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
}

#[test]
fn work_in_a_closure_is_released_on_every_way_out() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let done = GEOCODER.try_acquire(&pool).unwrap().run(|permit| {
        // The only connection is in the pool.
        drop(pool.get().unwrap());
        Ok::<_, Error>(permit.fencing_token())
    });
    assert_eq!(done.unwrap(), Admission::Admitted(log(conn)[0].id));

    #[derive(Debug, PartialEq)]
    struct Mine;
    impl From<Error> for Mine {
        fn from(error: Error) -> Self {
            panic!("{error}")
        }
    }
    let admission = GEOCODER.try_acquire(&pool).unwrap();
    assert_eq!(admission.run(|_| Err::<(), _>(Mine)).unwrap_err(), Mine);
    let permit = GEOCODER.acquire(&pool).unwrap();
    assert_eq!(permit.run(|_| Err::<(), _>(Mine)), Err(Mine));
    assert_eq!(GEOCODER.with(&pool, |_| Err::<(), _>(Mine)), Err(Mine));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let admission = Admission::Admitted(GEOCODER.acquire(&pool).unwrap());
        admission.run(|_| -> Result<(), Error> { panic!("in the work") })
    }));
    assert!(panicked.is_err());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        GEOCODER.with(&pool, |_| -> Result<(), Error> { panic!("in the work") })
    }));
    assert!(panicked.is_err());
    assert_after_drop("each slot is free", || {
        log(conn)
            .iter()
            .all(|request| request.completed_at.is_some())
    });
    assert_eq!(log(conn).len(), 6);

    let late = GEOCODER.try_acquire(&pool).unwrap().run(|_| {
        expire(conn, "geocoder");
        Ok::<_, Error>(())
    });
    assert_matches!(late, Err(Error::TimedOut { .. }));
    let late = GEOCODER.with(&pool, |_| {
        expire(conn, "geocoder");
        Ok::<_, Error>(())
    });
    assert_matches!(late, Err(Error::TimedOut { .. }));
    let one = Semaphore::named("geocoder", 1, Duration::from_secs(30));
    let _held = one.try_acquire(&pool).unwrap().expect_acquired();
    let full = one.try_acquire(&pool).unwrap();
    let full = full.run(|_| -> Result<(), Error> { unreachable!() });
    assert!(full.unwrap().is_full());
}

#[test]
fn a_permit_made_into_a_claim_is_released_by_nothing_but_its_id() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let token = permit.fencing_token();
    let claim = permit.into_claim();
    assert_eq!(claim.id, token);
    assert!(request(conn, claim.id).is_unmarked());
    assert!(GEOCODER.complete_on(conn, claim.id).unwrap());
}

#[test]
fn a_permit_never_believes_in_its_slot_longer_than_the_database() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    // The reply takes long.
    conn.batch_execute(
        "CREATE FUNCTION tarry() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             PERFORM pg_sleep(0.3); RETURN NULL; \
         END $$; \
         CREATE CONSTRAINT TRIGGER tarry AFTER INSERT OR UPDATE ON resource_control.service_request \
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION tarry()",
    )
    .unwrap();
    let mut assert_not_longer = |permit: &Permit| {
        let left = number(
            conn,
            &format!(
                "SELECT extract(epoch FROM expires_at - clock_timestamp()) * 1000000 \
                 FROM resource_control.service_request WHERE id = {}",
                permit.claim().id
            ),
        );
        let left = Duration::from_micros(left.try_into().unwrap());
        // Read later, so it is less, however long that took.
        let remaining = permit.remaining();
        assert!(remaining <= left, "{remaining:?} {left:?}");
    };
    let mut permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert_not_longer(&permit);
    let before = permit.claim().expires_at;
    let renewed = permit.renew().unwrap();
    assert!(renewed > before);
    assert_eq!(permit.claim().expires_at, renewed);
    assert_not_longer(&permit);
    permit.release().unwrap();
}

#[test]
fn a_renewal_lets_a_permit_remain_as_long_as_a_new_one() {
    let database = database();
    let pool = database.pool(1);
    let minute = Semaphore::named("geocoder", 1, Duration::from_secs(60));
    let mut permit = minute.try_acquire(&pool).unwrap().expect_acquired();
    pool.get()
        .unwrap()
        .batch_execute("SELECT pg_sleep(0.3)")
        .unwrap();
    let old = permit.remaining();
    assert!(old <= Duration::from_millis(59_700));
    permit.renew().unwrap();
    assert!(permit.remaining() > old);
}

#[test]
fn in_a_test_transaction_slots_are_claimed_and_released_and_rolled_back() {
    let database = database();
    let pool = pool_in_test_transactions(&database, 1);
    let first = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    let mut second = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    assert!(GEOCODER.try_acquire(&pool).unwrap().is_full());
    first.release().unwrap();
    second.renew().unwrap();
    drop(second);
    let abandoned = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
    expire(&mut pool.get().unwrap(), "geocoder");
    let timed_out = abandoned.release();
    assert_matches!(timed_out, Err(Error::TimedOut { .. }));
    let waited = GEOCODER.acquire_timeout(&pool, Duration::from_secs(10));
    let _held = waited.unwrap().expect_acquired().into_claim();

    let mut in_it = pool.get().unwrap();
    assert_eq!(log(&mut in_it).len(), 4);
    assert_eq!(Observer::of(&database).in_transaction(), 1);
    // As in production inside the caller's own transaction.
    let refused = in_it.transaction(|conn| GEOCODER.claim_on(conn).map(drop));
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::ClaimInTransaction))
    );
    drop(in_it);
    assert_eq!(log(&mut database.connect()), []);
}
