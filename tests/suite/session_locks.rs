//! Session locks: exclusive and shared holders, refusals, and settings of the session.

use std::sync::Barrier;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Error, IS_ASYNC, LockKey, PgPool, Result, begin, check_exclusion, end, execute,
    make_pool, on_all, on_one, pool, unchecked_pool, wait,
};
use crate::support::{
    Observer, Wanted, assert_pool_whole, eventually, foreign_holder, foreign_try, once_at_least,
    run,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("session");

fn locks() -> [AdvisoryLock; 5] {
    [
        LOCK.clone(),
        LOCK.key("a key"),
        AdvisoryLock::new(LockKey::bigint(i64::MIN)),
        AdvisoryLock::new(LockKey::pair(i32::MIN, -1)),
        AdvisoryLock::new(LockKey::crc32("name")),
    ]
}

#[test]
fn an_exclusive_lock_has_one_holder_and_all_others_are_refused() {
    let database = Database::new();
    let (pool, other) = (pool(&database, 2), pool(&database, 1));
    for lock in locks() {
        let guard = wait(lock.try_acquire(&pool)).unwrap().acquired().unwrap();
        assert_eq!(guard.lock_key(), lock.lock_key());
        assert!(
            wait(lock.try_acquire(&pool)).unwrap().is_busy(),
            "by a caller of the same pool"
        );
        assert!(
            wait(lock.try_acquire(&other)).unwrap().is_busy(),
            "by a caller of another pool"
        );
        assert!(
            !foreign_try(&mut database.connect(), lock.lock_key()),
            "by a client in another language"
        );
        wait(guard.release()).unwrap();
        assert!(wait(lock.try_acquire(&other)).unwrap().is_acquired());
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn other_clients_hold_the_same_locks() {
    let database = Database::new();
    let pool = pool(&database, 1);
    for lock in locks() {
        let holder = foreign_holder(&database, lock.lock_key());
        assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
        drop(holder);
        let mut observer = Observer::of(&database);
        observer.assert_free(lock.lock_key());
        assert!(wait(lock.try_acquire(&pool)).unwrap().is_acquired());
    }
}

#[test]
fn a_lock_has_several_shared_holders_or_one_exclusive_holder() {
    let database = Database::new();
    let pool = pool(&database, 3);
    for lock in locks() {
        let shared = lock.clone().shared();
        let first = wait(shared.try_acquire(&pool)).unwrap().acquired().unwrap();
        let second = wait(shared.try_acquire(&pool)).unwrap().acquired().unwrap();
        assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
        wait(first.release()).unwrap();
        assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
        wait(second.release()).unwrap();
        let alone = wait(lock.try_acquire(&pool)).unwrap().acquired().unwrap();
        assert!(wait(shared.try_acquire(&pool)).unwrap().is_busy());
        wait(alone.release()).unwrap();
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_lock_excludes_under_contention() {
    let database = Database::new();
    let (inside, barrier) = (AtomicI32::new(0), Barrier::new(8));
    thread::scope(|scope| {
        for number in 0..8 {
            let (inside, barrier, database) = (&inside, &barrier, &database);
            scope.spawn(move || {
                let pool = pool(database, 2);
                barrier.wait();
                for round in 0..20 {
                    let guard = if (number + round) % 2 == 0 {
                        wait(LOCK.acquire(&pool)).unwrap()
                    } else {
                        match wait(LOCK.acquire_timeout(&pool, Duration::from_secs(60)))
                            .unwrap()
                            .acquired()
                        {
                            Some(guard) => guard,
                            None => panic!("the lock was not acquired within a minute"),
                        }
                    };
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    if round % 3 == 0 {
                        drop(guard);
                    } else {
                        wait(guard.release()).unwrap();
                    }
                }
                assert_pool_whole(&pool, database);
            });
        }
    });
}

#[test]
fn inside_a_transaction_a_session_lock_is_an_error() {
    let database = Database::new();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(
            wait(LOCK.try_with_on(conn, work!(|_conn| Ok::<_, Error>(())))),
            Err(Error::InsideTransaction)
        );
        end(conn);
        assert!(
            wait(LOCK.try_with_on(conn, work!(|_conn| Ok::<_, Error>(()))))
                .unwrap()
                .is_acquired()
        );
    });
    if !IS_ASYNC {
        on_one(&pool, |conn| wait(execute(conn, "BEGIN")).unwrap());
        assert_matches!(wait(LOCK.try_acquire(&pool)), Err(Error::InsideTransaction));
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn bad_names_are_refused_before_anything_is_sent() {
    let unreachable = make_pool(
        "postgres://nobody@127.0.0.1:1/none",
        1,
        Duration::from_millis(10),
    );
    for lock in [
        AdvisoryLock::named(""),
        AdvisoryLock::named("nul \0"),
        LOCK.key(""),
        LOCK.key(7).shared().key(""),
        LOCK.key("x".repeat(1000)),
        LOCK.key("nul \0"),
        AdvisoryLock::new(LockKey::parts([""; 0])),
        AdvisoryLock::new(LockKey::bigint(1)).key("of a number"),
        AdvisoryLock::new(LockKey::pair(1, 2)).key("of a pair"),
    ] {
        assert_matches!(wait(lock.try_acquire(&unreachable)), Err(Error::Input(_)));
        assert_matches!(wait(lock.acquire(&unreachable)), Err(Error::Input(_)));
        assert_matches!(
            wait(lock.acquire_timeout(&unreachable, Duration::ZERO)),
            Err(Error::Input(_))
        );
    }
    let error = wait(LOCK.try_acquire(&unreachable)).unwrap_err();
    assert_matches!(error, Error::Pool(_));
    assert!(error.is_unavailable());
}

#[test]
fn a_pooled_session_that_has_ended_is_replaced() {
    let database = Database::new();
    let pool = unchecked_pool(&database, 1);
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    let pid = guard.backend_pid();
    wait(guard.release()).unwrap();
    Observer::of(&database).kill(pid);
    let guard = wait(LOCK.try_acquire(&pool)).unwrap().acquired().unwrap();
    assert_ne!(guard.backend_pid(), pid);
    wait(guard.release()).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn on_a_standby_a_session_lock_is_an_error() {
    let cluster = Cluster::start();
    let standby = cluster.standby();
    let pool = make_pool(&standby.url("postgres"), 2, Duration::from_secs(20));
    for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
        assert_matches!(wait(lock.try_acquire(&pool)), Err(Error::Standby));
        assert_matches!(
            wait(lock.acquire_timeout(&pool, Duration::from_secs(60))),
            Err(Error::Standby)
        );
    }
    assert_matches!(wait(check_exclusion(&pool)), Err(Error::Standby));
}

#[test]
fn session_locks_exclude_on_a_pool_without_a_pooler() {
    let database = Database::new();
    let pool = pool(&database, 2);
    wait(check_exclusion(&pool)).unwrap();
    assert_pool_whole(&pool, &database);
    let mut observer = Observer::of(&database);
    eventually("the pool has its two sessions", || observer.sessions() == 2);
}

#[test]
fn a_lock_works_under_every_setting_of_the_session() {
    for settings in [
        "search_path = ''",
        "standard_conforming_strings = off",
        "default_transaction_isolation = serializable",
        "default_transaction_isolation = 'repeatable read'",
        "statement_timeout = '100ms'",
        "lock_timeout = '1ms'",
        "bytea_output = escape",
        "datestyle = 'German'",
        "client_min_messages = error",
        "plan_cache_mode = force_generic_plan",
        "jit_above_cost = 0",
        "enable_seqscan = off",
    ] {
        let database = Database::new();
        let alter = format!("ALTER DATABASE {} SET {settings}", database.name());
        run(&mut database.connect(), &alter);
        // The pool has a spare connection, so a wait takes place on the server.
        let pool = pool(&database, 3);
        on_one(&pool, |_| on_one(&pool, |_| on_one(&pool, |_| ())));
        for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
            // On a slow machine the session's own timeout may cancel any statement, so rounds are
            // repeated.
            once_at_least(settings, || is_taken_and_refused(&lock, &pool).is_ok());
        }
        eventually("the timeout is off", || {
            wait(on_all(&pool, "SET statement_timeout = 0")).is_ok()
        });
        assert_pool_whole(&pool, &database);
    }
}

/// Takes and releases the lock in every way, and is refused it in every way.
fn is_taken_and_refused(lock: &AdvisoryLock, pool: &PgPool) -> Result<()> {
    let mut guard = wait(lock.acquire(pool))?;
    // On a slow machine no try has a reply in time.
    eventually("the lock is busy", || {
        let waited = wait(lock.acquire_timeout(pool, Duration::from_millis(300)));
        waited.is_ok_and(|attempt| attempt.is_busy())
    });
    assert!(wait(guard.is_held())?);
    wait(guard.release())?;
    let attempt = wait(lock.acquire_timeout(pool, Duration::from_secs(20)))?;
    wait(attempt.acquired().expect("the lock is free").release())?;
    on_one(pool, |conn| {
        wait(lock.transaction(conn, work!(|_conn| Ok(()))))
    })
}
