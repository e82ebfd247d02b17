//! `COPY` on a connection that a lock, or another primitive, uses afterwards.
//!
//! Diesel leaves the end of a `COPY TO` in libpq, even if the caller read all of it. libpq then refuses to send the next
//! prepared statement.

use std::io::{BufRead, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use diesel::connection::{SimpleConnection, TransactionManager};
use diesel_migrations::FileBasedMigrations;

use crate::half::prelude::*;
use crate::half::{
    AdvisoryLock, AnsiTransactionManager, Database, Error, Fence, RoundTrips, Semaphore, Throttle,
    error::Misplaced, migrations, monitor, silent_pool, sync, throttled_resources,
};
use crate::semaphores::database;
use crate::support::{
    Expect, Observer, assert_matches, assert_pool_whole, backend_pid, foreign_session_holding,
    is_granted,
};

diesel::table! { copied (id) { id -> Integer } }

throttled_resources! {
    enum Resource { Mail = "mail" every Duration::from_secs(60) }
}

static LOCK: AdvisoryLock = AdvisoryLock::named("copies");
static INNER: AdvisoryLock = AdvisoryLock::named("copies, inner");

/// The ways in which libpq is left in the middle of a `COPY`.
const COPIES: [fn(&mut PgConnection); 3] =
    [copy_to_the_end, copy_to_the_first_row, panic_in_copy_from];

fn make_table(conn: &mut PgConnection) {
    conn.batch_execute(
        "CREATE TABLE IF NOT EXISTS copied (id int PRIMARY KEY); \
         INSERT INTO copied SELECT generate_series(1, 1000) ON CONFLICT DO NOTHING",
    )
    .unwrap();
}

fn copy_to_the_end(conn: &mut PgConnection) {
    make_table(conn);
    let mut text = String::new();
    diesel::copy_to(copied::table)
        .load_raw(conn)
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text.lines().count(), 1000);
}

fn copy_to_the_first_row(conn: &mut PgConnection) {
    make_table(conn);
    let mut text = String::new();
    let mut rows = diesel::copy_to(copied::table).load_raw(conn).unwrap();
    rows.read_line(&mut text).unwrap();
    assert_eq!(text, "1\n");
}

fn panic_in_copy_from(conn: &mut PgConnection) {
    make_table(conn);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        let _ = diesel::copy_from(copied::table)
            .from_raw_data(copied::table, |_| -> QueryResult<()> {
                panic!("in the closure")
            })
            .execute(conn);
    }));
    assert!(caught.is_err());
}

/// libpq refuses to send statements that were prepared before.
fn prepare_all(conn: &mut PgConnection) {
    for lock in [&LOCK, &INNER] {
        let mut guard = lock.acquire_on(conn).unwrap();
        assert!(guard.is_held().unwrap());
        let _token = guard.fencing_token().unwrap();
        guard.release().unwrap();
    }
}

#[test]
fn a_pooled_lock_is_released_after_a_copy_however_often_its_connection_was_used() {
    for copy in COPIES {
        let database = database();
        let pool = database.pool(1);
        let pid = backend_pid(&mut pool.get().unwrap());
        for _ in 0..3 {
            LOCK.with(&pool, |conn| {
                copy(conn);
                Ok::<_, Error>(())
            })
            .unwrap();
            assert_eq!(Observer::of(&database).all_held(), 0);
        }
        assert_eq!(backend_pid(&mut pool.get().unwrap()), pid);
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_copy_costs_the_release_one_more_round_trip() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let mut guard = LOCK.acquire(&pool).unwrap();
    make_table(guard.conn());
    guard.release().unwrap();
    let mut guard = LOCK.acquire(&pool).unwrap();
    copy_to_the_end(guard.conn());
    assert_eq!(proxy.count(|| guard.release().unwrap()), 2);
}

#[test]
fn a_guard_tells_after_a_copy_that_its_lock_is_held() {
    for copy in COPIES {
        let database = database();
        let pool = database.pool(2);
        let conn = &mut database.connect();
        prepare_all(conn);
        let mut guard = LOCK.acquire_on(conn).unwrap();
        copy(guard.conn());
        assert!(guard.is_held().unwrap());
        copy(guard.conn());
        assert!(guard.fencing_token().unwrap() > 0);
        for _ in 0..2 {
            copy(guard.conn());
            let watch = guard.watch(&pool, Duration::from_secs(60)).unwrap();
            assert!(!watch.is_lost());
        }
        guard.release().unwrap();
    }
}

#[test]
fn a_borrowed_lock_is_released_after_a_copy_and_its_connection_is_whole() {
    for copy in COPIES {
        let database = database();
        let conn = &mut database.connect();
        prepare_all(conn);
        for by_drop in [false, true] {
            let mut guard = LOCK.acquire_on(conn).unwrap();
            copy(guard.conn());
            if by_drop {
                drop(guard);
            } else {
                guard.release().unwrap();
            }
            assert_eq!(Observer::of(&database).all_held(), 0);
            assert!(!AnsiTransactionManager::is_broken_transaction_manager(conn));
        }
    }
}

#[test]
fn a_nested_lock_is_released_after_a_copy_and_nothing_stays_in_the_pool() {
    for copy in COPIES {
        let database = database();
        let pool = database.pool(1);
        prepare_all(&mut pool.get().unwrap());
        let mut outer = LOCK.acquire(&pool).unwrap();
        let mut inner = INNER.acquire_on(outer.conn()).unwrap();
        copy(inner.conn());
        inner.release().unwrap();
        outer.conn().batch_execute("SELECT 1").unwrap();
        outer.release().unwrap();
        assert_eq!(Observer::of(&database).all_held(), 0);
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_lock_is_taken_after_a_copy() {
    for copy in COPIES {
        let database = database();
        let conn = &mut database.connect();
        prepare_all(conn);
        copy(conn);
        LOCK.try_acquire_on(conn)
            .unwrap()
            .expect_acquired()
            .release()
            .unwrap();
        let fenced = LOCK.clone().fenced();
        for _ in 0..2 {
            copy(conn);
            let guard = fenced.try_acquire_on(conn).unwrap().expect_acquired();
            guard.release().unwrap();
        }
        let held = LOCK.key().id().unwrap();
        let holder = foreign_session_holding(&database, held);
        copy(conn);
        let timeout = Duration::from_millis(5);
        assert!(LOCK.acquire_timeout_on(conn, timeout).unwrap().is_busy());
        drop(holder);
        copy(conn);
        LOCK.acquire_on(conn).unwrap().release().unwrap();
    }
}

#[test]
fn a_raw_transaction_is_seen_through_a_copy() {
    for copy in [copy_to_the_end, copy_to_the_first_row] {
        let database = database();
        let pool = database.pool(1);
        let conn = &mut database.connect();
        prepare_all(conn);
        make_table(conn);
        prepare_all(&mut pool.get().unwrap());

        let mut guard = LOCK.acquire_on(conn).unwrap();
        guard.conn().batch_execute("BEGIN").unwrap();
        copy(guard.conn());
        let released = guard.release();
        assert_matches!(released, Err(Error::TransactionLeftOpen { .. }));
        copy(conn);
        let refused = LOCK.try_acquire_on(conn).map(drop);
        assert_matches!(
            refused,
            Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
        );
        assert_eq!(Observer::of(&database).all_held(), 0);
        conn.batch_execute("CREATE TABLE later (); COMMIT").unwrap();

        let mut guard = LOCK.acquire(&pool).unwrap();
        let pid = guard.backend_pid();
        guard.conn().batch_execute("BEGIN").unwrap();
        copy(guard.conn());
        let released = guard.release();
        assert_matches!(released, Err(Error::TransactionLeftOpen { .. }));
        let mut observer = Observer::of(&database);
        observer.assert_ended(pid);
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_session_that_ended_after_a_copy_is_still_found_to_have_ended() {
    for copy in COPIES {
        let database = database();
        let pool = database.pool(1);
        prepare_all(&mut pool.get().unwrap());
        let mut observer = Observer::of(&database);
        let mut guard = LOCK.acquire(&pool).unwrap();
        copy(guard.conn());
        observer.kill(guard.backend_pid());
        assert!(!guard.is_held().unwrap());
        let token = guard.fencing_token();
        assert_matches!(token, Err(Error::LockLost { .. }));
        let released = guard.release();
        assert_matches!(released, Err(Error::LockLost { .. }));
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_transaction_lock_is_taken_after_a_copy() {
    for copy in [copy_to_the_end, copy_to_the_first_row] {
        let database = database();
        let conn = &mut database.connect();
        make_table(conn);
        for _ in 0..2 {
            conn.transaction(|conn| {
                copy(conn);
                LOCK.acquire_xact(conn)?;
                copy(conn);
                assert!(!LOCK.try_acquire_xact(conn)?.is_busy());
                copy(conn);
                let timeout = Duration::from_millis(5);
                assert!(!LOCK.acquire_xact_timeout(conn, timeout)?.is_busy());
                Ok::<_, Error>(())
            })
            .unwrap();
        }
    }
}

#[test]
fn the_other_primitives_work_after_a_copy() {
    for copy in COPIES {
        let database = database();
        let conn = &mut database.connect();
        let _ = sync::<Resource>(conn).unwrap();
        let semaphore = Semaphore::named("copies", 4, Duration::from_secs(60));
        let mail = Throttle::of(Resource::Mail);
        for round in 0..2 {
            copy(conn);
            let claim = semaphore.claim_on(conn).unwrap().admitted().unwrap();
            copy(conn);
            assert!(semaphore.renew_on(conn, claim.id).unwrap().is_some());
            copy(conn);
            assert!(semaphore.complete_on(conn, claim.id).unwrap());
            copy(conn);
            assert_eq!(is_granted(conn, &mail, "me"), round == 0);
            copy(conn);
            assert!(is_granted(conn, &mail.key(round), "me"));
            copy(conn);
            assert!(monitor::holders_of(conn, LOCK.key()).unwrap().is_empty());
            copy(conn);
            assert!(monitor::waiters_of(conn, LOCK.key()).unwrap().is_empty());
            copy(conn);
            assert_eq!(monitor::slots(conn, "copies", 4).unwrap().in_flight, 0);
            copy(conn);
            let _ = sync::<Resource>(conn).unwrap();
        }
    }
    for copy in [copy_to_the_end, copy_to_the_first_row] {
        let database = database();
        let conn = &mut database.connect();
        make_table(conn);
        for token in 1..3 {
            conn.transaction(|conn| {
                copy(conn);
                Fence::named("copied").pass(conn, token)
            })
            .unwrap();
        }
    }
}

#[test]
fn a_claim_in_a_raw_transaction_is_refused_though_a_copy_went_before() {
    let database = database();
    let conn = &mut database.connect();
    make_table(conn);
    let semaphore = Semaphore::named("copies", 4, Duration::from_secs(60));
    let claim = semaphore.claim_on(conn).unwrap().admitted().unwrap();
    assert!(semaphore.complete_on(conn, claim.id).unwrap());
    conn.batch_execute("BEGIN").unwrap();
    copy_to_the_end(conn);
    let refused = semaphore.claim_on(conn).map(drop);
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::ClaimInTransaction))
    );
    conn.batch_execute("COMMIT").unwrap();
}

#[test]
fn migrations_work_though_a_copy_went_before() {
    for copy in COPIES {
        let database = Database::new();
        let conn = &mut database.connect();
        copy(conn);
        assert!(!migrations::install(conn).unwrap().is_empty());
        copy(conn);
        assert!(migrations::install(conn).unwrap().is_empty());
        let directory = std::env::temp_dir().join(format!("copies-{}", database.name()));
        std::fs::create_dir_all(&directory).unwrap();
        for _ in 0..2 {
            let source = FileBasedMigrations::from_path(&directory).unwrap();
            copy(conn);
            assert!(migrations::run_pending(conn, source).unwrap().is_empty());
        }
        std::fs::remove_dir_all(&directory).unwrap();
        copy(conn);
        assert!(migrations::take_over(conn).unwrap().is_empty());
        copy(conn);
        assert!(!migrations::uninstall(conn).unwrap().is_empty());
    }
}

#[cfg(feature = "testing")]
#[test]
fn the_helpers_of_tests_work_though_a_copy_went_before() {
    use crate::half::testing;

    for copy in COPIES {
        let database = database();
        let conn = &mut database.connect();
        let _ = sync::<Resource>(conn).unwrap();
        let semaphore = Semaphore::named("copies", 4, Duration::from_secs(60));
        let throttle = Throttle::of(Resource::Mail).key(7);
        for _ in 0..2 {
            copy(conn);
            assert!(testing::held_locks(conn).unwrap().is_empty());
            copy(conn);
            assert!(testing::requests_in_flight(conn).unwrap().is_empty());
            copy(conn);
            testing::assert_nothing_held(conn);
            copy(conn);
            testing::assert_not_held(conn, &LOCK);
            copy(conn);
            testing::assert_none_in_flight(conn, &semaphore);
            copy(conn);
            assert_eq!(testing::expire(conn, &semaphore).unwrap(), 0);
            copy(conn);
            testing::make_due(conn, &throttle).unwrap();
        }
    }
}
