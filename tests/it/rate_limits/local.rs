//! Units that a process takes several at a time.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::half::error::Input;
use crate::half::{
    Database, Error, LimitedReason, LocalRateLimit, PgPool, Quota, RateLimit, RoundTrips,
    migrations, silent_pool,
};

use super::{API, HOUR, allowed, assert_about, database, limited};
use crate::support::assert_after_drop;

const WIDE: RateLimit = RateLimit::named("wide", Quota::per_day(24).burst(100));

/// A value whose pool has one connection, on which its statements are prepared.
fn prepared(limit: &RateLimit, pool: &PgPool, chunk: u32) -> LocalRateLimit {
    let local = limit.local(pool, chunk).unwrap();
    // diesel-async prepares more statements than Diesel, and not all of them at first.
    for key in 0..12 {
        let _ = allowed(local.check(&format!("prepared {key}"), 1).unwrap());
    }
    local
}

#[test]
fn a_chunk_is_handed_out_without_a_round_trip_and_given_back_on_drop() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let local = prepared(&WIDE, &pool, 10);
    let check = |cost: u32| allowed(local.check("7", cost).unwrap());
    assert_eq!(proxy.count(|| assert_eq!(check(1).remaining, 99)), 1);
    assert_eq!(
        proxy.count(|| assert_eq!((check(4).units, check(3).remaining), (4, 92))),
        0
    );
    // Two are left, so two more are needed, and ten are taken.
    assert_eq!(proxy.count(|| assert_eq!(check(4).remaining, 88)), 1);
    assert_eq!(WIDE.key(7).peek(&pool).unwrap().remaining, 80);
    assert_eq!(WIDE.peek(&pool).unwrap().remaining, 100);
    assert_eq!(allowed(local.check("", 1).unwrap()).remaining, 99);
    drop(local);
    // Beside the pool, because an asynchronous drop gives nothing back if this test uses the only connection just then.
    let conn = &mut database.connect();
    assert_after_drop("what was left is given back", || {
        WIDE.key(7).peek_on(conn).unwrap().remaining == 88
            && WIDE.peek_on(conn).unwrap().remaining == 99
    });
}

#[test]
fn nothing_is_given_back_if_every_connection_is_in_use() {
    let database = database();
    let pool = database.pool(1);
    let local = WIDE.local(&pool, 10).unwrap();
    let _ = allowed(local.check("7", 1).unwrap());
    // In use to the end, because an asynchronous drop leaves the work to a task.
    let _only = pool.get().unwrap();
    drop(local);
    let conn = &mut database.connect();
    assert_eq!(WIDE.key(7).peek_on(conn).unwrap().remaining, 90);
}

#[test]
fn callers_that_find_nothing_at_once_take_no_more_chunks_than_they_need() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let local = &prepared(&WIDE, &pool, 10);
    for (key, callers, chunks) in [("7", 10, 1), ("8", 25, 3)] {
        let start = &Barrier::new(callers);
        let trips = proxy.count(|| {
            std::thread::scope(|scope| {
                for _ in 0..callers {
                    scope.spawn(move || {
                        start.wait();
                        let _ = allowed(local.check(key, 1).unwrap());
                    });
                }
            });
        });
        assert_eq!(trips, chunks, "{callers} callers");
        let remaining = WIDE.key(key).peek(&pool).unwrap().remaining;
        assert_eq!(u64::from(remaining), 100 - 10 * chunks);
    }
}

#[test]
fn callers_wait_for_a_chunk_although_there_are_connections_for_all_of_them() {
    let database = database();
    let pool = database.pool(8);
    let local = &WIDE.local(&pool, 10).unwrap();
    // Every connection is open.
    drop((0..8).map(|_| pool.get().unwrap()).collect::<Vec<_>>());
    let mut chunks = 0;
    for key in 0..10 {
        let start = &Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(move || {
                    start.wait();
                    let _ = allowed(local.check(&key.to_string(), 1).unwrap());
                });
            }
        });
        chunks += (100 - WIDE.key(key).peek(&pool).unwrap().remaining) / 10;
    }
    // On a busy machine a chunk may take longer than the others wait for it.
    assert!((10..=15).contains(&chunks), "{chunks} chunks for 10 keys");
}

#[test]
fn callers_of_a_key_that_is_used_up_share_a_round_trip() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let local = &prepared(&API, &pool, 5);
    let _ = allowed(API.key(7).cost(2).check(&pool).unwrap());
    let start = &Barrier::new(20);
    let trips = proxy.count(|| {
        let allowed = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..20)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        local.check("7", 1).unwrap().is_allowed()
                    })
                })
                .collect();
            let outcomes = threads.into_iter().map(|thread| thread.join().unwrap());
            outcomes.filter(|is_allowed| *is_allowed).count()
        });
        assert_eq!(allowed, 3);
    });
    // What was left was less than a chunk, so it is known that nothing is left.
    assert_eq!(trips, 1);
}

#[test]
fn fewer_are_taken_where_fewer_are_left() {
    let database = database();
    let pool = database.pool(1);
    let local = API.local(&pool, 50).unwrap();
    let _ = allowed(API.key(7).cost(2).check(&pool).unwrap());
    for left in (0..3).rev() {
        assert_eq!(allowed(local.check("7", 1).unwrap()).remaining, left);
        assert_eq!(API.key(7).peek(&pool).unwrap().remaining, 0);
    }
    assert_about(
        limited(local.check("7", 1).unwrap()).retry_after.unwrap(),
        HOUR,
    );
    match local.check("8", 6) {
        Err(Error::Input(Input::CostAboveBurst { .. })) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(allowed(local.check("8", 5).unwrap()).remaining, 0);
}

#[test]
fn a_chunk_that_is_far_above_the_burst_takes_all_that_is_left() {
    let database = database();
    let pool = database.pool(1);
    let local = API.local(&pool, u32::MAX).unwrap();
    for left in (0..5).rev() {
        assert_eq!(allowed(local.check("7", 1).unwrap()).remaining, left);
    }
    assert_eq!(limited(local.check("7", 1).unwrap()).remaining, 0);
}

#[test]
fn a_wait_that_outlasts_what_is_in_hand_is_told_for_the_whole_cost() {
    let database = database();
    let pool = database.pool(1);
    // An hour for each unit. What is taken may be used for ten hours.
    let local = WIDE.local(&pool, 10).unwrap();
    for key in ["7", "8"] {
        let _ = allowed(local.check(key, 1).unwrap());
        let _ = allowed(WIDE.key(key).cost(90).check(&pool).unwrap());
    }
    // As the reply tells it, and as it is remembered.
    let late = limited(local.check("8", 60).unwrap());
    assert_about(late.retry_after.unwrap(), 60 * HOUR);
    for _ in 0..2 {
        let soon = limited(local.check("7", 12).unwrap());
        assert_about(soon.retry_after.unwrap(), 3 * HOUR);
        let late = limited(local.check("7", 60).unwrap());
        assert_about(late.retry_after.unwrap(), 60 * HOUR);
        let never = limited(local.check("7", 105).unwrap());
        assert_eq!(never.retry_after, None);
    }
}

#[test]
fn a_limited_call_is_remembered_for_each_cost_and_for_a_second_at_most() {
    let database = database();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 1);
    let local = prepared(&API, &pool, 1);
    let _ = allowed(API.key(7).cost(3).check(&pool).unwrap());
    let denied = limited(local.check("7", 5).unwrap());
    assert_about(denied.retry_after.unwrap(), 3 * HOUR);
    let since = Instant::now();
    let trips = proxy.count(|| {
        let denied = limited(local.check("7", 5).unwrap());
        assert_eq!((denied.reason, denied.remaining), (LimitedReason::Spent, 2));
        assert_about(denied.retry_after.unwrap(), 3 * HOUR);
        let denied = limited(local.check("7", 4).unwrap());
        assert_about(denied.retry_after.unwrap(), 2 * HOUR);
    });
    assert!(trips == 0 || since.elapsed() > Duration::from_millis(900));
    // A cost for which enough is left is not limited.
    assert_eq!(allowed(local.check("7", 2).unwrap()).remaining, 0);
    let _ = limited(local.check("7", 1).unwrap());
    API.key(7).reset(&pool).unwrap();
    std::thread::sleep(Duration::from_millis(1001));
    assert_eq!(allowed(local.check("7", 1).unwrap()).remaining, 4);
}

#[test]
fn what_was_taken_is_void_when_it_has_come_back_by_itself() {
    let database = database();
    let pool = database.pool(1);
    let quota = Quota::per_second(100).burst(20);
    let limit = RateLimit::named("void", quota);
    let local = limit.local(&pool, 10).unwrap();
    let _ = allowed(local.check("7", 1).unwrap());
    std::thread::sleep(Duration::from_millis(120));
    let before = limit.key(7).peek(&pool).unwrap();
    assert_eq!(before.full_in, Duration::ZERO);
    let _ = allowed(local.check("7", 1).unwrap());
    assert!(limit.key(7).peek(&pool).unwrap().full_in > Duration::ZERO);
}

#[test]
fn a_bad_chunk_a_bad_cost_and_a_bad_key_are_errors() {
    let database = Database::new();
    let pool = database.pool(1);
    assert!(matches!(
        API.local(&pool, 0),
        Err(Error::Input(Input::BadUnits { .. }))
    ));
    let bad = RateLimit::named("api", Quota::per_second(0));
    assert!(matches!(
        bad.local(&pool, 1),
        Err(Error::Input(Input::BadQuota { .. }))
    ));
    let local = API.local(&pool, 1).unwrap();
    assert!(matches!(
        local.check("7", 0),
        Err(Error::Input(Input::BadUnits { .. }))
    ));
    assert!(matches!(
        local.check("\0", 1),
        Err(Error::Input(Input::NulCharacter))
    ));
    let wide = WIDE.local(&pool, 1000).unwrap();
    // An error is not remembered.
    assert!(matches!(local.check("7", 1), Err(Error::Schema(_))));
    migrations::install(&mut database.connect()).unwrap();
    let _ = allowed(local.check("7", 1).unwrap());
    // It names the cost of the call, and not the chunk.
    let above = wide.check("8", 150);
    let Err(Error::Input(Input::CostAboveBurst { cost, burst, .. })) = above else {
        panic!("{above:?}");
    };
    assert_eq!((cost, burst), (150, 100));
}

/// When a call began and ended, and how many units it was allowed.
type Use = (Duration, Duration, u32);

/// In each span, from before its first to after its last call, at most `burst + largest + span × N / period` units were used,
/// where `largest` is the chunk, or the largest cost.
#[track_caller]
fn assert_kept(mut used: Vec<Use>, quota: Quota, largest: u32) {
    used.sort();
    let rate = f64::from(quota.n) / quota.period.as_secs_f64();
    for (place, (first, ..)) in used.iter().enumerate() {
        let mut units = 0;
        let mut last = Duration::ZERO;
        for (_, end, part) in &used[place..] {
            units += part;
            last = last.max(*end);
            let span = last.saturating_sub(*first).as_secs_f64();
            let promised = f64::from(quota.burst + largest) + span * rate;
            assert!(f64::from(units) <= promised, "{units} in {span} s");
        }
    }
}

#[test]
fn ten_processes_that_hoard_keep_the_promise_with_a_chunk() {
    let database = database();
    let quota = Quota::per_second(200).burst(40);
    let limit = RateLimit::named("hoard", quota);
    let pools: Vec<_> = (0..10).map(|_| database.pool(1)).collect();
    let locals: Vec<LocalRateLimit> = pools
        .iter()
        .map(|pool| limit.local(pool, 10).unwrap())
        .collect();
    let used = Mutex::new(Vec::new());
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (process, local) in locals.iter().enumerate() {
            let used = &used;
            scope.spawn(move || {
                while start.elapsed() < Duration::from_millis(1500) {
                    // Takes a chunk, holds it, and then spends all of it at one moment.
                    std::thread::sleep(Duration::from_millis(20 + process as u64));
                    let mut mine = Vec::new();
                    for _ in 0..10 {
                        let before = start.elapsed();
                        if local.check("7", 1).unwrap().is_allowed() {
                            mine.push((before, start.elapsed(), 1));
                        }
                    }
                    used.lock().unwrap().extend(mine);
                }
            });
        }
    });
    let used = used.into_inner().unwrap();
    assert!(used.len() > 100, "{}", used.len());
    assert_kept(used, quota, 10);
}

#[test]
fn threads_that_share_units_and_values_that_are_dropped_keep_the_promise_with_the_largest_cost() {
    let database = database();
    let quota = Quota::per_second(400).burst(60);
    let limit = RateLimit::named("shared", quota);
    let pools: Vec<_> = (0..3).map(|_| database.pool(2)).collect();
    let (used, start) = (Mutex::new(Vec::new()), Instant::now());
    let calls = |local: &LocalRateLimit, costs: &[u32]| {
        let mut mine: Vec<Use> = Vec::new();
        for cost in costs {
            let before = start.elapsed();
            if local.check("7", *cost).unwrap().is_allowed() {
                mine.push((before, start.elapsed(), *cost));
            }
        }
        used.lock().unwrap().extend(mine);
    };
    let is_running = || start.elapsed() < Duration::from_millis(1500);
    std::thread::scope(|scope| {
        for pool in &pools {
            let (limit, calls, is_running) = (&limit, &calls, &is_running);
            scope.spawn(move || {
                while is_running() {
                    let local = limit.local(pool, 10).unwrap();
                    std::thread::scope(|scope| {
                        scope.spawn(|| calls(&local, &[1, 3, 12, 1, 2, 5]));
                        scope.spawn(|| calls(&local, &[7, 1, 1, 9, 15, 1]));
                    });
                    // What was not used is given back.
                    drop(local);
                }
            });
        }
    });
    let used = used.into_inner().unwrap();
    assert!(used.len() > 50, "{}", used.len());
    assert_kept(used, quota, 15);
}

#[test]
fn a_quota_that_is_refilled_faster_than_a_round_trip_limits_nothing_by_itself() {
    let database = database();
    let pool = database.pool(1);
    let fast = RateLimit::named("fast", Quota::per_second(4_000_000_000).burst(1000));
    let local = fast.local(&pool, 10).unwrap();
    for cost in [1, 1, 10, 11, 1000] {
        let spent = allowed(local.check("7", cost).unwrap());
        assert_eq!(spent.units, cost);
    }
}
