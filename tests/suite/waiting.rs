//! Waiting for a session lock: what ends a wait, and what a wait leaves to other sessions.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::{AdvisoryLock, Error, make_pool, on_one, pool, wait};
use crate::support::{
    Observer, Wanted, assert_pool_whole, eventually, foreign_holder, impatient_pool, once_at_least,
    patiently, run,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("waiting");

#[test]
fn a_release_by_another_session_ends_the_wait() {
    let database = Database::new();
    for size in [2, 3] {
        let pool = pool(&database, size);
        // bb8 counts only open connections, so open them all.
        on_one(&pool, |_| on_one(&pool, |_| ()));
        let holder = foreign_holder(&database, LOCK.lock_key());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(LOCK.acquire(&pool)).unwrap());
            let mut observer = Observer::of(&database);
            eventually("the lock is awaited on the server", || {
                observer.waiters(LOCK.lock_key()) == 1
            });
            drop(holder);
            wait(waiting.join().unwrap().release()).unwrap();
        });
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn after_a_timeout_nothing_is_held() {
    let database = Database::new();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    for wanted in Wanted::one_and_several(&LOCK) {
        let holder = wanted.foreign_holder(&database);
        for milliseconds in [0, 1, 9, 15, 50, 250] {
            let timeout = Duration::from_millis(milliseconds);
            match wait(wanted.lock.acquire_timeout(&pool, timeout)) {
                Ok(attempt) => assert!(attempt.is_busy()),
                // On a slow machine not even the first try has a reply in time.
                Err(error) => assert_matches!(error, Error::TimedOut | Error::Pool(_)),
            }
        }
        eventually("nobody waits", || observer.waiters(wanted.key()) == 0);
        eventually("only the foreign session holds a lock", || {
            observer.all_held() == 1
        });
        drop(holder);
        wait(wait(wanted.lock.acquire(&pool)).unwrap().release()).unwrap();
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn timeouts_that_race_with_releases_leave_nothing() {
    let database = Database::new();
    let holders = pool(&database, 1);
    let pool = pool(&database, 4);
    thread::scope(|scope| {
        let holding = scope.spawn(|| {
            for _ in 0..60 {
                let guard = wait(LOCK.acquire(&holders)).unwrap();
                thread::sleep(Duration::from_millis(2));
                wait(guard.release()).unwrap();
            }
        });
        for _ in 0..6 {
            scope.spawn(|| {
                let mut acquired = 0;
                // The timeouts grow, so that each thread acquires the lock at last.
                for round in 0.. {
                    if round >= 40 && acquired > 0 {
                        break;
                    }
                    let timeout = Duration::from_micros(500 * round);
                    match wait(LOCK.acquire_timeout(&pool, timeout)) {
                        Ok(attempt) => {
                            if let Some(guard) = attempt.acquired() {
                                acquired += 1;
                                wait(guard.release()).unwrap();
                            }
                        }
                        Err(error) => assert_matches!(error, Error::TimedOut | Error::Pool(_)),
                    }
                }
            });
        }
        holding.join().unwrap();
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn waiters_of_a_process_hold_one_connection() {
    let database = Database::new();
    let pool = pool(&database, 4);
    on_one(&pool, |_| on_one(&pool, |_| ()));
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    let mut observer = Observer::of(&database);
    thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap());
        }
        eventually("the oldest waits on the server", || {
            observer.waiters(LOCK.lock_key()) == 1
        });
        for _ in 0..50 {
            assert!(observer.waiters(LOCK.lock_key()) <= 1);
            // The pool has a free connection for other callers.
            wait(crate::half::on_first(&pool, "SELECT 1")).unwrap();
        }
        wait(guard.release()).unwrap();
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn an_exhausted_pool_fails_a_wait_with_a_timeout() {
    let database = Database::new();
    let pool = impatient_pool(&database, Duration::from_millis(300));
    let guard = patiently(|| wait(AdvisoryLock::named("another").acquire(&pool)));
    let waited = wait(LOCK.acquire_timeout(&pool, Duration::from_millis(100)));
    assert_matches!(waited, Err(Error::Pool(_) | Error::TimedOut));
    assert_matches!(wait(LOCK.acquire(&pool)), Err(Error::Pool(_)));
    wait(guard.release()).unwrap();
    wait(patiently(|| wait(LOCK.acquire(&pool))).release()).unwrap();
}

/// The pool itself would wait for an hour.
#[test]
fn the_deadline_of_a_wait_is_shorter_than_the_patience_of_its_pool() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 1, Duration::from_secs(3600));
    let guard = wait(AdvisoryLock::named("another").acquire(&pool)).unwrap();
    let waited = wait(LOCK.acquire_timeout(&pool, Duration::from_millis(100)));
    assert_matches!(waited, Err(Error::Pool(_) | Error::TimedOut));
    wait(guard.release()).unwrap();
}

#[test]
fn the_holder_may_create_an_index_concurrently() {
    let database = Database::new();
    let pool = pool(&database, 4);
    run(&mut database.connect(), "CREATE TABLE t (c integer)");
    on_one(&pool, |_| on_one(&pool, |_| ()));
    let mut guard = wait(LOCK.acquire(&pool)).unwrap();
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap());
        }
        let mut observer = Observer::of(&database);
        eventually("one waiter waits on the server", || {
            observer.waiters(LOCK.lock_key()) == 1
        });
        // If the server pauses, a slice of the wait may outlast its `deadlock_timeout`.
        once_at_least("the index is built", || {
            let conn = guard.conn();
            wait(crate::half::execute(conn, "DROP INDEX IF EXISTS i")).unwrap();
            let create = "CREATE INDEX CONCURRENTLY i ON t (c)";
            wait(crate::half::execute(conn, create)).is_ok()
        });
        wait(guard.release()).unwrap();
    });
}

#[test]
fn a_wait_writes_nothing_to_the_log_of_the_server() {
    let cluster = Cluster::builder().setting("log_lock_waits", "off").start();
    let database = cluster.database();
    let pool = pool(&database, 2);
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    let before = cluster.log();
    for _ in 0..3 {
        // On a slow machine no try has a reply in time.
        match wait(LOCK.acquire_timeout(&pool, Duration::from_millis(450))) {
            Ok(attempt) => assert!(attempt.is_busy()),
            Err(error) => assert_matches!(error, Error::TimedOut),
        }
    }
    wait(guard.release()).unwrap();
    let log = cluster.log();
    let added = &log[before.len()..];
    assert!(
        !added.contains("ERROR") && !added.contains("WARNING"),
        "{added}"
    );
}

#[test]
fn a_role_without_plpgsql_polls() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let conn = &mut database.connect();
    run(
        conn,
        "REVOKE USAGE ON LANGUAGE plpgsql FROM PUBLIC; CREATE ROLE plain LOGIN",
    );
    let url = database
        .url()
        .replace("postgres@", "plain@")
        .replace("user=postgres", "user=plain");
    assert!(url.contains("plain"));
    let plain = make_pool(&url, 2, Duration::from_secs(20));
    let holder = foreign_holder(&database, LOCK.lock_key());
    thread::scope(|scope| {
        let waiting =
            scope.spawn(|| wait(LOCK.acquire_timeout(&plain, Duration::from_secs(60))).unwrap());
        let mut observer = Observer::of(&database);
        eventually("the waiter polls", || observer.have_tried() > 0);
        drop(holder);
        wait(waiting.join().unwrap().acquired().unwrap().release()).unwrap();
    });
}

#[test]
fn all_of_many_waiters_get_their_turn() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 4, Duration::from_secs(600));
    let turns = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..200 {
            thread::Builder::new()
                .stack_size(1 << 20)
                .spawn_scoped(scope, || {
                    let guard = wait(LOCK.acquire(&pool)).unwrap();
                    turns.fetch_add(1, Ordering::Relaxed);
                    wait(guard.release()).unwrap();
                })
                .unwrap();
        }
    });
    assert_eq!(turns.into_inner(), 200);
    assert_pool_whole(&pool, &database);
}
