//! Waiting for a session lock: how a wait ends, and which other sessions it must not disturb.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;

use crate::half::prelude::*;
use crate::half::{AdvisoryLock, Cluster, Database, Error, LockKey};
use crate::support::{
    Expect, Observer, assert_matches, eventually, foreign_holder, foreign_session_holding, setting,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("waiting");
const SHORT: Duration = Duration::from_millis(20);

fn held_elsewhere(database: &Database) -> PgConnection {
    foreign_session_holding(database, LOCK.key().id().unwrap())
}

#[test]
fn a_timed_out_wait_is_busy_and_leaves_nothing_held() {
    let database = Database::new();
    let pool = database.pool(1);
    let holder = held_elsewhere(&database);
    let mut observer = Observer::of(&database);

    let begun = Instant::now();
    // More than one slice.
    let timeout = Duration::from_millis(1200);
    assert!(LOCK.acquire_timeout(&pool, timeout).unwrap().is_busy());
    assert!(begun.elapsed() >= timeout);
    assert_eq!(observer.waiters(LOCK.key()), 0);
    assert_eq!(observer.holders(LOCK.key()), 1);

    // The same session went back to the pool, and does not hold it.
    drop(holder);
    observer.assert_free(LOCK.key());
    LOCK.acquire_timeout(&pool, timeout)
        .unwrap()
        .expect_acquired()
        .release()
        .unwrap();
}

#[test]
fn timeouts_of_any_length_are_taken() {
    let database = Database::new();
    let mut conn = database.connect();
    let holder = held_elsewhere(&database);
    for timeout in [
        Duration::ZERO,
        Duration::from_nanos(1),
        Duration::from_micros(300),
        Duration::from_millis(1),
    ] {
        assert!(
            LOCK.acquire_timeout_on(&mut conn, timeout)
                .unwrap()
                .is_busy()
        );
    }
    drop(holder);
    Observer::of(&database).assert_free(LOCK.key());
    let pool = database.pool(1);
    for timeout in [
        Duration::MAX,
        Duration::from_secs(u64::MAX),
        Duration::from_secs(1 << 40),
    ] {
        drop(
            LOCK.acquire_timeout(&pool, timeout)
                .unwrap()
                .expect_acquired(),
        );
        drop(
            LOCK.acquire_timeout_on(&mut conn, timeout)
                .unwrap()
                .expect_acquired(),
        );
    }
}

#[test]
fn a_wait_of_any_length_ends_when_the_lock_is_released() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    for timeout in [Duration::MAX, Duration::from_secs(3600)] {
        let holder = held_elsewhere(&database);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let mut conn = database.connect();
                let guard = LOCK.acquire_timeout_on(&mut conn, timeout).unwrap();
                guard.expect_acquired().release().unwrap();
            });
            while observer.waiters(LOCK.key()) == 0 {}
            drop(holder);
            waiter.join().unwrap();
        });
    }
}

#[test]
fn the_deadline_includes_the_check_out() {
    let database = Database::new();
    let pool = database.pool(1);
    let taken = pool.get().unwrap();
    let begun = Instant::now();
    let waited = LOCK.acquire_timeout(&pool, SHORT);
    assert_matches!(waited, Err(Error::Pool(_)));
    assert!(begun.elapsed() < Duration::from_secs(5));
    drop(taken);
    let long = Duration::from_secs(20);
    drop(LOCK.acquire_timeout(&pool, long).unwrap().expect_acquired());
}

#[test]
fn a_german_server_tells_a_timeout_from_a_failure() {
    let cluster = Cluster::builder().german().start();
    let database = cluster.database();
    let mut conn = database.connect();
    let german = conn.batch_execute("SELECT 1/0").unwrap_err().to_string();
    if !german.contains("durch Null") {
        eprintln!("this PostgreSQL came without its translations: tried in English");
    }

    let holder = held_elsewhere(&database);
    assert!(LOCK.acquire_timeout_on(&mut conn, SHORT).unwrap().is_busy());
    conn.transaction(|conn| {
        assert!(LOCK.acquire_xact_timeout(conn, SHORT)?.is_busy());
        assert!(LOCK.try_acquire_xact(conn)?.is_busy());
        Ok::<_, Error>(())
    })
    .unwrap();

    // A waiter whose session is ended has failed, and not timed out.
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut conn = database.connect();
            LOCK.acquire_timeout_on(&mut conn, Duration::from_secs(60))
                .map(|attempt| attempt.is_busy())
        });
        while observer.waiters(LOCK.key()) == 0 {}
        observer.kill_waiters();
        let failed = waiter.join().unwrap();
        assert_matches!(failed, Err(Error::Database(_)));
    });
    drop(holder);
}

/// PostgreSQL may report a timeout although the lock was granted at the same moment.
#[test]
fn two_thousand_timeouts_that_race_with_releases_leave_nothing_held() {
    const WAITERS: usize = 4;
    const ROUNDS: usize = 500;
    let database = Database::new();
    let mut releasing = database.connect();
    let mut waiting: Vec<_> = (0..WAITERS).map(|_| database.connect()).collect();
    let over = AtomicBool::new(false);

    // Holds for about as long as the waiters wait, so that releases and timeouts coincide.
    let hold_and_release = || {
        for microseconds in (700..1400).step_by(100).cycle() {
            if over.load(Ordering::Relaxed) {
                return;
            }
            let patience = Duration::from_secs(10);
            let attempt = LOCK.acquire_timeout_on(&mut releasing, patience).unwrap();
            let Some(guard) = attempt.acquired() else {
                over.store(true, Ordering::Relaxed);
                panic!("a waiter that timed out holds the lock");
            };
            let until = Instant::now() + Duration::from_micros(microseconds);
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            guard.release().unwrap();
        }
    };
    let time_out_often = |conn: &mut PgConnection| {
        let (mut timeouts, mut grants) = (0, 0);
        while timeouts < ROUNDS && !over.load(Ordering::Relaxed) {
            let timeout = Duration::from_millis(1);
            match LOCK.acquire_timeout_on(conn, timeout).unwrap().acquired() {
                Some(mut guard) => {
                    assert!(guard.is_held().unwrap());
                    guard.release().unwrap();
                    grants += 1;
                }
                None => timeouts += 1,
            }
        }
        grants
    };

    let grants: i32 = std::thread::scope(|scope| {
        let releaser = scope.spawn(hold_and_release);
        let waiters: Vec<_> = waiting
            .iter_mut()
            .map(|conn| scope.spawn(|| time_out_often(conn)))
            .collect();
        let waited: Vec<_> = waiters.into_iter().map(|waiter| waiter.join()).collect();
        over.store(true, Ordering::Relaxed);
        releaser.join().unwrap();
        waited.into_iter().map(Result::unwrap).sum()
    });
    assert!(grants > 0);
    // All of these sessions are alive, so a lock that was left behind would still be held.
    assert_eq!(Observer::of(&database).all_held(), 0);
    drop(waiting);
}

/// Runs `prepare` and then `work` on the connection of a guard, `work` while twenty sessions wait for its lock. All of them
/// acquire the lock afterwards, and nothing stays held.
fn while_twenty_sessions_wait<T>(
    prepare: &str,
    work: impl FnOnce(&mut PgConnection) -> QueryResult<T>,
) {
    const WAITERS: i64 = 20;
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let mut guard = LOCK.acquire(&database.pool(1)).unwrap();
    let mut sessions: Vec<_> = (0..WAITERS).map(|_| database.connect()).collect();
    guard.conn().batch_execute(prepare).unwrap();
    std::thread::scope(|scope| {
        let waiters: Vec<_> = sessions
            .iter_mut()
            .map(|conn| scope.spawn(|| LOCK.acquire_on(conn)?.release()))
            .collect();
        eventually("all wait", || observer.waiters(LOCK.key()) == WAITERS);
        let worked = work(guard.conn());
        guard.release().unwrap();
        for waiter in waiters {
            waiter.join().unwrap().unwrap();
        }
        worked.unwrap();
    });
    assert_eq!(observer.all_held(), 0);
}

/// Without slices, each waiter's snapshot and the holder's index would wait for each other, until PostgreSQL ends one of
/// them with "deadlock detected".
#[test]
fn the_holder_creates_an_index_concurrently_while_twenty_sessions_wait() {
    let table = "CREATE TABLE t AS SELECT generate_series(1, 1000) AS id";
    while_twenty_sessions_wait(table, |conn| {
        conn.batch_execute("CREATE INDEX CONCURRENTLY i ON t (id)")
    });
}

/// Each waiter's snapshot lasts no longer than a slice of its wait.
#[test]
fn a_holder_with_a_lock_timeout_creates_indexes_concurrently_while_twenty_sessions_wait() {
    // The shortest that the documentation allows, because a slice takes 200 milliseconds.
    let table = "CREATE TABLE t (id int); SET lock_timeout = '300ms'";
    while_twenty_sessions_wait(table, |conn| {
        (0..5).try_for_each(|number| {
            conn.batch_execute(&format!("CREATE INDEX CONCURRENTLY i{number} ON t (id)"))
        })
    });
}

/// A slice has a transaction of its own if the session's settings would end it sooner, and a savepoint inside a test
/// transaction.
#[test]
fn a_wait_whose_settings_are_lifted_leaves_nothing_open_and_nothing_held() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    for is_test in [false, true] {
        let conn = &mut database.connect();
        if is_test {
            conn.begin_test_transaction().unwrap();
        }
        conn.batch_execute("SET statement_timeout = '100ms'")
            .unwrap();
        let holder = held_elsewhere(&database);
        let long = Duration::from_millis(500);
        assert!(LOCK.acquire_timeout_on(conn, long).unwrap().is_busy());
        drop(holder);
        observer.assert_free(LOCK.key());
        let mut holder = held_elsewhere(&database);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| LOCK.acquire_on(conn).unwrap().release().unwrap());
            while observer.waiters(LOCK.key()) == 0 {}
            holder
                .batch_execute("SELECT pg_sleep(0.3); SELECT pg_advisory_unlock_all()")
                .unwrap();
            waiter.join().unwrap();
        });
        assert_eq!(setting(conn, "statement_timeout"), "100ms");
        assert_eq!(setting(conn, "lock_timeout"), "0");
        assert_eq!(observer.holders(LOCK.key()), 0);
        assert_eq!(observer.in_transaction(), i64::from(is_test));
        let in_transaction = conn.transaction(|conn| conn.batch_execute("SELECT 1"));
        in_transaction.unwrap();
    }
}

#[test]
fn a_wait_that_is_cancelled_ends_with_that_error() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let holder = held_elsewhere(&database);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut conn = database.connect();
            LOCK.acquire_on(&mut conn).map(drop)
        });
        // A cancellation in the last hundredth of a slice is taken for its timeout, so it is sent again.
        eventually("it is cancelled", || {
            observer
                .conn()
                .batch_execute(
                    "SELECT pg_cancel_backend(pid) FROM pg_locks WHERE NOT granted AND database = \
                     (SELECT oid FROM pg_database WHERE datname = current_database())",
                )
                .unwrap();
            waiter.is_finished()
        });
        let cancelled = waiter.join().unwrap();
        assert_matches!(cancelled, Err(Error::Database(_)));
    });
    drop(holder);
}

/// The snapshot of one long statement would keep every row that is deleted meanwhile.
#[test]
fn vacuum_gets_at_rows_that_were_deleted_while_sessions_wait() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let guard = LOCK.acquire(&database.pool(1)).unwrap();
    let mut waiting = database.connect();
    let mut other = database.connect();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire_on(&mut waiting)?.release());
        eventually("it waits", || observer.waiters(LOCK.key()) == 1);
        other
            .batch_execute("CREATE TABLE t AS SELECT generate_series(1, 1000) AS id")
            .unwrap();
        other.batch_execute("DELETE FROM t").unwrap();
        eventually("the table is empty", || {
            other.batch_execute("VACUUM t").unwrap();
            let emptied = diesel::sql_query("SELECT 1 WHERE pg_relation_size('t') = 0");
            emptied.execute(&mut other).unwrap() == 1
        });
        assert!(!waiter.is_finished());
        guard.release().unwrap();
        waiter.join().unwrap().unwrap();
    });
}

/// This holds for a `deadlock_timeout` shorter than a slice, and for a very long one.
#[test]
fn slices_suit_the_servers_deadlock_timeout() {
    for deadlock_timeout in ["100ms", "10min"] {
        let cluster = Cluster::builder()
            .setting("deadlock_timeout", deadlock_timeout)
            .start();
        let database = cluster.database();
        let mut observer = Observer::of(&database);
        let mut guard = LOCK.acquire(&database.pool(1)).unwrap();
        let mut sessions = [database.connect(), database.connect()];
        guard
            .conn()
            .batch_execute("CREATE TABLE t (id int); SET statement_timeout = '20s'")
            .unwrap();
        std::thread::scope(|scope| {
            let waiters: Vec<_> = sessions
                .iter_mut()
                .map(|conn| scope.spawn(|| LOCK.acquire_on(conn)?.release()))
                .collect();
            eventually("all wait", || observer.waiters(LOCK.key()) == 2);
            let indexed: QueryResult<Vec<_>> = (0..3)
                .map(|_| {
                    let conn = guard.conn();
                    conn.batch_execute("CREATE INDEX CONCURRENTLY i ON t (id)")?;
                    conn.batch_execute("DROP INDEX i")
                })
                .collect();
            guard.release().unwrap();
            for waiter in waiters {
                waiter.join().unwrap().unwrap();
            }
            indexed.unwrap();
        });
    }
}

#[test]
fn a_shared_wait_holds_what_it_waited_for() {
    let database = Database::new();
    let mut conn = database.connect();
    let shared = AdvisoryLock::new(LockKey::pair(-1, 1)).shared();
    let holder = foreign_holder(&database, &shared);
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| shared.acquire_on(&mut conn).unwrap());
        while observer.waiters(shared.key()) == 0 {}
        drop(holder);
        let mut guard = waiter.join().unwrap();
        assert!(guard.is_held().unwrap());
        guard.release().unwrap();
    });
    assert_eq!(observer.holders(shared.key()), 0);
}

#[test]
fn a_wait_leaves_the_sessions_settings_as_they_were() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.batch_execute("SET statement_timeout = '7s'; SET lock_timeout = '5s'")
        .unwrap();
    let as_they_were = |conn: &mut PgConnection| {
        assert_eq!(setting(conn, "statement_timeout"), "7s");
        assert_eq!(setting(conn, "lock_timeout"), "5s");
    };
    let holder = held_elsewhere(&database);
    assert!(LOCK.acquire_timeout_on(&mut conn, SHORT).unwrap().is_busy());
    as_they_were(&mut conn);

    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire_on(&mut conn).unwrap().release().unwrap());
        while observer.waiters(LOCK.key()) == 0 {}
        drop(holder);
        waiter.join().unwrap();
    });
    as_they_were(&mut conn);
}
