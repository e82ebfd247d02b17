//! What a session lock excludes, and what it returns.

use std::sync::Barrier;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{AdvisoryLock, Attempt, Database, Error, LockId, LockKey, error::Input};
use crate::support::{
    Expect, Observer, assert_after_drop, assert_matches, backend_pid, foreign_session_holding,
    foreign_try,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("session lock");

#[test]
fn a_try_excludes_another_session_and_never_waits() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut observer = Observer::of(&database);

    let guard = LOCK.try_acquire(&pool).unwrap().expect_acquired();
    assert_eq!(observer.holders(LOCK.key()), 1);
    assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    assert_eq!(observer.waiters(LOCK.key()), 0);

    guard.release().unwrap();
    assert_eq!(observer.holders(LOCK.key()), 0);
    assert!(LOCK.try_acquire(&pool).unwrap().acquired().is_some());
}

#[test]
fn every_kind_of_key_excludes_foreign_clients_in_both_directions() {
    let database = Database::new();
    let pool = database.pool(1);
    for key in [
        LockKey::named("nightly report"),
        LockKey::parts([223, 345]),
        LockKey::bigint(0),
        LockKey::bigint(-1),
        LockKey::bigint(i64::MIN),
        LockKey::bigint(i64::MAX),
        LockKey::pair(0, 0),
        LockKey::pair(-1, -1),
        LockKey::pair(i32::MIN, i32::MAX),
        LockKey::crc32("job 4008307722"),
        LockKey::times31("nightly report"),
        LockKey::with_advisory_lock("nightly report"),
        LockKey::django_pglocks_1("nightly report"),
    ] {
        let id = key.id().unwrap();
        let lock = AdvisoryLock::new(key);
        let foreign = foreign_session_holding(&database, id);
        assert!(lock.try_acquire(&pool).unwrap().is_busy(), "{lock:?}");
        let waited = lock
            .acquire_timeout(&pool, Duration::from_millis(50))
            .unwrap();
        assert!(waited.is_busy(), "{lock:?}");
        drop(foreign);

        let mut guard = lock.acquire(&pool).unwrap();
        assert!(guard.is_held().unwrap(), "{lock:?}");
        let mut other = database.connect();
        assert!(!foreign_try(&mut other, id), "{lock:?}");
        guard.release().unwrap();
        assert!(foreign_try(&mut other, id), "{lock:?}");
    }
}

#[test]
fn a_bigint_and_a_pair_never_meet() {
    let database = Database::new();
    let pool = database.pool(2);
    let bigint = AdvisoryLock::new(LockKey::bigint((7 << 32) | 9));
    let pair = AdvisoryLock::new(LockKey::pair(7, 9));
    let _one = bigint.try_acquire(&pool).unwrap().expect_acquired();
    let _other = pair.try_acquire(&pool).unwrap().expect_acquired();
}

#[test]
fn sharers_share_and_exclude_the_exclusive() {
    let database = Database::new();
    let pool = database.pool(3);
    let mut observer = Observer::of(&database);
    let shared = LOCK.clone().shared();

    let mut one = shared.try_acquire(&pool).unwrap().expect_acquired();
    let two = shared.acquire(&pool).unwrap();
    assert_eq!(observer.holders(LOCK.key()), 2);
    assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    assert!(one.is_held().unwrap());

    one.release().unwrap();
    assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    two.release().unwrap();
    assert_eq!(observer.holders(LOCK.key()), 0);

    let exclusive = LOCK.acquire(&pool).unwrap();
    assert!(shared.try_acquire(&pool).unwrap().is_busy());
    exclusive.release().unwrap();
}

#[test]
fn a_shared_pair_is_released_too() {
    let database = Database::new();
    let pool = database.pool(1);
    let lock = AdvisoryLock::new(LockKey::pair(1, 2)).shared();
    let guard = lock.try_acquire(&pool).unwrap().expect_acquired();
    let mut observer = Observer::of(&database);
    assert_eq!(observer.holders(lock.key()), 1);
    guard.release().unwrap();
    assert_eq!(observer.holders(lock.key()), 0);
}

#[test]
fn waiting_ends_when_the_holder_releases() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut observer = Observer::of(&database);
    let guard = LOCK.acquire(&pool).unwrap();

    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire(&pool).unwrap().backend_pid());
        while observer.waiters(LOCK.key()) == 0 {}
        let holder = guard.backend_pid();
        guard.release().unwrap();
        assert_ne!(waiter.join().unwrap(), holder);
    });
    assert_after_drop("the lock is free", || observer.holders(LOCK.key()) == 0);
}

#[test]
fn only_one_of_many_threads_is_inside_at_a_time() {
    const THREADS: i32 = 8;
    let database = Database::new();
    let pool = database.pool(THREADS as u32);
    let inside = AtomicI32::new(0);
    let done = AtomicI32::new(0);
    let start = Barrier::new(THREADS as usize);

    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                start.wait();
                for _ in 0..50 {
                    let guard = LOCK.acquire(&pool).unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    std::thread::yield_now();
                    assert_eq!(inside.fetch_sub(1, Ordering::SeqCst), 1);
                    guard.release().unwrap();
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(done.into_inner(), THREADS * 50);
}

#[test]
fn the_guard_lends_the_session_that_holds_the_lock() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = LOCK.acquire(&pool).unwrap();
    let pid = guard.backend_pid();
    assert_eq!(backend_pid(guard.conn()), pid);
    assert_eq!(guard.key(), LOCK.key());
    assert!(guard.is_held().unwrap());
}

#[test]
fn is_held_learns_that_the_lock_was_lost() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);

    let mut unlocked = LOCK.acquire(&pool).unwrap();
    diesel::sql_query("SELECT pg_advisory_unlock_all()")
        .execute(unlocked.conn())
        .unwrap();
    assert!(!unlocked.is_held().unwrap());
    assert_matches!(unlocked.release(), Err(Error::LockLost { .. }));

    let mut killed = LOCK.acquire(&pool).unwrap();
    observer.kill(killed.backend_pid());
    assert!(!killed.is_held().unwrap());
    assert!(!killed.is_held().unwrap(), "and again");
    assert_matches!(killed.release(), Err(Error::LockLost { .. }));
}

#[test]
fn a_failed_query_says_nothing_about_the_lock() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = LOCK.acquire(&pool).unwrap();
    guard
        .conn()
        .batch_execute("BEGIN; SELECT 1 / 0")
        .unwrap_err();
    assert_matches!(guard.is_held(), Err(Error::Database(_)));
    assert_matches!(guard.fencing_token(), Err(Error::Database(_)));
    guard.conn().batch_execute("ROLLBACK").unwrap();
    assert!(guard.is_held().unwrap());

    Observer::of(&database).kill(guard.backend_pid());
    let token = guard.fencing_token();
    assert_matches!(
        token,
        Err(Error::LockLost {
            source: Some(_),
            ..
        })
    );
}

#[test]
fn is_held_is_about_this_key_alone() {
    let database = Database::new();
    let mut conn = database.connect();
    let key = |upper: i64, lower: i64| LockId::BigInt(upper << 32 | lower);
    for other in [key(1, 3), key(3, 2), LockId::Pair(1, 2)] {
        let lock = AdvisoryLock::new(LockKey::bigint(1 << 32 | 2));
        let mut guard = lock.acquire_on(&mut conn).unwrap();
        assert!(foreign_try(guard.conn(), other));
        diesel::sql_query(format!("SELECT pg_advisory_unlock({})", key(1, 2)))
            .execute(guard.conn())
            .unwrap();
        assert!(!guard.is_held().unwrap(), "{other:?}");
        assert_matches!(guard.fencing_token(), Err(Error::LockLost { .. }));
        assert_matches!(guard.release(), Err(Error::LockLost { .. }));
        conn.batch_execute("SELECT pg_advisory_unlock_all()")
            .unwrap();
    }
}

#[test]
fn a_guard_is_shown_with_its_key() {
    let database = Database::new();
    let mut conn = database.connect();
    let guard = LOCK.acquire_on(&mut conn).unwrap();
    let shown = format!("{guard:?}");
    assert!(shown.contains(&LOCK.key().to_string()), "{shown}");
}

#[test]
fn is_held_is_about_the_mode_that_was_taken() {
    let database = Database::new();
    let mut conn = database.connect();
    let mut shared = LOCK.clone().shared().acquire_on(&mut conn).unwrap();
    let mut exclusive = LOCK.acquire_on(shared.conn()).unwrap();
    diesel::sql_query(format!(
        "SELECT pg_advisory_unlock({})",
        LOCK.key().id().unwrap()
    ))
    .execute(exclusive.conn())
    .unwrap();
    assert!(!exclusive.is_held().unwrap());
    assert!(exclusive.release().is_err());
    assert!(shared.is_held().unwrap());
    shared.release().unwrap();
}

#[test]
fn the_closure_form_runs_on_the_holding_session_and_releases() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);

    let (held, value) = LOCK
        .with(&pool, |conn| {
            diesel::sql_query("SELECT 1").execute(conn)?;
            QueryResult::Ok((observer.holders(LOCK.key()), 42))
        })
        .unwrap();
    assert_eq!((held, value), (1, 42));
    assert_eq!(observer.holders(LOCK.key()), 0);

    let failed: Result<(), _> = LOCK.with(&pool, |_| Err(diesel::result::Error::NotFound));
    assert_eq!(failed, Err(diesel::result::Error::NotFound));
    assert_eq!(observer.holders(LOCK.key()), 0);

    let mut conn = database.connect();
    let busy = LOCK
        .acquire_on(&mut conn)
        .unwrap()
        .run(|_| LOCK.try_acquire(&pool)?.run(|_| Ok::<_, Error>(1)));
    assert_eq!(busy.unwrap(), Attempt::Busy);
    // Long enough for a connection that a task of the asynchronous half gives back.
    let timeout = Duration::from_millis(200);
    let busy = LOCK.acquire_on(&mut conn).unwrap().run(|_| {
        LOCK.acquire_timeout(&pool, timeout)?
            .run(|_| Ok::<_, Error>(1))
    });
    assert_eq!(busy.unwrap(), Attempt::Busy);
    let ran = LOCK
        .try_acquire_on(&mut conn)
        .unwrap()
        .run(|_| Ok::<_, Error>(2));
    assert_eq!(ran.unwrap(), Attempt::Acquired(2));
    let ran = LOCK
        .acquire_timeout_on(&mut conn, timeout)
        .unwrap()
        .run(|_| Ok::<_, Error>(3));
    assert_eq!(ran.unwrap(), Attempt::Acquired(3));
    assert_eq!(observer.all_held(), 0);
}

#[test]
fn work_done_under_a_lock_that_was_lost_is_an_error() {
    let database = Database::new();
    let pool = database.pool(1);
    let lost: Result<(), Error> = LOCK.with(&pool, |conn| {
        diesel::sql_query("SELECT pg_advisory_unlock_all()").execute(conn)?;
        Ok(())
    });
    assert_matches!(lost, Err(Error::LockLost { .. }));
}

#[test]
fn bad_names_are_refused_before_the_pool_is_asked() {
    let database = Database::new();
    let pool = database.pool(1);
    let _taken = pool.get().unwrap();
    let nameless = AdvisoryLock::named("");
    assert_matches!(
        nameless.try_acquire(&pool),
        Err(Error::Input(Input::EmptyName))
    );
    assert_matches!(nameless.acquire(&pool), Err(Error::Input(Input::EmptyName)));
    let timeout = Duration::from_secs(60);
    let waited = nameless.acquire_timeout(&pool, timeout);
    assert_matches!(waited, Err(Error::Input(Input::EmptyName)));
}

#[test]
fn names_of_any_content_and_length_work() {
    let database = Database::new();
    let pool = database.pool(1);
    for name in [
        "\0",
        "'; DROP TABLE users; --",
        "$interlock$",
        "💡",
        " ",
        &"x".repeat(1 << 20),
    ] {
        let lock = AdvisoryLock::new(LockKey::from(name));
        let guard = lock.acquire(&pool).unwrap();
        guard.release().unwrap();
    }
}
