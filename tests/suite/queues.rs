//! The queues of the waiters in this process: one for each lock, semaphore or limit and each
//! database. Only the oldest waiter of a queue sends statements.

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
/// The timeout of a pool whose connections a crowd of waiters shares.
const LONG: Duration = Duration::from_secs(600);
/// Shorter than the pause of the second waiter of a queue, which is a second.
const SHORT: Duration = Duration::from_millis(900);

/// A pool with all of its connections open.
fn open_pool(database: &Database, size: u32) -> PgPool {
    // bb8 counts only open connections, so a pool that has opened few seems to have no spare one.
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
        eventually("the lock is awaited", || {
            observer.waiters(LOCK.lock_key()) == 1
        });
        for _ in 0..5 {
            once_at_least("the free lock is acquired soon", || {
                match wait(LOCK.acquire_timeout(&pool, SHORT)) {
                    Ok(attempt) => {
                        wait(attempt.acquired().expect("the lock is free").release()).unwrap();
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
fn the_oldest_waiter_of_each_database_waits_on_its_server() {
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
        eventually("a waiter of each database waits on its server", || {
            first.waiters(LOCK.lock_key()) + second.waiters(LOCK.lock_key()) == 2
        });
        // The release in the second database wakes the waiter of that database, even if it is the
        // younger one.
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
        eventually("the waiter has been refused", || proxy.round_trips() > 8);
        for _ in 0..5 {
            once_at_least("the free slot is claimed soon", || {
                match wait(SLOT.acquire_timeout(&pool, SHORT)) {
                    Ok(Admission::Admitted(permit)) => {
                        wait(permit.release()).unwrap();
                        true
                    }
                    // A claim whose reply came too late may still hold the slot for a moment.
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

/// The waiters sleep for an hour unless a reset or a refund wakes them.
#[test]
fn a_reset_or_a_refund_wakes_the_waiter_of_its_own_database() {
    let databases = [installed(), installed()];
    let pools = databases.each_ref().map(|database| open_pool(database, 1));
    let spent = pools.each_ref().map(|pool| {
        // The units of the second database are available although those of the first are used up.
        let check = wait(LIMIT.acquire_timeout(pool, MINUTE)).unwrap();
        check.allowed().expect("the units are available")
    });
    let [reset, refund]: [&dyn Fn() -> Result<bool>; 2] =
        [&|| wait(LIMIT.reset(&pools[0])), &|| {
            wait(LIMIT.refund(&pools[1], &spent[1], 1))
        }];
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
        for (gives_back, (proxy, waiter)) in [reset, refund].into_iter().zip(waiters).rev() {
            let mut before = 0;
            eventually("the waiter sleeps", || {
                let asked = std::mem::replace(&mut before, proxy.round_trips());
                thread::sleep(Duration::from_millis(300));
                asked > 0 && asked == proxy.round_trips()
            });
            assert!(!waiter.is_finished());
            assert!(gives_back().unwrap());
            assert!(waiter.join().unwrap().unwrap().is_allowed());
        }
    });
}

/// Each of the crowd tries once. Then the oldest polls, and the n-th tries every n − 1 seconds.
#[test]
fn a_crowd_that_waits_for_a_lock_sends_little_more_than_its_oldest_waiter() {
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
        eventually("each waiter has been refused", || {
            // Each waiter needs two round trips: a check-out and a try.
            proxy.round_trips() > 2 * CROWD
        });
        eventually(
            "in some second, less than a third of the crowd tries",
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
fn a_waiter_behind_another_whose_pool_is_exhausted_gets_the_lock() {
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
        eventually("the waiter polls", || proxy.round_trips() > 8);
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

/// A wait on the server notes a grant in a setting of its session. A wait clears the note of an
/// earlier one, and trusts only its own.
#[test]
fn a_note_of_an_earlier_wait_is_not_trusted() {
    let database = Database::new();
    let pool = open_pool(&database, 2);
    let _holder = foreign_holder(&database, LOCK.lock_key());
    let mut observer = Observer::of(&database);
    for _ in 0..2 {
        once_at_least("the lock is awaited on the server, and busy", || {
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

/// In one queue with the others, the cheap call would be the hundredth, which tries only after
/// about a hundred seconds.
#[test]
fn a_cheap_call_does_not_wait_behind_expensive_ones() {
    const CROWD: u64 = 100;
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let (waiting, pool) = (make_pool(&proxy.url(), 1, LONG), open_pool(&database, 2));
    // A unit refills in five seconds, and the 30 units that each of the crowd needs in 150 seconds.
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
        eventually("each waiter has been refused", || {
            // Each waiter needs two round trips: a check-out and a check.
            proxy.round_trips() > 2 * CROWD
        });
        while wait(little.check(&pool)).unwrap().is_allowed() {}
        let check = wait(little.acquire_timeout(&pool, MINUTE));
        eventually("a reset for each ends the waits", || {
            // One of the crowd may have the row locked for too long.
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

/// A forgotten transaction has locked the key, so each check holds a connection for 250 ms. Only
/// the oldest waiter repeats its check.
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
        eventually("all connections of the pool wait for the key", || {
            observer.all_waiting() == 3
        });
        eventually("most of the time, the pool has a free connection", || {
            let full = (0..100).filter(|_| {
                thread::sleep(Duration::from_millis(5));
                observer.all_waiting() == 3
            });
            full.count() < 25
        });
        run(&mut forgotten, "ROLLBACK");
    });
}

/// Waits with a pool of one, whose connection another thread has from the first refusal until the
/// deadline. Asserts that the wait returns the refusal. On a slow machine the first try has no
/// reply in time, so rounds are repeated.
#[track_caller]
fn assert_refused_without_a_connection<T: Send>(
    database: &Database,
    waits: impl Fn(&PgPool, Duration) -> Result<T> + Sync,
    is_refused: impl Fn(&T) -> bool,
) {
    once_at_least("the wait returns the refusal", || {
        let proxy = RoundTrips::in_front_of(database);
        let pool = make_pool(&proxy.url(), 1, MINUTE);
        on_one(&pool, |_| ());
        let (before, began) = (proxy.round_trips(), Instant::now());
        thread::scope(|scope| {
            let waiter = scope.spawn(|| waits(&pool, Duration::from_secs(3)));
            // Three round trips: the check-out, and the statement, which is prepared and executed.
            eventually("the first try was refused", || {
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
fn a_lock_that_was_busy_is_busy_though_the_pool_is_exhausted_at_the_deadline() {
    let database = Database::new();
    let _holder = foreign_holder(&database, LOCK.lock_key());
    assert_refused_without_a_connection(
        &database,
        |pool, timeout| wait(LOCK.acquire_timeout(pool, timeout)),
        Attempt::is_busy,
    );
}

#[test]
fn slots_that_were_full_are_full_though_the_pool_is_exhausted_at_the_deadline() {
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
fn a_limit_that_was_used_up_is_limited_though_the_pool_is_exhausted_at_the_deadline() {
    let database = installed();
    let other = open_pool(&database, 1);
    let round = AtomicU32::new(0);
    assert_refused_without_a_connection(
        &database,
        |pool, timeout| {
            // The units have refilled before the deadline, but no connection is free to ask.
            let limit = RateLimit::named("refilled", Quota::new(1, Duration::from_millis(1500)));
            let limit = limit.key(round.fetch_add(1, Ordering::SeqCst));
            assert!(wait(limit.check(&other)).unwrap().is_allowed());
            wait(limit.acquire_timeout(pool, timeout))
        },
        Check::is_limited,
    );
}

/// Calls `succeeds` with an open pool of two, over a network with a round trip of 60 ms. Asserts
/// that it succeeds without a new connection. On a slow machine it may not, so rounds are repeated.
#[track_caller]
fn assert_succeeds_slowly(database: &Database, mut succeeds: impl FnMut(&PgPool) -> bool) {
    once_at_least("the work succeeds without a new connection", || {
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

/// The units refill just before the deadline, which may be too late for another try.
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
