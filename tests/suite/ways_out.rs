//! Every way in which a guard can end frees the lock, and leaves the pool with all its connections.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use workbench::{Cluster, Database, StopMode};

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, AdvisoryLockGuard, Attempt, Error, IS_ASYNC, execute, on_one, pool, wait,
};
use crate::support::{
    Observer, Wanted, assert_after_drop, assert_pool_whole, eventually, in_a_quick_round, installed,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("ways out");

/// Acquires one lock, and then several, and lets `end` end the guard.
#[track_caller]
fn end_by(end: impl Fn(AdvisoryLockGuard, &mut Observer)) {
    for wanted in Wanted::one_and_several(&LOCK) {
        let database = Database::new();
        let pool = pool(&database, 2);
        let mut observer = Observer::of(&database);
        let guard = wait(wanted.lock.acquire(&pool)).unwrap();
        wanted.assert_held(&mut observer);
        end(guard, &mut observer);
        eventually("nothing is held", || observer.all_held() == 0);
        assert_pool_whole(&pool, &database);
        wait(wait(wanted.lock.acquire(&pool)).unwrap().release()).unwrap();
    }
}

fn run(guard: &mut AdvisoryLockGuard, sql: &str) {
    wait(execute(guard.conn(), sql)).unwrap();
}

fn fail(guard: &mut AdvisoryLockGuard) {
    wait(execute(guard.conn(), "SELECT 1/0")).unwrap_err();
}

#[test]
fn a_release_frees_the_lock_and_keeps_the_session() {
    end_by(|guard, observer| {
        let pid = guard.backend_pid();
        wait(guard.release()).unwrap();
        assert_eq!(observer.all_held(), 0, "the release frees the lock at once");
        assert!(observer.is_alive(pid));
    });
}

#[test]
fn a_drop_frees_the_lock_and_keeps_the_session() {
    for wanted in Wanted::one_and_several(&LOCK) {
        let database = Database::new();
        let pool = pool(&database, 2);
        let mut observer = Observer::of(&database);
        // A reply that takes longer than two seconds costs the session.
        let is_alive = in_a_quick_round(Duration::from_secs(2), || {
            let guard = wait(wanted.lock.acquire(&pool)).unwrap();
            let pid = guard.backend_pid();
            drop(guard);
            assert_after_drop("nothing is held", || observer.all_held() == 0);
            observer.is_alive(pid)
        });
        assert!(is_alive);
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_panic_frees_the_lock() {
    end_by(|guard, observer| {
        let caught = catch_unwind(AssertUnwindSafe(move || {
            let _guard = guard;
            panic!("in the protected work");
        }));
        assert!(caught.is_err());
        assert_after_drop("nothing is held", || observer.all_held() == 0);
    });
}

#[test]
fn after_a_failed_statement_the_release_succeeds() {
    end_by(|mut guard, _| {
        fail(&mut guard);
        wait(guard.release()).unwrap();
    });
    end_by(|mut guard, _| {
        fail(&mut guard);
        drop(guard);
    });
}

#[test]
fn an_aborted_transaction_of_plain_sql_ends_the_session_or_is_rolled_back() {
    for releases in [true, false] {
        end_by(|mut guard, observer| {
            let pid = guard.backend_pid();
            run(&mut guard, "BEGIN");
            fail(&mut guard);
            if releases {
                assert_matches!(wait(guard.release()), Err(Error::ReleaseFailed { .. }));
            } else {
                drop(guard);
            }
            if IS_ASYNC && !releases {
                eventually("the transaction is rolled back", || {
                    observer.in_transaction() == 0
                });
            } else {
                eventually("the session has ended", || !observer.is_alive(pid));
            }
        });
    }
}

#[test]
fn an_open_transaction_of_plain_sql_is_reported_where_it_is_seen() {
    if IS_ASYNC {
        return; // diesel-async does not notice the transaction, which stays open in the pool
    }
    end_by(|mut guard, observer| {
        let pid = guard.backend_pid();
        run(&mut guard, "BEGIN; SELECT 1");
        assert_matches!(wait(guard.release()), Err(Error::TransactionLeftOpen(_)));
        eventually("the session has ended", || !observer.is_alive(pid));
    });
    end_by(|mut guard, observer| {
        let pid = guard.backend_pid();
        run(&mut guard, "BEGIN; SELECT 1");
        drop(guard);
        eventually("the session has ended", || !observer.is_alive(pid));
    });
}

#[test]
fn a_transaction_of_diesel_that_was_left_open_is_reported_and_rolled_back() {
    for (aborts, releases) in [(false, true), (true, true), (false, false), (true, false)] {
        end_by(|mut guard, observer| {
            let pid = guard.backend_pid();
            crate::half::begin(guard.conn());
            if aborts {
                fail(&mut guard);
            }
            if releases {
                assert_matches!(
                    wait(guard.release()),
                    Err(Error::TransactionLeftOpen(_) | Error::ReleaseFailed { .. })
                );
            } else {
                drop(guard);
            }
            eventually("the session has ended", || !observer.is_alive(pid));
        });
    }
}

#[test]
fn a_killed_backend_is_a_lost_lock() {
    end_by(|mut guard, observer| {
        observer.kill(guard.backend_pid());
        assert!(!wait(guard.is_held()).unwrap());
        assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
    });
    end_by(|guard, observer| {
        observer.kill(guard.backend_pid());
        assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
    });
    end_by(|guard, observer| {
        observer.kill(guard.backend_pid());
        drop(guard);
    });
}

/// Both commands drop the statements that Diesel has prepared. `DISCARD ALL` also releases the
/// locks.
#[test]
fn after_discard_and_deallocate_a_guard_knows_whether_the_lock_was_lost() {
    let database = installed();
    for (forgets, keeps) in [("DISCARD ALL", false), ("DEALLOCATE ALL", true)] {
        for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
            let pool = pool(&database, 1);
            for is_forgotten in [false, true] {
                let mut guard = wait(lock.acquire(&pool)).unwrap();
                if is_forgotten {
                    run(&mut guard, forgets);
                }
                let is_held = !is_forgotten || keeps;
                assert_eq!(wait(guard.is_held()).unwrap(), is_held, "{forgets}");
                assert_eq!(wait(guard.fencing_token()).is_ok(), is_held, "{forgets}");
                let released = wait(guard.release());
                if is_held {
                    released.unwrap();
                } else {
                    assert_matches!(released, Err(Error::LockLost(_)));
                }
            }
            // The next session has all of its statements.
            wait(wait(lock.acquire(&pool)).unwrap().release()).unwrap();
            on_one(&pool, |conn| {
                let done: Result<(), Error> = wait(lock.with_on(conn, work!(|_conn| Ok(()))));
                done.unwrap();
                let done: Result<(), Error> =
                    wait(lock.with_on(conn, work!(|conn| Ok(reply!(execute(conn, forgets))?))));
                assert_eq!(done.is_ok(), keeps, "{forgets}: {done:?}");
                if !keeps {
                    assert_matches!(done, Err(Error::LockLost(_)));
                }
                wait(execute(conn, "SELECT 1")).unwrap();
            });
        }
    }
}

#[test]
fn a_lock_that_other_code_has_unlocked_is_lost() {
    end_by(|mut guard, _| {
        assert!(wait(guard.is_held()).unwrap());
        run(&mut guard, "SELECT pg_advisory_unlock_all()");
        assert!(!wait(guard.is_held()).unwrap());
        assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
    });
    end_by(|mut guard, _| {
        run(&mut guard, "SELECT pg_advisory_unlock_all()");
        drop(guard);
    });
}

#[test]
fn run_releases_after_a_value_and_an_error() {
    end_by(|guard, _| {
        let value: Result<i32, Error> = wait(guard.run(work!(|conn| {
            reply!(execute(conn, "SELECT 1"))?;
            Ok(7)
        })));
        assert_eq!(value.unwrap(), 7);
    });
    end_by(|guard, _| {
        let failed: Result<(), Error> =
            wait(guard.run(work!(|conn| Ok(reply!(execute(conn, "SELECT 1/0"))?))));
        assert_matches!(failed, Err(Error::Database(_)));
    });
    end_by(|guard, _| {
        let lost: Result<(), Error> = wait(guard.run(work!(|conn| Ok(reply!(execute(
            conn,
            "SELECT pg_advisory_unlock_all()"
        ))?))));
        assert_matches!(lost, Err(Error::LockLost(_)));
    });
}

#[test]
fn with_waits_works_and_releases() {
    let database = Database::new();
    for Wanted { lock, .. } in Wanted::one_and_several(&LOCK) {
        let pool = pool(&database, 2);
        let value: Result<i32, Error> = wait(lock.with(&pool, work!(|_conn| Ok(7))));
        assert_eq!(value.unwrap(), 7);
        // What has returned has released, each time, unless the server takes longer than two
        // seconds.
        for _ in 0..20 {
            let began = Instant::now();
            let failed: Result<(), Error> = wait(lock.with(
                &pool,
                work!(|conn| Ok(reply!(execute(conn, "SELECT 1/0"))?)),
            ));
            assert_matches!(failed, Err(Error::Database(_)));
            let attempt = wait(lock.try_acquire(&pool)).unwrap();
            let ran: Result<Attempt<i32>, Error> = wait(attempt.run(work!(|_conn| Ok(8))));
            let is_slow = began.elapsed() > Duration::from_secs(2);
            assert!(ran.unwrap() == Attempt::Acquired(8) || is_slow);
        }
        let guard = wait(lock.acquire(&pool)).unwrap();
        let attempt = wait(lock.try_acquire(&pool)).unwrap();
        let ran: Result<Attempt<i32>, Error> = wait(attempt.run(work!(|_conn| Ok(8))));
        assert_eq!(ran.unwrap(), Attempt::Busy);
        wait(guard.release()).unwrap();
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_restarted_server_is_a_lost_lock() {
    for mode in [StopMode::Fast, StopMode::Immediate] {
        let cluster = Cluster::start();
        let database = cluster.database();
        let pool = pool(&database, 2);
        let mut guard = wait(LOCK.acquire(&pool)).unwrap();
        cluster.restart(mode);
        assert!(!wait(guard.is_held()).unwrap());
        assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
        // The other connection of the pool may have ended, too.
        wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_forgotten_guard_keeps_only_its_own_connection() {
    let database = Database::new();
    let pool = pool(&database, 2);
    let guard = wait(LOCK.acquire(&pool)).unwrap();
    let pid = guard.backend_pid();
    std::mem::forget(guard);
    assert!(wait(LOCK.try_acquire(&pool)).unwrap().is_busy());
    let mut observer = Observer::of(&database);
    observer.kill(pid);
    observer.assert_free(LOCK.lock_key());
    wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap();
}
