//! Rate limits that decide from a chunk of units in memory.

use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use workbench::RoundTrips;

use crate::assert_matches;
use crate::half::{Error, LocalRateLimit, Quota, RateLimit, make_pool, migrations, pool, wait};
use crate::support::{installed, run};

/// No unit refills while a test runs.
static WIDE: RateLimit = RateLimit::named("wide", Quota::per_day(24).burst(100));

fn is_allowed(local: &LocalRateLimit, key: &str) -> bool {
    wait(local.check(key)).unwrap().is_allowed()
}

#[test]
fn a_chunk_is_handed_out_without_a_round_trip() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let local = WIDE.local(pool.clone(), 10);
    assert!(is_allowed(&local, "7"));
    assert_eq!(
        proxy.count(|| (0..9).for_each(|_| assert!(is_allowed(&local, "7")))),
        0
    );
    assert_eq!(wait(WIDE.key("7").peek(&pool)).unwrap().remaining, 90);
    assert!(is_allowed(&local.clone(), "7"));
    assert_eq!(wait(WIDE.key("7").peek(&pool)).unwrap().remaining, 80);
    assert_eq!(
        proxy.count(|| (0..9).for_each(|_| assert!(is_allowed(&local.clone(), "7")))),
        0
    );
    // A denial is remembered until its units have refilled.
    assert!(
        wait(WIDE.key("7").cost(80).check(&pool))
            .unwrap()
            .is_allowed()
    );
    assert!(!is_allowed(&local, "7"));
    let refused = proxy.count(|| {
        let check = wait(local.check("7")).unwrap();
        assert!(
            check
                .retry_after_secs()
                .is_some_and(|seconds| (3500..=3600).contains(&seconds))
        );
    });
    assert_eq!(refused, 0);
}

#[test]
fn a_chunk_has_fewer_units_where_fewer_are_left() {
    let database = installed();
    let pool = pool(&database, 1);
    let local = WIDE.local(pool.clone(), 50);
    assert!(
        wait(WIDE.key("7").cost(97).check(&pool))
            .unwrap()
            .is_allowed()
    );
    for left in [true, true, true, false] {
        assert_eq!(is_allowed(&local, "7"), left);
        assert_eq!(wait(WIDE.key("7").peek(&pool)).unwrap().remaining, 0);
    }
    // A chunk has at most the burst, and at least one unit.
    for (chunk, left) in [(u32::MAX, 0), (0, 99)] {
        let key = chunk.to_string();
        assert!(is_allowed(&WIDE.local(pool.clone(), chunk), &key));
        assert_eq!(wait(WIDE.key(&key).peek(&pool)).unwrap().remaining, left);
    }
}

#[test]
fn concurrent_callers_take_no_more_chunks_than_they_need() {
    let database = installed();
    let pool = pool(&database, 8);
    let local = WIDE.local(pool.clone(), 10);
    for (key, callers, chunks) in [("7", 10, 1), ("8", 25, 3)] {
        let start = Barrier::new(callers);
        thread::scope(|scope| {
            for _ in 0..callers {
                scope.spawn(|| {
                    start.wait();
                    assert!(is_allowed(&local, key));
                });
            }
        });
        let remaining = wait(WIDE.key(key).peek(&pool)).unwrap().remaining;
        assert_eq!(remaining, 100 - 10 * chunks, "{callers} callers");
    }
}

#[test]
fn callers_that_wait_for_a_chunk_that_fails_ask_for_themselves() {
    let database = installed();
    let pool = pool(&database, 4);
    let local = WIDE.local(pool, 10);
    let mut conn = database.connect();
    run(
        &mut conn,
        "ALTER TABLE resource_control.rate_limit RENAME TO elsewhere",
    );
    let start = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                assert_matches!(wait(local.check("7")), Err(Error::Database(_)));
            });
        }
    });
    run(
        &mut conn,
        "ALTER TABLE resource_control.elsewhere RENAME TO rate_limit",
    );
    assert!(is_allowed(&local, "7"));
}

#[test]
fn callers_that_wait_for_a_chunk_get_the_error_of_the_caller_that_takes_it() {
    let database = installed();
    let local = WIDE.local(pool(&database, 4), 10);
    assert!(is_allowed(&WIDE.local(pool(&database, 1), 10), "7"));
    let mut conn = database.connect();
    run(
        &mut conn,
        "BEGIN; UPDATE resource_control.rate_limit SET burst = burst",
    );
    let start = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                start.wait();
                assert_matches!(wait(local.check("7")), Err(Error::KeyLocked("wide")));
            });
        }
    });
    run(&mut conn, "ROLLBACK");
    assert!(is_allowed(&local, "7"));
}

#[test]
fn a_bad_key_is_refused_before_anything_is_sent() {
    let database = workbench::Database::new(); // without the schema
    let pool = pool(&database, 1);
    let local = WIDE.local(pool.clone(), 10);
    for key in ["nul \0".to_owned(), "x".repeat(1001)] {
        assert_matches!(wait(local.check(&key)), Err(Error::Input(_)));
    }
    assert_matches!(wait(local.check("7")), Err(Error::NotInstalled));
    wait(migrations::install(&pool)).unwrap();
    assert!(is_allowed(&local, "7"));
}

#[test]
fn each_instance_exceeds_the_limit_by_at_most_one_chunk() {
    let database = installed();
    let quota = Quota::per_second(200).burst(50);
    let limit = RateLimit::named("local", quota);
    let (instances, chunk) = (3, 10);
    let (grants, start) = (Mutex::new(Vec::new()), Barrier::new(2 * instances));
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..instances {
            let local = limit.local(pool(&database, 2), chunk);
            for _ in 0..2 {
                let (local, grants, start) = (local.clone(), &grants, &start);
                scope.spawn(move || {
                    start.wait();
                    let is_enough = || grants.lock().unwrap().len() > 450;
                    while !is_enough() && began.elapsed() < Duration::from_secs(60) {
                        match wait(local.check("7")) {
                            Ok(check) if check.is_allowed() => {
                                grants.lock().unwrap().push(began.elapsed());
                            }
                            // On a slow machine, the row is locked by others for too long.
                            Ok(_) | Err(Error::KeyLocked(_)) => {}
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        }
    });
    let mut grants = grants.into_inner().unwrap();
    grants.sort_unstable();
    let most = (quota.burst + quota.units) as usize + instances * chunk as usize;
    for (first, at) in grants.iter().enumerate() {
        let in_a_period = grants[first..]
            .iter()
            .take_while(|other| **other - *at <= quota.period);
        // A thread that was interrupted between a check and the clock may be counted late.
        assert!(in_a_period.count() <= most + 6);
    }
    assert!(grants.len() > 450, "{}", grants.len());
}
