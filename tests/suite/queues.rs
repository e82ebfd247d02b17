//! The queues of those who wait in this process: one for each thing and database, of which only the oldest sends anything.

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use workbench::{Database, RoundTrips};

use crate::assert_matches;
use crate::half::{
    Admission, AdvisoryLock, Attempt, Check, Error, PgPool, Quota, RateLimit, Result, Semaphore,
    make_pool, on_all, on_first, on_one, pool, wait,
};
use crate::support::{
    Observer, assert_pool_whole, eventually, foreign_holder, installed, once_at_least, run,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("queues");
static SLOT: Semaphore = Semaphore::named("queues", 1, HOUR);
static LIMIT: RateLimit = RateLimit::named("queues", Quota::new(1, HOUR));

const HOUR: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);
/// Crowds may wait for each other for long.
const LONG: Duration = Duration::from_secs(600);
/// Shorter than the pause of one who is the second in a queue.
const SHORT: Duration = Duration::from_millis(900);

/// A pool whose connections are open.
fn open_pool(database: &Database, size: u32) -> PgPool {
    // bb8 tells only how many it has.
    fn open(pool: &PgPool, size: u32) {
        if size > 0 {
            on_one(pool, |_| open(pool, size - 1));
        }
    }
    let pool = pool(database, size);
    open(&pool, size);
    pool
}

#[test]
fn a_lock_that_is_free_in_one_database_waits_for_nobody_in_another() {
    let (busy, free) = (Database::new(), Database::new());
    let (waiting, pool) = (open_pool(&busy, 2), open_pool(&free, 2));
    let holder = foreign_holder(&busy, LOCK.lock_key());
    thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(wait(LOCK.acquire(&waiting)).unwrap().release()));
        let mut observer = Observer::of(&busy);
        eventually("it waits", || observer.waiters(LOCK.lock_key()) == 1);
        for _ in 0..5 {
            once_at_least("it is acquired soon", || {
                match wait(LOCK.acquire_timeout(&pool, SHORT)) {
                    Ok(attempt) => {
                        wait(attempt.acquired().expect("it is free").release()).unwrap();
                        true
                    }
                    Err(error) => {
                        assert_matches!(error, Error::TimedOut);
                        false
                    }
                }
            });
        }
        drop(holder);
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn the_oldest_of_each_database_waits_on_its_server() {
    let databases = [Database::new(), Database::new()];
    let pools = databases.each_ref().map(|database| open_pool(database, 3));
    let [mut first, mut second] = databases.each_ref().map(Observer::of);
    let guards = pools
        .each_ref()
        .map(|pool| wait(LOCK.acquire(pool)).unwrap());
    thread::scope(|scope| {
        let waiters = pools.each_ref().map(|pool| {
            scope.spawn(move || wait(wait(LOCK.acquire(pool)).unwrap().release()).unwrap())
        });
        eventually("both wait at the same time", || {
            first.waiters(LOCK.lock_key()) + second.waiters(LOCK.lock_key()) == 2
        });
        // The release in the second database, where the waiter may be the younger one, wakes that one.
        for (guard, waiter) in guards.into_iter().zip(waiters).rev() {
            wait(guard.release()).unwrap();
            waiter.join().unwrap();
        }
    });
    for (pool, database) in pools.iter().zip(&databases) {
        assert_pool_whole(pool, database);
    }
}

#[test]
fn a_slot_that_is_free_in_one_database_waits_for_nobody_in_another() {
    let (full, free) = (installed(), installed());
    let proxy = RoundTrips::in_front_of(&full);
    let (waiting, pool) = (make_pool(&proxy.url(), 1, MINUTE), open_pool(&free, 2));
    let holder = open_pool(&full, 1);
    let permit = wait(SLOT.acquire(&holder)).unwrap();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| wait(wait(SLOT.acquire(&waiting)).unwrap().release()));
        eventually("it has been refused", || proxy.round_trips() > 8);
        for _ in 0..5 {
            once_at_least("it is admitted soon", || {
                match wait(SLOT.acquire_timeout(&pool, SHORT)) {
                    Ok(Admission::Admitted(permit)) => {
                        wait(permit.release()).unwrap();
                        true
                    }
                    // It may be held by a claim whose reply came too late, for a moment.
                    Ok(Admission::Full(_)) => false,
                    Err(error) => {
                        assert_matches!(error, Error::TimedOut);
                        false
                    }
                }
            });
        }
        wait(permit.release()).unwrap();
        waiter.join().unwrap().unwrap();
    });
}

/// Nothing but the reset wakes them within an hour.
#[test]
fn a_reset_wakes_the_one_who_waits_for_units_in_its_database() {
    let databases = [installed(), installed()];
    let pools = databases.each_ref().map(|database| open_pool(database, 1));
    for pool in &pools {
        // Free in the second one, though the first one's are used up.
        let check = wait(LIMIT.acquire_timeout(pool, MINUTE)).unwrap();
        assert!(check.is_allowed());
    }
    thread::scope(|scope| {
        let waiters: Vec<_> = databases
            .iter()
            .map(|database| {
                let proxy = RoundTrips::in_front_of(database);
                let pool = make_pool(&proxy.url(), 1, MINUTE);
                let waiter = scope.spawn(move || wait(LIMIT.acquire_timeout(&pool, Duration::MAX)));
                (proxy, waiter)
            })
            .collect();
        for (pool, (proxy, waiter)) in pools.iter().zip(waiters).rev() {
            let mut before = 0;
            eventually("it sleeps", || {
                let asked = std::mem::replace(&mut before, proxy.round_trips());
                thread::sleep(Duration::from_millis(300));
                asked > 0 && asked == proxy.round_trips()
            });
            assert!(!waiter.is_finished());
            assert!(wait(LIMIT.reset(pool)).unwrap());
            assert!(waiter.join().unwrap().unwrap().is_allowed());
        }
    });
}

/// The crowd's first tries, and then the polls of the oldest, and of the n-th every n - 1 seconds.
#[test]
fn a_crowd_that_waits_for_a_lock_sends_little_more_than_its_oldest() {
    const CROWD: u64 = 300;
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let waiting = make_pool(&proxy.url(), 1, LONG);
    let holder = foreign_holder(&database, LOCK.lock_key());
    thread::scope(|scope| {
        for _ in 0..CROWD {
            thread::Builder::new()
                .stack_size(1 << 20)
                .spawn_scoped(scope, || {
                    wait(wait(LOCK.acquire(&waiting)).unwrap().release()).unwrap();
                })
                .unwrap();
        }
        eventually("each has been refused", || {
            // A check-out and a try each.
            proxy.round_trips() > 2 * CROWD
        });
        eventually(
            "a second passes in which not a third sends anything",
            || {
                let before = proxy.round_trips();
                thread::sleep(Duration::from_secs(1));
                proxy.round_trips() - before < CROWD / 3
            },
        );
        drop(holder);
    });
}

#[test]
fn a_waiter_behind_one_whose_pool_is_empty_gets_the_lock() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let (empty, pool) = (make_pool(&proxy.url(), 1, MINUTE), open_pool(&database, 2));
    let holder = foreign_holder(&database, LOCK.lock_key());
    thread::scope(|scope| {
        let oldest = scope.spawn(|| wait(wait(LOCK.acquire(&empty)).unwrap().release()));
        eventually("the oldest has been refused", || proxy.round_trips() > 8);
        on_one(&empty, |_| {
            let second = scope.spawn(|| wait(wait(LOCK.acquire(&pool)).unwrap().release()));
            drop(holder);
            second.join().unwrap().unwrap();
            assert!(!oldest.is_finished());
        });
        oldest.join().unwrap().unwrap();
    });
}

#[test]
fn a_pool_of_one_never_waits_on_the_server() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    let holder = foreign_holder(&database, LOCK.lock_key());
    thread::scope(|scope| {
        let proxy = RoundTrips::in_front_of(&database);
        let waiting = make_pool(&proxy.url(), 1, MINUTE);
        let waiters = [&pool, &waiting].map(|pool| {
            let pool = pool.clone();
            scope.spawn(move || wait(wait(LOCK.acquire(&pool)).unwrap().release()).unwrap())
        });
        eventually("it polls", || proxy.round_trips() > 8);
        for _ in 0..100 {
            assert_eq!(observer.waiters(LOCK.lock_key()), 0);
            wait(on_first(&pool, "SELECT 1")).unwrap();
            wait(on_first(&waiting, "SELECT 1")).unwrap();
        }
        drop(holder);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

/// A wait clears the note of an earlier one in its session, and believes its own only.
#[test]
fn a_note_of_an_earlier_wait_is_not_believed() {
    let database = Database::new();
    let pool = open_pool(&database, 2);
    let _holder = foreign_holder(&database, LOCK.lock_key());
    let mut observer = Observer::of(&database);
    for _ in 0..2 {
        once_at_least("it waits, and is busy then", || {
            wait(on_all(&pool, "SET diesel_interlock.waited = 'granted'")).unwrap();
            thread::scope(|scope| {
                let waiter = scope.spawn(|| wait(LOCK.acquire_timeout(&pool, 2 * SHORT)));
                let mut has_waited = false;
                while !has_waited && !waiter.is_finished() {
                    has_waited = observer.waiters(LOCK.lock_key()) == 1;
                }
                match waiter.join().unwrap() {
                    Ok(attempt) => {
                        assert!(attempt.is_busy());
                        has_waited
                    }
                    Err(error) => {
                        assert_matches!(error, Error::TimedOut);
                        false
                    }
                }
            })
        });
        assert_eq!(observer.holders(LOCK.lock_key()), 1);
    }
}

/// The hundredth of a queue tries only after about a hundred seconds, unless it is the first in turn.
#[test]
fn a_call_that_costs_little_does_not_wait_for_those_that_cost_much() {
    const CROWD: u64 = 100;
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let (waiting, pool) = (make_pool(&proxy.url(), 1, LONG), open_pool(&database, 2));
    // A unit refills in five seconds, and what each of the crowd needs in 150.
    let little = RateLimit::named("costs", Quota::new(1, Duration::from_secs(5)).burst(30));
    let much = little.cost(30);
    assert!(wait(much.check(&pool)).unwrap().is_allowed());
    thread::scope(|scope| {
        let crowd: Vec<_> = (0..CROWD)
            .map(|_| {
                thread::Builder::new()
                    .stack_size(1 << 20)
                    .spawn_scoped(scope, || {
                        wait(much.acquire_timeout(&waiting, Duration::MAX)).unwrap()
                    })
                    .unwrap()
            })
            .collect();
        eventually("each has been refused", || {
            // A check-out and a check each.
            proxy.round_trips() > 2 * CROWD
        });
        while wait(little.check(&pool)).unwrap().is_allowed() {}
        let check = wait(little.acquire_timeout(&pool, MINUTE));
        eventually("a reset for each ends the waits", || {
            // One of the crowd may have its row for too long.
            let reset = wait(little.reset(&pool));
            assert_matches!(reset, Ok(_) | Err(Error::KeyLocked(_)));
            crowd.iter().all(thread::ScopedJoinHandle::is_finished)
        });
        assert!(check.unwrap().is_allowed());
        for waiter in crowd {
            assert!(waiter.join().unwrap().is_allowed());
        }
    });
}

/// A `BEGIN` that was forgotten, on a key for which many wait: only the oldest tries again and again.
#[test]
fn a_crowd_that_waits_for_a_locked_key_leaves_connections_to_others() {
    let database = installed();
    let pool = make_pool(&database.url(), 3, LONG);
    let limit = RateLimit::named("locked", Quota::per_second(1000));
    assert!(wait(limit.check(&pool)).unwrap().is_allowed());
    let mut forgotten = database.connect();
    run(
        &mut forgotten,
        "BEGIN; UPDATE resource_control.rate_limit SET full_at = '-infinity'",
    );
    let mut observer = Observer::of(&database);
    thread::scope(|scope| {
        for _ in 0..30 {
            scope.spawn(|| {
                let check = wait(limit.acquire_timeout(&pool, LONG)).unwrap();
                assert!(check.is_allowed());
            });
        }
        eventually("all connections wait for the key", || {
            observer.all_waiting() == 3
        });
        eventually("most of the time, a connection is left", || {
            let full = (0..100).filter(|_| {
                thread::sleep(Duration::from_millis(5));
                observer.all_waiting() == 3
            });
            full.count() < 25
        });
        run(&mut forgotten, "ROLLBACK");
    });
}

/// Waits with a pool of one, whose connection somebody else has from the first refusal until the deadline. On a machine that is too
/// slow, the first try has no reply in its time.
#[track_caller]
fn assert_refused_without_a_connection<T: Send>(
    database: &Database,
    waits: impl Fn(&PgPool, Duration) -> Result<T> + Sync,
    is_refused: impl Fn(&T) -> bool,
) {
    once_at_least("it is refused", || {
        let proxy = RoundTrips::in_front_of(database);
        let pool = make_pool(&proxy.url(), 1, MINUTE);
        on_one(&pool, |_| ());
        let (before, began) = (proxy.round_trips(), Instant::now());
        thread::scope(|scope| {
            let waiter = scope.spawn(|| waits(&pool, Duration::from_secs(3)));
            // A check-out, and a statement, which is prepared on this connection for the first time.
            eventually("it was refused", || {
                proxy.round_trips() >= before + 3 || waiter.is_finished()
            });
            on_one(&pool, |_| {
                let is_early = began.elapsed() < Duration::from_secs(1);
                let waited = waiter.join().unwrap();
                is_early && waited.is_ok_and(|waited| is_refused(&waited))
            })
        })
    });
}

#[test]
fn a_lock_that_was_busy_is_busy_though_the_pool_is_empty_at_the_deadline() {
    let database = Database::new();
    let _holder = foreign_holder(&database, LOCK.lock_key());
    assert_refused_without_a_connection(
        &database,
        |pool, timeout| wait(LOCK.acquire_timeout(pool, timeout)),
        Attempt::is_busy,
    );
}

#[test]
fn slots_that_were_full_are_full_though_the_pool_is_empty_at_the_deadline() {
    let database = installed();
    let other = open_pool(&database, 1);
    let _permit = wait(SLOT.acquire(&other)).unwrap();
    assert_refused_without_a_connection(
        &database,
        |pool, timeout| wait(SLOT.acquire_timeout(pool, timeout)),
        Admission::is_full,
    );
}

#[test]
fn a_limit_that_was_used_up_is_limited_though_the_pool_is_empty_at_the_deadline() {
    let database = installed();
    let other = open_pool(&database, 1);
    let round = AtomicU32::new(0);
    assert_refused_without_a_connection(
        &database,
        |pool, timeout| {
            // The units are there again in time, but nobody is asked.
            let limit = RateLimit::named("refilled", Quota::new(1, Duration::from_millis(1500)));
            let limit = limit.key(round.fetch_add(1, Ordering::SeqCst));
            assert!(wait(limit.check(&other)).unwrap().is_allowed());
            wait(limit.acquire_timeout(pool, timeout))
        },
        Check::is_limited,
    );
}

/// Lends a pool of two that is open, over a network with a round trip of 60 ms. Asserts that the work succeeds without a new
/// connection, as it may not on a machine that is too slow.
#[track_caller]
fn assert_succeeds_slowly(database: &Database, mut succeeds: impl FnMut(&PgPool) -> bool) {
    once_at_least("it succeeds", || {
        let proxy = RoundTrips::in_front_of(database);
        let pool = make_pool(&proxy.url(), 2, MINUTE);
        on_one(&pool, |_| on_one(&pool, |_| ()));
        let before = proxy.connections();
        proxy.set_delay(Duration::from_millis(60), Duration::ZERO);
        succeeds(&pool) && proxy.connections() == before
    });
}

#[test]
fn a_busy_lock_is_busy_over_a_slow_network_and_costs_no_connection() {
    let database = Database::new();
    let _holder = foreign_holder(&database, LOCK.lock_key());
    assert_succeeds_slowly(&database, |pool| {
        let is_busy = |_| {
            let waited = wait(LOCK.acquire_timeout(pool, Duration::from_millis(700)));
            waited.is_ok_and(|attempt| attempt.is_busy())
        };
        (0..5).all(is_busy) && wait(LOCK.try_acquire(pool)).unwrap().is_busy()
    });
}

#[test]
fn full_slots_are_full_over_a_slow_network_and_cost_no_connection() {
    let database = installed();
    let other = open_pool(&database, 1);
    let _permit = wait(SLOT.acquire(&other)).unwrap();
    assert_succeeds_slowly(&database, |pool| {
        let is_full = |_| {
            let waited = wait(SLOT.acquire_timeout(pool, Duration::from_millis(700)));
            waited.is_ok_and(|admission| admission.is_full())
        };
        (0..5).all(is_full)
    });
}

/// Units that are there again just before the deadline, which may be too late for a try.
#[test]
fn units_that_refill_at_the_deadline_are_no_error_over_a_slow_network() {
    let database = installed();
    let mut key = 0;
    assert_succeeds_slowly(&database, |pool| {
        let is_no_error = |_| {
            key += 1;
            let limit = RateLimit::named("slow", Quota::new(1, SHORT)).key(key);
            assert!(wait(limit.check(pool)).unwrap().is_allowed());
            wait(limit.acquire_timeout(pool, SHORT)).is_ok()
        };
        (0..4).all(is_no_error)
    });
}
