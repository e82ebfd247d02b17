//! Permits in use: waiting for one, dropping it, losing it, and the same slots from SQL.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use diesel::connection::{InstrumentationEvent, SimpleConnection};
use diesel::dsl::sql;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{BigInt, Bool, Integer};

use crate::half::prelude::*;
use crate::half::{
    Database, Error, RoundTrips, Semaphore, idle_connections, instrumented_pool, migrations,
    monitor, silent_pool,
};
use crate::semaphores::{database, expire};
use crate::support::{Expect, assert_matches, eventually};

const ONE: Semaphore = Semaphore::named("importer", 1, Duration::from_secs(30));

#[derive(QueryableByName)]
struct Claimed {
    #[diesel(sql_type = BigInt)]
    id: i64,
}

fn claim_in_sql(conn: &mut PgConnection) -> Option<i64> {
    let claim = "SELECT id FROM resource_control.claim_service_request('importer', 1, '30 s')";
    let claimed: Option<Claimed> = diesel::sql_query(claim)
        .get_result(conn)
        .optional()
        .unwrap();
    claimed.map(|row| row.id)
}

fn complete_in_sql(conn: &mut PgConnection, id: i64) -> bool {
    let complete = format!("resource_control.complete_service_request({id})");
    let completed = diesel::select(sql::<Bool>(&complete)).get_result(conn);
    completed.unwrap()
}

#[test]
fn a_waiter_for_a_slot_holds_no_connection() {
    let database = database();
    let pool = database.pool(1);
    let permit = ONE.try_acquire(&pool).unwrap().expect_acquired();
    std::thread::scope(|scope| {
        let (asked, has_asked) = std::sync::mpsc::channel();
        let pool = &pool;
        let waiter = scope.spawn(move || {
            assert!(ONE.try_acquire(pool).unwrap().is_full());
            asked.send(()).unwrap();
            let timeout = Duration::from_secs(20);
            ONE.acquire_timeout(pool, timeout)
                .unwrap()
                .expect_acquired()
        });
        has_asked.recv().unwrap();
        permit.release().unwrap(); // on the only connection
        waiter.join().unwrap().release().unwrap();
    });
}

#[test]
fn a_wait_for_a_slot_that_stays_taken_is_busy() {
    let database = database();
    let pool = database.pool(1);
    let _permit = ONE.try_acquire(&pool).unwrap().expect_acquired();
    // The timeout includes the check-out, which takes long on a busy machine.
    let timeout = Duration::from_millis(300);
    assert!(ONE.acquire_timeout(&pool, timeout).unwrap().is_full());
}

#[test]
fn a_dropped_permit_waits_for_no_connection_and_its_slot_comes_back() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let permit = ONE.try_acquire(&pool).unwrap().expect_acquired();
    let only = pool.get().unwrap(); // a drop that waited would wait for this one
    drop(permit);
    assert_eq!(monitor::slots(conn, "importer", 1).unwrap().in_flight, 1);
    drop(only);
    eventually("the slot is free", || {
        monitor::slots(conn, "importer", 1).unwrap().free == [0]
    });
}

#[test]
fn a_server_that_hangs_delays_no_release_on_another() {
    let hanging = Database::new();
    migrations::install(&mut hanging.connect()).unwrap();
    let proxy = RoundTrips::in_front_of(&hanging);
    let hanging_pool = silent_pool(&proxy, 1);
    let permit = ONE.try_acquire(&hanging_pool).unwrap().expect_acquired();
    let only = hanging_pool.get().unwrap();
    drop(permit); // left to the thread of this pool
    proxy.cut();
    drop(only);
    eventually("the thread tries to deliver it", || {
        idle_connections(&hanging_pool) == 0
    });

    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let permit = ONE.try_acquire(&pool).unwrap().expect_acquired();
    let only = pool.get().unwrap();
    drop(permit);
    drop(only);
    eventually("the slot is free", || {
        monitor::slots(conn, "importer", 1).unwrap().free == [0]
    });
    proxy.restore();
}

#[test]
fn a_release_that_fails_is_retried_less_and_less_often() {
    static TRIES: AtomicU32 = AtomicU32::new(0);
    let count = |event: InstrumentationEvent<'_>| {
        if let InstrumentationEvent::StartQuery { query, .. } = event {
            if query.to_string().contains("complete_service_request(") {
                TRIES.fetch_add(1, Ordering::SeqCst);
            }
        }
    };
    let database = database();
    let (pool, conn) = (
        instrumented_pool(&database, 1, count),
        &mut database.connect(),
    );
    let brief = Semaphore::named("importer", 1, Duration::from_secs(1));
    let permit = brief.try_acquire(&pool).unwrap().expect_acquired();
    // As after a failover that made the server a standby.
    let read_only = "SET default_transaction_read_only = on";
    pool.get().unwrap().batch_execute(read_only).unwrap();
    drop(permit);
    eventually("the permit has timed out", || {
        monitor::slots(conn, "importer", 1).unwrap().free == [0]
    });
    let tries = TRIES.load(Ordering::SeqCst);
    // A retry every ten milliseconds would be some ninety.
    assert!((1..30).contains(&tries), "{tries}");
}

#[test]
fn the_tokens_of_a_slot_ascend_also_over_one_that_was_lost() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let mut last = 0;
    for _ in 0..3 {
        let released = ONE.try_acquire(&pool).unwrap().expect_acquired();
        assert!(released.fencing_token() > last);
        last = released.fencing_token();
        released.release().unwrap();

        let lost = ONE.try_acquire(&pool).unwrap().expect_acquired();
        assert!(lost.fencing_token() > last);
        last = lost.into_claim().id; // nobody releases it
        expire(conn, "importer");
    }
}

#[test]
fn a_late_completion_by_another_process_says_so_and_changes_nothing() {
    let database = database();
    let conn = &mut database.connect();
    let claim = ONE.claim_on(conn).unwrap().expect_acquired();
    expire(conn, "importer");
    assert_eq!(ONE.renew_on(conn, claim.id).unwrap(), None);
    let next = ONE.claim_on(conn).unwrap().expect_acquired();
    assert!(!ONE.complete_on(conn, claim.id).unwrap());
    assert!(ONE.claim_on(conn).unwrap().is_full());
    assert!(ONE.complete_on(conn, next.id).unwrap());
    assert!(!ONE.complete_on(conn, next.id).unwrap());
}

#[test]
fn a_request_that_an_operator_keeps_for_ever_is_renewed() {
    let database = database();
    let conn = &mut database.connect();
    let claim = ONE.claim_on(conn).unwrap().expect_acquired();
    conn.batch_execute("UPDATE resource_control.service_request SET expires_at = 'infinity'")
        .unwrap();
    let renewed = ONE.renew_on(conn, claim.id).unwrap();
    assert_eq!(renewed, Some(chrono::DateTime::<chrono::Utc>::MAX_UTC));
    assert!(ONE.complete_on(conn, claim.id).unwrap());

    let pool = database.pool(1);
    let mut permit = ONE.try_acquire(&pool).unwrap().expect_acquired();
    conn.batch_execute(
        "UPDATE resource_control.service_request SET expires_at = 'infinity' WHERE completed_at IS NULL",
    )
    .unwrap();
    let expires_at = permit.renew().unwrap();
    assert_eq!(expires_at, chrono::DateTime::<chrono::Utc>::MAX_UTC);
    assert_eq!(permit.claim().expires_at, expires_at);
    permit.release().unwrap();
}

#[test]
fn a_permits_renewal_never_shortens() {
    let database = database();
    let conn = &mut database.connect();
    let long = Semaphore::named("importer", 1, Duration::from_secs(3600));
    let short = Semaphore::named("importer", 1, Duration::from_secs(60));
    let mut permit = short
        .try_acquire(&database.pool(1))
        .unwrap()
        .expect_acquired();
    let extended = long
        .renew_on(conn, permit.fencing_token())
        .unwrap()
        .unwrap();
    assert_eq!(permit.renew().unwrap(), extended);
}

#[test]
fn the_slots_are_the_same_from_sql() {
    let database = database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let id = claim_in_sql(conn).expect("it is free");
    assert!(ONE.try_acquire(&pool).unwrap().is_full());
    assert_eq!(claim_in_sql(conn), None);

    let renewed = format!("resource_control.renew_service_request({id}, '1 hour') IS NOT NULL");
    let renewed: QueryResult<bool> = diesel::select(sql::<Bool>(&renewed)).get_result(conn);
    assert_eq!(renewed, Ok(true));
    assert!(complete_in_sql(conn, id));
    assert!(!complete_in_sql(conn, id));

    let permit = ONE.try_acquire(&pool).unwrap().expect_acquired();
    assert!(permit.fencing_token() > id);
    assert!(complete_in_sql(conn, permit.fencing_token()));
    assert_matches!(permit.release(), Err(Error::TimedOut { .. }));

    for (age, expected) in [("30 days", 0), ("0 s", 2)] {
        let prune = format!("resource_control.prune_service_requests('{age}', 10000)");
        let pruned: QueryResult<i32> = diesel::select(sql::<Integer>(&prune)).get_result(conn);
        assert_eq!(pruned, Ok(expected));
    }
}

#[test]
fn the_table_refuses_a_second_holder_of_a_slot() {
    let database = database();
    let conn = &mut database.connect();
    let insert = "INSERT INTO resource_control.service_request \
                  (service, slot, created_at, expires_at) \
                  VALUES ('importer', 0, now(), now() + '30 s')";
    diesel::sql_query(insert).execute(conn).unwrap();
    assert!(ONE.claim_on(conn).unwrap().is_full());
    let second = diesel::sql_query(insert).execute(conn);
    assert_matches!(
        second,
        Err(DieselError::DatabaseError(
            DatabaseErrorKind::UniqueViolation,
            _
        ))
    );
}
