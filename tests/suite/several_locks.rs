//! Several locks at once: a holder has all of them or none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Attempt, Error, LockKey, PgPool, begin, end, execute, make_pool, on_one, pool,
    wait,
};
use crate::support::{
    Observer, assert_after_drop, assert_pool_whole, eventually, foreign_holder, foreign_try,
    number, run, truth,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("several");

/// Of every kind, and in no order.
fn locks() -> Vec<AdvisoryLock> {
    vec![
        LOCK.key("a key"),
        AdvisoryLock::new(LockKey::pair(i32::MIN, -1)),
        AdvisoryLock::new(LockKey::bigint(i64::MIN)),
        AdvisoryLock::new(LockKey::pair(-1, i32::MAX)),
        AdvisoryLock::new(LockKey::bigint(-1)),
        LOCK.clone(),
        AdvisoryLock::new(LockKey::pair(0, 0)),
        AdvisoryLock::new(LockKey::bigint(0)),
    ]
}

fn assert_all_held(observer: &mut Observer, locks: &[AdvisoryLock]) {
    for lock in locks {
        assert_eq!(observer.holders(lock.lock_key()), 1, "{lock:?}");
    }
    assert_eq!(observer.all_held(), locks.len() as i64);
}

/// The lock is held in this mode.
fn assert_mode(database: &Database, lock: &AdvisoryLock, is_shared: bool) {
    let conn = &mut database.connect();
    assert!(!foreign_try(conn, lock.lock_key()));
    let number = lock.lock_key().id().unwrap();
    assert_eq!(
        truth(conn, &format!("pg_try_advisory_lock_shared({number})")),
        is_shared
    );
    // The session may end a moment after the drop.
    run(conn, "SELECT pg_advisory_unlock_all()");
}

#[test]
fn all_are_taken_and_released_together() {
    let database = Database::new();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    for shared in [false, true] {
        let locks = locks();
        let mut all = AdvisoryLock::all(&locks);
        if shared {
            all = all.shared();
        }
        let mut guard = wait(all.try_acquire(&pool)).unwrap().acquired().unwrap();
        assert_all_held(&mut observer, &locks);
        assert!(wait(guard.is_held()).unwrap());
        for lock in &locks {
            assert_mode(&database, lock, shared);
            assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
        }
        let pid = guard.backend_pid();
        wait(guard.release()).unwrap();
        let held =
            format!("(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid})");
        assert_eq!(number(observer.conn(), &held), 0, "at once");
        assert!(observer.is_alive(pid));
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_busy_lock_undoes_what_was_taken() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    for lock in &locks {
        let holder = foreign_holder(&database, lock.lock_key());
        assert_matches!(wait(all.try_acquire(&pool)), Ok(Attempt::Busy));
        assert_eq!(observer.all_held(), 1, "only the foreign one, at once");
        drop(holder);
        observer.assert_free(lock.lock_key());
        wait(wait(all.acquire(&pool)).unwrap().release()).unwrap();
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_lock_that_is_given_twice_is_taken_once_and_exclusively() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let (first, second, third) = (LOCK.key(1), LOCK.key(2), LOCK.key(3));
    let number = AdvisoryLock::new(LockKey::from(first.lock_key().id().unwrap()));
    let shared = second.clone().shared();
    let all = AdvisoryLock::all([
        &first.clone().shared(),
        &shared,
        &first,
        &third,
        &number.shared(),
        &shared,
        &third,
    ]);
    let guard = wait(all.acquire(&pool)).unwrap();
    assert_eq!(observer.all_held(), 3);
    assert_mode(&database, &first, false);
    assert_mode(&database, &second, true);
    assert_mode(&database, &third, false);
    wait(guard.release()).unwrap();
    assert_eq!(observer.all_held(), 0);
    // The session is the same, and holds none twice.
    let one = AdvisoryLock::all([&first, &first]);
    wait(wait(one.acquire(&pool)).unwrap().release()).unwrap();
    assert_eq!(observer.all_held(), 0);
    assert_pool_whole(&pool, &database);
}

#[test]
fn several_share_one_lock_while_each_has_another_alone() {
    let database = Database::new();
    let pool = pool(&database, 3);
    let (config, shared) = (LOCK.key("config"), LOCK.key("config").shared());
    let reader = |key: i32| AdvisoryLock::all([&shared, &LOCK.key(key)]);
    let first = wait(reader(1).acquire(&pool)).unwrap();
    let second = wait(reader(2).acquire(&pool)).unwrap();
    assert!(wait(reader(2).try_acquire(&pool)).unwrap().is_busy());
    let writer = AdvisoryLock::all([&config, &LOCK.key(3)]);
    assert!(wait(writer.try_acquire(&pool)).unwrap().is_busy());
    wait(first.release()).unwrap();
    assert!(wait(writer.try_acquire(&pool)).unwrap().is_busy());
    wait(second.release()).unwrap();
    wait(wait(writer.acquire(&pool)).unwrap().release()).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn several_of_several_are_several() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let [a, b, c] = [1, 2, 3].map(|key| LOCK.key(key));
    let all = AdvisoryLock::all([&AdvisoryLock::all([&a, &b]).shared(), &c]);
    let guard = wait(all.acquire(&pool)).unwrap();
    assert_all_held(
        &mut Observer::of(&database),
        &[a.clone(), b.clone(), c.clone()],
    );
    assert_mode(&database, &a, true);
    assert_mode(&database, &b, true);
    assert_mode(&database, &c, false);
    wait(guard.release()).unwrap();
    let one = AdvisoryLock::all([&a]);
    wait(wait(one.acquire(&pool)).unwrap().release()).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn none_and_too_many_and_bad_names_are_refused_before_anything_is_sent() {
    let unreachable = make_pool(
        "postgres://nobody@127.0.0.1:1/none",
        1,
        Duration::from_millis(10),
    );
    let many: Vec<_> = (0..1001).map(|key| LOCK.key(key)).collect();
    let one = AdvisoryLock::all([&LOCK, &LOCK.key(1)]);
    for all in [
        AdvisoryLock::all([]),
        AdvisoryLock::all([&AdvisoryLock::all([])]),
        AdvisoryLock::all(&many),
        AdvisoryLock::all([&LOCK, &AdvisoryLock::named("")]),
        AdvisoryLock::all([&LOCK.key("nul \0"), &LOCK]),
        one.key("of several"),
        AdvisoryLock::all([]).key("of none"),
    ] {
        assert_matches!(wait(all.try_acquire(&unreachable)), Err(Error::Input(_)));
        assert_matches!(wait(all.acquire(&unreachable)), Err(Error::Input(_)));
        assert_matches!(
            wait(all.acquire_timeout(&unreachable, Duration::ZERO)),
            Err(Error::Input(_))
        );
    }
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let guard = wait(AdvisoryLock::all(&many[..1000]).acquire(&pool)).unwrap();
    assert_eq!(observer.all_held(), 1000);
    drop(guard);
    assert_after_drop("all are free", || observer.all_held() == 0);
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(
            wait(AdvisoryLock::all([]).acquire_xact(conn)),
            Err(Error::Input(_))
        );
        end(conn);
    });
}

/// Who holds which of six things. Each has one holder, which is not told by the locks.
struct Things {
    locks: [AdvisoryLock; 6],
    holders: [AtomicI32; 6],
}

impl Things {
    fn new() -> Self {
        Self {
            locks: [1, 2, 3, 4, 5, 6].map(|key| LOCK.key(key)),
            holders: Default::default(),
        }
    }

    /// Three of them in an order that differs from round to round.
    fn three(number: usize, round: usize) -> [usize; 3] {
        let first = (number + round) % 6;
        let second = (first + 1 + round % 5) % 6;
        let third = (0..6)
            .cycle()
            .skip(number + 2 * round)
            .find(|third| ![first, second].contains(third));
        let mut three = [first, second, third.unwrap()];
        three.rotate_left(round % 3);
        three
    }

    fn all(&self, three: [usize; 3]) -> AdvisoryLock {
        AdvisoryLock::all(three.map(|thing| &self.locks[thing]))
    }

    fn hold(&self, things: &[usize]) {
        for thing in things {
            assert_eq!(self.holders[*thing].fetch_add(1, Ordering::SeqCst), 0);
        }
        thread::yield_now();
        for thing in things {
            self.holders[*thing].fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Eight threads and a ninth, which wants single ones, each take what they want so many times.
fn contend(pools: &[PgPool], rounds: usize) {
    let (things, barrier) = (Things::new(), Barrier::new(9));
    thread::scope(|scope| {
        for number in 0..8 {
            let (things, barrier, pool) = (&things, &barrier, &pools[number % pools.len()]);
            scope.spawn(move || {
                barrier.wait();
                for round in 0..rounds {
                    let three = Things::three(number, round);
                    let all = things.all(three);
                    let guard = if round % 2 == 0 {
                        wait(all.acquire(pool)).unwrap()
                    } else {
                        let limit = Duration::from_secs(60);
                        let attempt = wait(all.acquire_timeout(pool, limit)).unwrap();
                        attempt.acquired().expect("within a minute")
                    };
                    things.hold(&three);
                    if round % 3 == 0 {
                        drop(guard);
                    } else {
                        wait(guard.release()).unwrap();
                    }
                }
            });
        }
        let (things, barrier, pool) = (&things, &barrier, &pools[0]);
        scope.spawn(move || {
            barrier.wait();
            for round in 0..rounds {
                let guard = wait(things.locks[round % 6].acquire(pool)).unwrap();
                things.hold(&[round % 6]);
                wait(guard.release()).unwrap();
            }
        });
    });
}

#[test]
fn eight_threads_that_want_three_of_six_in_any_order_all_get_theirs() {
    let database = Database::new();
    // Each has a pool with a connection to spare, or they share one that has none.
    let pools: Vec<_> = (0..8).map(|_| pool(&database, 3)).collect();
    contend(&pools, 20);
    for pool in &pools {
        assert_pool_whole(pool, &database);
    }
    drop(pools);
    let shared = pool(&database, 4);
    contend(std::slice::from_ref(&shared), 20);
    assert_pool_whole(&shared, &database);
}

#[test]
fn transactions_that_want_three_of_six_in_any_order_all_get_theirs() {
    let database = Database::new();
    let (things, barrier) = (Things::new(), Barrier::new(8));
    thread::scope(|scope| {
        for number in 0..8 {
            let (things, barrier, database) = (&things, &barrier, &database);
            scope.spawn(move || {
                let pool = pool(database, 1);
                barrier.wait();
                for round in 0..20 {
                    let three = Things::three(number, round);
                    let all = things.all(three);
                    on_one(&pool, |conn| {
                        if round % 2 == 0 {
                            begin(conn);
                            let limit = Duration::from_secs(60);
                            let attempt = wait(all.acquire_xact_timeout(conn, limit)).unwrap();
                            assert!(attempt.is_acquired());
                            things.hold(&three);
                            end(conn);
                        } else {
                            let held: Result<(), Error> = wait(all.transaction(
                                conn,
                                work!(|_conn| {
                                    things.hold(&three);
                                    Ok(())
                                }),
                            ));
                            held.unwrap();
                        }
                    });
                }
                assert_pool_whole(&pool, database);
            });
        }
    });
}

#[test]
fn a_waiter_holds_none_of_those_that_are_free() {
    let database = Database::new();
    let pool = pool(&database, 3);
    on_one(&pool, |_| on_one(&pool, |_| ()));
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    for lock in &locks[..3] {
        let holder = foreign_holder(&database, lock.lock_key());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(all.acquire(&pool)).unwrap());
            let mut observer = Observer::of(&database);
            eventually("it waits on the server", || {
                observer.waiters(lock.lock_key()) == 1
            });
            for free in locks[3..].iter() {
                wait(wait(free.acquire(&pool)).unwrap().release()).unwrap();
            }
            drop(holder);
            let guard = waiting.join().unwrap();
            assert_all_held(&mut observer, &locks);
            wait(guard.release()).unwrap();
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_waiter_goes_from_one_busy_lock_to_the_next() {
    let database = Database::new();
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    for size in [1, 3] {
        let pool = pool(&database, size);
        // Two at a time, so that it is granted one, and has to give that up for the other.
        let mut holders: Vec<PgConnection> = locks
            .iter()
            .map(|lock| foreign_holder(&database, lock.lock_key()))
            .collect();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(all.acquire(&pool)).unwrap());
            let mut observer = Observer::of(&database);
            while !holders.is_empty() {
                drop(holders.remove(holders.len() / 2));
                let held = holders.len() as i64;
                eventually("the session has ended", || {
                    observer.all_held() == held || holders.is_empty()
                });
            }
            let guard = waiting.join().unwrap();
            assert_all_held(&mut observer, &locks);
            wait(guard.release()).unwrap();
        });
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_timeout_leaves_nothing() {
    let database = Database::new();
    let pool = pool(&database, 2);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    let holders = [&locks[0], &locks[1]].map(|lock| foreign_holder(&database, lock.lock_key()));
    for milliseconds in [0, 1, 15, 50, 250] {
        let timeout = Duration::from_millis(milliseconds);
        match wait(all.acquire_timeout(&pool, timeout)) {
            Ok(attempt) => assert!(attempt.is_busy()),
            // Not even the first try had a reply in time.
            Err(error) => assert_matches!(error, Error::TimedOut | Error::Pool(_)),
        }
    }
    let mut observer = Observer::of(&database);
    eventually("only the foreign sessions hold locks", || {
        observer.all_held() == 2
    });
    drop(holders);
    wait(wait(all.acquire(&pool)).unwrap().release()).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn timeouts_that_race_with_releases_leave_nothing() {
    let database = Database::new();
    let (pool, things) = (pool(&database, 4), Things::new());
    thread::scope(|scope| {
        for number in 0..8 {
            let (things, pool) = (&things, &pool);
            scope.spawn(move || {
                for round in 0..30_usize {
                    let three = Things::three(number, round);
                    let timeout = Duration::from_micros(700 * round as u64);
                    match wait(things.all(three).acquire_timeout(pool, timeout)) {
                        Ok(Attempt::Acquired(guard)) => {
                            things.hold(&three);
                            drop(guard);
                        }
                        Ok(Attempt::Busy) => {}
                        Err(error) => assert_matches!(error, Error::TimedOut | Error::Pool(_)),
                    }
                }
            });
        }
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn drops_panics_and_failed_statements_leave_nothing() {
    let database = Database::new();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);

    let guard = wait(all.acquire(&pool)).unwrap();
    let pid = guard.backend_pid();
    drop(guard);
    assert_after_drop("all are free", || observer.all_held() == 0);
    assert!(observer.is_alive(pid));

    let guard = wait(all.acquire(&pool)).unwrap();
    let caught = catch_unwind(AssertUnwindSafe(move || {
        let _guard = guard;
        panic!("in the protected work");
    }));
    assert!(caught.is_err());
    assert_after_drop("all are free", || observer.all_held() == 0);

    let mut guard = wait(all.acquire(&pool)).unwrap();
    wait(execute(guard.conn(), "BEGIN")).unwrap();
    wait(execute(guard.conn(), "SELECT 1/0")).unwrap_err();
    assert_matches!(wait(guard.release()), Err(Error::ReleaseFailed { .. }));
    eventually("all are free", || observer.all_held() == 0);

    let failed: Result<(), Error> = wait(all.with(
        &pool,
        work!(|conn| Ok(reply!(execute(conn, "SELECT 1/0"))?)),
    ));
    assert_matches!(failed, Err(Error::Database(_)));
    let value: Result<i32, Error> = wait(all.with(&pool, work!(|_conn| Ok(7))));
    assert_eq!(value.unwrap(), 7);
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_killed_backend_is_a_lost_lock() {
    let database = Database::new();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    let all = AdvisoryLock::all(&locks());
    for asks in [true, false] {
        let mut guard = wait(all.acquire(&pool)).unwrap();
        observer.kill(guard.backend_pid());
        if asks {
            assert!(!wait(guard.is_held()).unwrap());
        }
        assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
        let guard = wait(all.acquire(&pool)).unwrap();
        observer.kill(guard.backend_pid());
        drop(guard);
    }
    wait(wait(all.acquire(&pool)).unwrap().release()).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn one_that_other_code_has_unlocked_is_lost_and_the_others_are_released() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let locks = locks();
    for lost in &locks {
        let key = lost.lock_key();
        let unlock = format!("SELECT pg_advisory_unlock({})", key.id().unwrap());
        let mut guard = wait(AdvisoryLock::all(&locks).acquire(&pool)).unwrap();
        wait(execute(guard.conn(), &unlock)).unwrap();
        assert!(!wait(guard.is_held()).unwrap());
        assert_matches!(wait(guard.release()), Err(Error::LockLost(name)) if *name == key.to_string());
        assert_eq!(observer.all_held(), 0);
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn on_a_lent_connection_they_are_held_in_the_scope() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    on_one(&pool, |conn| {
        let held: Result<(), Error> = wait(all.with_on(
            conn,
            work!(|conn| {
                reply!(execute(conn, "SELECT 1"))?;
                Ok(assert_all_held(&mut observer, &locks))
            }),
        ));
        held.unwrap();
        assert_eq!(observer.all_held(), 0);
        let holder = foreign_holder(&database, locks[1].lock_key());
        let busy: Result<Attempt<()>, Error> =
            wait(all.try_with_on(conn, work!(|_conn| panic!("it is busy"))));
        assert_matches!(busy, Ok(Attempt::Busy));
        assert_eq!(observer.all_held(), 1);
        thread::scope(|scope| {
            let releases = scope.spawn(|| {
                let mut observer = Observer::of(&database);
                eventually("it waits on the server", || {
                    observer.waiters(locks[1].lock_key()) == 1
                });
                drop(holder);
            });
            let held: Result<(), Error> = wait(all.with_on(conn, work!(|_conn| Ok(()))));
            held.unwrap();
            releases.join().unwrap();
        });
        assert_eq!(observer.all_held(), 0);
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_transaction_holds_all_until_it_ends() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    on_one(&pool, |conn| {
        for way in 0..3 {
            begin(conn);
            match way {
                0 => wait(all.acquire_xact(conn)).unwrap(),
                1 => assert!(wait(all.try_acquire_xact(conn)).unwrap().is_acquired()),
                _ => {
                    let limit = Duration::from_secs(60);
                    let attempt = wait(all.acquire_xact_timeout(conn, limit)).unwrap();
                    assert!(attempt.is_acquired());
                }
            }
            wait(all.acquire_xact(conn)).unwrap();
            assert_all_held(&mut observer, &locks);
            end(conn);
            assert_eq!(observer.all_held(), 0);
        }
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_transaction_that_is_refused_keeps_what_it_had_and_goes_on() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    run(&mut database.connect(), "CREATE TABLE written ()");
    let (locks, own) = (locks(), LOCK.key("its own"));
    let all = AdvisoryLock::all(locks.iter().chain([&own]));
    for lock in &locks {
        let holder = foreign_holder(&database, lock.lock_key());
        on_one(&pool, |conn| {
            begin(conn);
            wait(own.acquire_xact(conn)).unwrap();
            wait(execute(conn, "INSERT INTO written DEFAULT VALUES")).unwrap();
            assert_matches!(wait(all.try_acquire_xact(conn)), Ok(Attempt::Busy));
            assert_eq!(observer.all_held(), 2, "its own, and the foreign one");
            for milliseconds in [0, 30] {
                let timeout = Duration::from_millis(milliseconds);
                let began = Instant::now();
                let waited = wait(all.acquire_xact_timeout(conn, timeout));
                assert_matches!(waited, Ok(Attempt::Busy));
                assert!(began.elapsed() >= timeout);
                assert_eq!(observer.all_held(), 2);
            }
            wait(execute(
                conn,
                "DO $$ BEGIN ASSERT current_setting('lock_timeout') = '0'; \
                 ASSERT EXISTS (SELECT FROM written); END $$",
            ))
            .unwrap();
            drop(holder);
            wait(all.acquire_xact(conn)).unwrap();
            end(conn);
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_transaction_waits_for_one_busy_lock_after_the_other() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    for limit in [None, Some(Duration::from_secs(60))] {
        let mut holders: Vec<_> = locks
            .iter()
            .map(|lock| foreign_holder(&database, lock.lock_key()))
            .collect();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                on_one(&pool, |conn| {
                    begin(conn);
                    match limit {
                        None => wait(all.acquire_xact(conn)).unwrap(),
                        Some(limit) => {
                            let attempt = wait(all.acquire_xact_timeout(conn, limit)).unwrap();
                            assert!(attempt.is_acquired());
                        }
                    }
                    assert_all_held(&mut Observer::of(&database), &locks);
                    end(conn);
                });
            });
            let mut observer = Observer::of(&database);
            eventually("it waits", || observer.all_waiting() == 1);
            while let Some(holder) = holders.pop() {
                drop(holder);
            }
            waiting.join().unwrap();
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn in_no_transaction_and_at_repeatable_read_they_are_an_error() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let all = AdvisoryLock::all(&locks());
    let second = Duration::from_secs(1);
    on_one(&pool, |conn| {
        assert_matches!(
            wait(all.try_acquire_xact(conn)),
            Err(Error::OutsideTransaction)
        );
        assert_matches!(wait(all.acquire_xact(conn)), Err(Error::OutsideTransaction));
        assert_matches!(
            wait(all.acquire_xact_timeout(conn, second)),
            Err(Error::OutsideTransaction)
        );
        begin(conn);
        let repeatable_read = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ";
        wait(execute(conn, repeatable_read)).unwrap();
        assert_matches!(wait(all.try_acquire_xact(conn)), Err(Error::RepeatableRead));
        assert_matches!(wait(all.acquire_xact(conn)), Err(Error::RepeatableRead));
        assert_matches!(
            wait(all.acquire_xact_timeout(conn, second)),
            Err(Error::RepeatableRead)
        );
        assert_eq!(observer.all_held(), 0);
        wait(execute(conn, "SELECT 1")).unwrap();
        end(conn);
    });
    assert_pool_whole(&pool, &database);
}

#[test]
fn the_timeouts_of_the_session_apply_to_a_transaction_that_waits() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let locks = locks();
    let all = AdvisoryLock::all(&locks);
    let _holder = foreign_holder(&database, locks[1].lock_key());
    for setting in ["lock_timeout = '20ms'", "statement_timeout = '20ms'"] {
        for timeout in [None, Some(Duration::from_secs(60))] {
            on_one(&pool, |conn| {
                begin(conn);
                wait(execute(conn, &format!("SET LOCAL {setting}"))).unwrap();
                let waited = match timeout {
                    None => wait(all.acquire_xact(conn)),
                    Some(timeout) => wait(all.acquire_xact_timeout(conn, timeout)).map(drop),
                };
                assert_matches!(waited, Err(Error::Database(_)));
                end(conn);
            });
            assert_eq!(observer.all_held(), 1);
        }
    }
}

#[test]
fn a_standby_is_refused() {
    let cluster = Cluster::start();
    let standby = cluster.standby();
    let pool = make_pool(&standby.url("postgres"), 1, Duration::from_secs(20));
    let all = AdvisoryLock::all(&locks());
    assert_matches!(wait(all.try_acquire(&pool)), Err(Error::Standby));
    assert_matches!(
        wait(all.acquire_timeout(&pool, Duration::from_secs(1))),
        Err(Error::Standby)
    );
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(wait(all.try_acquire_xact(conn)), Err(Error::Standby));
    });
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(wait(all.acquire_xact(conn)), Err(Error::Standby));
    });
}

#[test]
fn a_server_without_room_for_so_many_is_an_error_and_keeps_none() {
    let cluster = Cluster::builder()
        .setting("max_locks_per_transaction", "10")
        .setting("max_connections", "5")
        .setting("max_worker_processes", "1")
        .setting("autovacuum_max_workers", "1")
        .start();
    let database = cluster.database();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let many: Vec<_> = (0..1000).map(|key| LOCK.key(key)).collect();
    let all = AdvisoryLock::all(&many);
    assert_matches!(wait(all.try_acquire(&pool)), Err(Error::Database(_)));
    // The session that holds them must end before another one has room to look.
    let held =
        "SELECT 1 / (1 - least(count(*), 1)) FROM pg_locks WHERE locktype = 'advisory' AND granted";
    eventually("none is held", || {
        diesel::connection::SimpleConnection::batch_execute(observer.conn(), held).is_ok()
    });
    let few = AdvisoryLock::all(&many[..10]);
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(wait(all.try_acquire_xact(conn)), Err(Error::Database(_)));
        assert_eq!(observer.all_held(), 0, "before the transaction ends");
        end(conn);
    });
    wait(wait(few.acquire(&pool)).unwrap().release()).unwrap();
    assert_pool_whole(&pool, &database);
}

#[test]
fn no_setting_of_the_session_hinders_them() {
    for settings in [
        "search_path = ''",
        "standard_conforming_strings = off",
        "default_transaction_isolation = serializable",
        "default_transaction_isolation = 'repeatable read'",
        "lock_timeout = '1ms'",
        "plan_cache_mode = force_generic_plan",
        "jit_above_cost = 0",
        "enable_seqscan = off",
    ] {
        let database = Database::new();
        run(
            &mut database.connect(),
            &format!("ALTER DATABASE {} SET {settings}", database.name()),
        );
        let pool = pool(&database, 2);
        let all = AdvisoryLock::all(&locks());
        let mut guard = wait(all.acquire(&pool)).unwrap();
        match wait(all.acquire_timeout(&pool, Duration::from_millis(250))) {
            Ok(attempt) => assert!(attempt.is_busy(), "{settings}"),
            // Not even the first try had a reply in time.
            Err(error) => assert_matches!(error, Error::TimedOut | Error::Pool(_)),
        }
        assert!(wait(guard.is_held()).unwrap(), "{settings}");
        wait(guard.release()).unwrap();
        on_one(&pool, |conn| {
            let held: Result<(), Error> = wait(all.transaction(conn, work!(|_conn| Ok(()))));
            held.unwrap();
        });
        assert_pool_whole(&pool, &database);
    }
}
