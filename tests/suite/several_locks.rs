//! Several locks at once: a holder has all of them or none.
//!
//! Behaviour that one lock has, too, is tested with one and with several in `session_locks`,
//! `waiting`, `ways_out`, `scopes` and `transaction_locks`.

use std::sync::Barrier;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

use diesel::PgConnection;
use workbench::{Cluster, Database};

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Attempt, Error, LockKey, PgPool, begin, end, execute, make_pool, on_one, pool,
    wait,
};
use crate::support::{
    Observer, Wanted, assert_after_drop, assert_pool_whole, eventually, foreign_holder,
    foreign_try, number, run, truth,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("several");

const MINUTE: Duration = Duration::from_secs(60);

fn release(lock: &AdvisoryLock, pool: &PgPool) {
    wait(wait(lock.acquire(pool)).unwrap().release()).unwrap();
}

#[test]
fn each_lock_is_held_once_and_exclusively_if_any_of_its_entries_is_exclusive() {
    let [a, b, c] = [1, 2, 3].map(|key| LOCK.key(key));
    let number_of_a = AdvisoryLock::new(LockKey::from(a.lock_key().id().unwrap()));
    let [shared_a, shared_b] = [a.clone().shared(), b.clone().shared()];
    let all = Wanted::several(&LOCK);
    // The locks that are given, and those that are then held, with whether they are shared.
    let of_every_kind = |is_shared| all.parts.iter().map(|it| (it.clone(), is_shared)).collect();
    let cases: [(AdvisoryLock, Vec<(AdvisoryLock, bool)>); 6] = [
        (all.lock.clone(), of_every_kind(false)),
        (all.lock.clone().shared(), of_every_kind(true)),
        (
            AdvisoryLock::all([
                &shared_a,
                &shared_b,
                &a,
                &c,
                &number_of_a.shared(),
                &shared_b,
                &c,
            ]),
            vec![(a.clone(), false), (b.clone(), true), (c.clone(), false)],
        ),
        (
            AdvisoryLock::all([&AdvisoryLock::all([&a, &b]).shared(), &c]),
            vec![(a.clone(), true), (b.clone(), true), (c.clone(), false)],
        ),
        (AdvisoryLock::all([&a, &a]), vec![(a.clone(), false)]),
        (AdvisoryLock::all([&a]), vec![(a.clone(), false)]),
    ];
    let database = Database::new();
    let pool = pool(&database, 2);
    let mut observer = Observer::of(&database);
    for (given, expected) in cases {
        let mut guard = wait(given.try_acquire(&pool)).unwrap().acquired().unwrap();
        assert_eq!(observer.all_held(), expected.len() as i64, "{given:?}");
        assert!(wait(guard.is_held()).unwrap());
        for (lock, is_shared) in &expected {
            assert_mode(&mut database.connect(), lock, *is_shared);
            assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
        }
        let pid = guard.backend_pid();
        wait(guard.release()).unwrap();
        let held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid =";
        assert_eq!(number(observer.conn(), &format!("({held} {pid})")), 0);
        assert!(observer.is_alive(pid));
    }
    assert_pool_whole(&pool, &database);
}

/// Asserts from another session that the lock is held shared, or exclusively.
#[track_caller]
fn assert_mode(other: &mut PgConnection, lock: &AdvisoryLock, is_shared: bool) {
    assert!(!foreign_try(other, lock.lock_key()), "{lock:?}");
    let id = lock.lock_key().id().unwrap();
    let shares = truth(other, &format!("pg_try_advisory_lock_shared({id})"));
    assert_eq!(shares, is_shared, "{lock:?}");
    // A dropped connection's session ends a moment later.
    run(other, "SELECT pg_advisory_unlock_all()");
}

#[test]
fn several_holders_share_one_lock_while_each_has_another_alone() {
    let database = Database::new();
    let pool = pool(&database, 3);
    let (config, shared) = (LOCK.key("config"), LOCK.key("config").shared());
    let reader = |key: i32| AdvisoryLock::all([&shared, &LOCK.key(key)]);
    let first = wait(reader(1).acquire(&pool)).unwrap();
    let second = wait(reader(2).acquire(&pool)).unwrap();
    assert!(wait(reader(2).try_acquire(&pool)).unwrap().is_busy());
    let writer = AdvisoryLock::all([&config, &LOCK.key(3)]);
    for reader in [first, second] {
        assert!(wait(writer.try_acquire(&pool)).unwrap().is_busy());
        wait(reader.release()).unwrap();
    }
    release(&writer, &pool);
    assert_pool_whole(&pool, &database);
}

#[test]
fn no_locks_too_many_locks_and_bad_names_are_refused_before_anything_is_sent() {
    let nowhere = "postgres://nobody@127.0.0.1:1/none";
    let unreachable = make_pool(nowhere, 1, Duration::from_millis(10));
    let many: Vec<_> = (0..1001).map(|key| LOCK.key(key)).collect();
    let none = AdvisoryLock::all([]);
    for all in [
        none.clone(),
        AdvisoryLock::all([&none]),
        AdvisoryLock::all(&many),
        AdvisoryLock::all([&LOCK, &AdvisoryLock::named("")]),
        AdvisoryLock::all([&LOCK, &LOCK.key("")]),
        AdvisoryLock::all([&LOCK.key("nul \0"), &LOCK]),
        AdvisoryLock::all([&LOCK, &LOCK.key(1)]).key("of several"),
        none.key("of none"),
    ] {
        for refused in [
            wait(all.try_acquire(&unreachable)).map(drop),
            wait(all.acquire(&unreachable)).map(drop),
            wait(all.acquire_timeout(&unreachable, Duration::ZERO)).map(drop),
        ] {
            assert_matches!(refused, Err(Error::Input(_)));
        }
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
        assert_matches!(wait(none.acquire_xact(conn)), Err(Error::Input(_)));
        end(conn);
    });
}

/// Three of six locks, in an order that differs from round to round.
fn three(number: usize, round: usize) -> [usize; 3] {
    let first = (number + round) % 6;
    let second = (first + 1 + round % 5) % 6;
    let mut others = (0..6).cycle().skip(number + 2 * round);
    let third = others.find(|third| ![first, second].contains(third));
    let mut three = [first, second, third.unwrap()];
    three.rotate_left(round % 3);
    three
}

/// Takes the locks, and does the work while it holds them.
type Take = fn(&AdvisoryLock, &PgPool, usize, &(dyn Fn() + Sync));

/// Eight threads take three of six locks at a time, and a ninth takes single ones. Each counts the
/// holders of its locks in memory, and so sees a second holder without asking the database.
fn contend(pools: usize, size: u32, rounds: usize, take: Take) {
    let database = Database::new();
    let pools: Vec<_> = (0..pools).map(|_| pool(&database, size)).collect();
    let locks = [1, 2, 3, 4, 5, 6].map(|key| LOCK.key(key));
    let (holders, start): ([AtomicI32; 6], _) = (Default::default(), Barrier::new(9));
    let work = |indices: &[usize]| {
        for index in indices {
            assert_eq!(holders[*index].fetch_add(1, Ordering::SeqCst), 0);
        }
        thread::yield_now();
        for index in indices {
            holders[*index].fetch_sub(1, Ordering::SeqCst);
        }
    };
    thread::scope(|scope| {
        for number in 0..9 {
            let (locks, start, work) = (&locks, &start, &work);
            let pool = &pools[number % pools.len()];
            scope.spawn(move || {
                start.wait();
                for round in 0..rounds {
                    let three = three(number, round);
                    let indices = if number < 8 { &three[..] } else { &three[..1] };
                    let all = AdvisoryLock::all(indices.iter().map(|index| &locks[*index]));
                    take(&all, pool, round, &|| work(indices));
                }
            });
        }
    });
    for pool in &pools {
        assert_pool_whole(pool, &database);
    }
}

fn with_a_guard(all: &AdvisoryLock, pool: &PgPool, round: usize, work: &(dyn Fn() + Sync)) {
    let guard = match round % 2 {
        0 => wait(all.acquire(pool)).unwrap(),
        _ => wait(all.acquire_timeout(pool, MINUTE))
            .unwrap()
            .acquired()
            .expect("within a minute"),
    };
    work();
    match round % 3 {
        0 => drop(guard),
        _ => wait(guard.release()).unwrap(),
    }
}

#[test]
fn threads_that_take_three_of_six_locks_in_any_order_do_not_deadlock() {
    contend(9, 3, 20, with_a_guard); // pools with a spare connection
    contend(1, 4, 20, with_a_guard); // a pool without one
}

#[test]
fn transactions_that_take_three_of_six_locks_in_any_order_do_not_deadlock() {
    contend(9, 1, 20, |all, pool, round, work| {
        on_one(pool, |conn| {
            if round % 2 == 0 {
                begin(conn);
                let attempt = wait(all.acquire_xact_timeout(conn, MINUTE)).unwrap();
                assert!(attempt.is_acquired());
                work();
                end(conn);
            } else {
                let held: Result<(), Error> =
                    wait(all.transaction(conn, work!(|_conn| Ok(work()))));
                held.unwrap();
            }
        });
    });
}

#[test]
fn timeouts_that_race_with_releases_leave_nothing() {
    contend(1, 4, 30, |all, pool, round, work| {
        let timeout = Duration::from_micros(700 * round as u64);
        match wait(all.acquire_timeout(pool, timeout)) {
            Ok(Attempt::Acquired(_guard)) => work(),
            Ok(Attempt::Busy) => {}
            Err(error) => assert_matches!(error, Error::TimedOut | Error::Pool(_)),
        }
    });
}

#[test]
fn whichever_lock_is_busy_nothing_is_held_and_a_waiter_holds_none_of_the_others() {
    let database = Database::new();
    let pool = pool(&database, 3);
    on_one(&pool, |_| on_one(&pool, |_| ()));
    let all = Wanted::several(&LOCK);
    let mut observer = Observer::of(&database);
    for busy in &all.parts {
        let holder = foreign_holder(&database, busy.lock_key());
        assert_matches!(wait(all.lock.try_acquire(&pool)), Ok(Attempt::Busy));
        assert_eq!(observer.all_held(), 1, "only the foreign lock");
        thread::scope(|scope| {
            let waiting = scope.spawn(|| wait(all.lock.acquire(&pool)).unwrap());
            eventually("the lock is awaited on the server", || {
                observer.waiters(busy.lock_key()) == 1
            });
            for free in all
                .parts
                .iter()
                .filter(|it| it.lock_key() != busy.lock_key())
            {
                release(free, &pool);
            }
            drop(holder);
            let guard = waiting.join().unwrap();
            all.assert_held(&mut observer);
            wait(guard.release()).unwrap();
        });
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_waiter_goes_from_one_busy_lock_to_the_next() {
    let database = Database::new();
    let all = Wanted::several(&LOCK);
    let lock = &all.lock;
    // A pool without and with a spare connection; in a transaction without and with a timeout.
    for (size, in_transaction, limit) in [
        (1, false, None),
        (3, false, None),
        (1, true, None),
        (1, true, Some(MINUTE)),
    ] {
        let pool = pool(&database, size);
        let mut holders: Vec<PgConnection> = all
            .parts
            .iter()
            .map(|lock| foreign_holder(&database, lock.lock_key()))
            .collect();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                if !in_transaction {
                    let guard = wait(lock.acquire(&pool)).unwrap();
                    all.assert_held(&mut Observer::of(&database));
                    return wait(guard.release()).unwrap();
                }
                on_one(&pool, |conn| {
                    begin(conn);
                    match limit {
                        None => wait(lock.acquire_xact(conn)).unwrap(),
                        Some(limit) => {
                            let waited = wait(lock.acquire_xact_timeout(conn, limit)).unwrap();
                            assert!(waited.is_acquired());
                        }
                    }
                    all.assert_held(&mut Observer::of(&database));
                    end(conn);
                });
            });
            let mut observer = Observer::of(&database);
            if in_transaction {
                eventually("the locks are awaited", || observer.all_waiting() == 1);
            }
            // Freed out of order, so that the waiter gets one lock, and must give it up for the
            // next.
            while !holders.is_empty() {
                drop(holders.remove(holders.len() / 2));
                let left = holders.len() as i64;
                eventually("the session has ended", || {
                    left == 0 || in_transaction || observer.all_held() == left
                });
            }
            waiting.join().unwrap();
        });
        assert_pool_whole(&pool, &database);
    }
}

#[test]
fn a_lock_that_other_code_has_unlocked_is_lost_and_the_others_are_released() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let all = Wanted::several(&LOCK);
    for lost in &all.parts {
        let key = lost.lock_key();
        let unlock = format!("SELECT pg_advisory_unlock({})", key.id().unwrap());
        let mut guard = wait(all.lock.acquire(&pool)).unwrap();
        wait(execute(guard.conn(), &unlock)).unwrap();
        assert!(!wait(guard.is_held()).unwrap());
        let released = wait(guard.release());
        assert_matches!(released, Err(Error::LockLost(name)) if *name == key.to_string());
        assert_eq!(observer.all_held(), 0);
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_transaction_that_is_refused_keeps_its_other_locks_and_goes_on() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    run(&mut database.connect(), "CREATE TABLE written ()");
    let (several, own) = (Wanted::several(&LOCK), LOCK.key("its own"));
    let all = AdvisoryLock::all(several.parts.iter().chain([&own]));
    for busy in &several.parts {
        let holder = foreign_holder(&database, busy.lock_key());
        on_one(&pool, |conn| {
            begin(conn);
            wait(own.acquire_xact(conn)).unwrap();
            wait(execute(conn, "INSERT INTO written DEFAULT VALUES")).unwrap();
            assert_matches!(wait(all.try_acquire_xact(conn)), Ok(Attempt::Busy));
            for milliseconds in [0, 30] {
                assert_eq!(observer.all_held(), 2, "its own lock and the foreign one");
                let timeout = Duration::from_millis(milliseconds);
                let waited = wait(all.acquire_xact_timeout(conn, timeout));
                assert_matches!(waited, Ok(Attempt::Busy));
            }
            assert_eq!(observer.all_held(), 2);
            wait(execute(conn, GOES_ON)).unwrap();
            drop(holder);
            wait(all.acquire_xact(conn)).unwrap();
            end(conn);
        });
    }
    assert_pool_whole(&pool, &database);
}

const GOES_ON: &str = "DO $$ BEGIN ASSERT current_setting('lock_timeout') = '0'; \
     ASSERT EXISTS (SELECT FROM written); END $$";

#[test]
fn a_full_lock_table_is_an_error_and_no_lock_stays() {
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
    // While the lock table is full, even this query fails.
    let held =
        "SELECT 1 / (1 - least(count(*), 1)) FROM pg_locks WHERE locktype = 'advisory' AND granted";
    eventually("no lock is held", || {
        diesel::connection::SimpleConnection::batch_execute(observer.conn(), held).is_ok()
    });
    on_one(&pool, |conn| {
        begin(conn);
        assert_matches!(wait(all.try_acquire_xact(conn)), Err(Error::Database(_)));
        assert_eq!(
            observer.all_held(),
            0,
            "no lock is held before the transaction ends"
        );
        end(conn);
    });
    release(&AdvisoryLock::all(&many[..10]), &pool);
    assert_pool_whole(&pool, &database);
}
