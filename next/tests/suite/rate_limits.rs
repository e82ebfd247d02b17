//! A rate limit never allows more than burst + N in a period.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::rate_limit::Spent;
use workbench::Database;

use crate::assert_matches;
use crate::half::{
    Check, CheckAll, Error, PgPool, Quota, RateLimit, execute, migrations, on_one, pool, wait,
};
use crate::support::{HAS_WRITTEN_NOTHING, Observer, eventually, installed, number, run, truth};

/// One unit in a minute, so that nothing refills during a test.
static SLOW: RateLimit = RateLimit::named("slow", Quota::per_minute(1).burst(5));

fn is_allowed(limit: &RateLimit, pool: &PgPool) -> bool {
    wait(limit.check(pool)).unwrap().is_allowed()
}

fn allowed(limit: &RateLimit, pool: &PgPool) -> Spent {
    wait(limit.check(pool))
        .unwrap()
        .allowed()
        .expect("it is limited")
}

/// Moves all times into the past, as if time had passed.
fn rewind(database: &Database, seconds: u32) {
    run(
        &mut database.connect(),
        &format!(
            "UPDATE resource_control.rate_limit SET since = since - interval '{seconds} s',
                spent_at = spent_at - interval '{seconds} s', full_at = full_at - interval '{seconds} s'"
        ),
    );
}

#[test]
fn a_burst_is_allowed_and_units_refill() {
    let database = installed();
    let pool = pool(&database, 1);
    for left in (0..5).rev() {
        assert_eq!(allowed(&SLOW, &pool).state.remaining, left);
    }
    let limited = wait(SLOW.check(&pool)).unwrap().limited().unwrap();
    assert_eq!(limited.state.remaining, 0);
    assert!(
        limited.retry_after > Duration::from_secs(50)
            && limited.retry_after <= Duration::from_secs(60)
    );
    rewind(&database, 61);
    assert!(is_allowed(&SLOW, &pool));
    assert!(!is_allowed(&SLOW, &pool));
    rewind(&database, 10_000);
    assert_eq!(
        wait(SLOW.peek(&pool)).unwrap().remaining,
        5,
        "never more than the burst"
    );
}

#[test]
fn each_key_has_the_quota_for_itself() {
    let database = installed();
    let pool = pool(&database, 1);
    let limit = RateLimit::named("keys", Quota::per_minute(1));
    for key in ["", "a", "a b", "ü", "'"] {
        assert!(is_allowed(&limit.key(key), &pool), "{key}");
        assert!(!is_allowed(&limit.key(key), &pool), "{key}");
    }
    assert!(is_allowed(
        &RateLimit::named("others", Quota::per_minute(1)).key("a"),
        &pool
    ));
}

#[test]
fn a_call_may_cost_several_units() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW.cost(3), &pool));
    let limited = wait(SLOW.cost(3).check(&pool)).unwrap().limited().unwrap();
    assert_eq!(limited.state.remaining, 2);
    assert!(is_allowed(&SLOW.cost(2), &pool));
    assert_matches!(wait(SLOW.cost(6).check(&pool)), Err(Error::Input(_)));
}

#[test]
fn a_denial_writes_nothing() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW.cost(5), &pool));
    on_one(&pool, |conn| {
        wait(execute(conn, "BEGIN")).unwrap();
        assert!(wait(SLOW.check_on(conn)).unwrap().is_limited());
        wait(execute(conn, HAS_WRITTEN_NOTHING)).unwrap();
        wait(execute(conn, "ROLLBACK")).unwrap();
    });
}

#[test]
fn a_check_on_a_connection_belongs_to_its_transaction() {
    let database = installed();
    let pool = pool(&database, 2);
    on_one(&pool, |conn| {
        wait(execute(conn, "BEGIN")).unwrap();
        assert!(wait(SLOW.cost(5).check_on(conn)).unwrap().is_allowed());
        wait(execute(conn, "DO $$ BEGIN ASSERT current_setting('synchronous_commit') = 'on'; ASSERT current_setting('lock_timeout') = '0'; END $$"))
            .unwrap();
        wait(execute(conn, "ROLLBACK")).unwrap();
    });
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 4);
}

#[test]
fn a_forgotten_transaction_on_a_key_is_an_error_that_says_so() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW, &pool));
    let forgotten = &mut database.connect();
    run(
        forgotten,
        "BEGIN; UPDATE resource_control.rate_limit SET spent_at = spent_at",
    );
    assert_matches!(wait(SLOW.check(&pool)), Err(Error::KeyLocked("slow")));
    assert_matches!(
        wait(RateLimit::check_all(&[&SLOW], &pool)),
        Err(Error::KeyLocked("slow"))
    );
    run(forgotten, "ROLLBACK");
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 3);
}

#[test]
fn a_changed_quota_keeps_what_is_owed() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW.cost(4), &pool));
    let generous = SLOW.quota(Quota::per_minute(60).burst(10));
    assert_eq!(wait(generous.peek(&pool)).unwrap().remaining, 6);
    assert_eq!(allowed(&generous, &pool).state.remaining, 5);
    let strict = SLOW.quota(Quota::per_minute(1).burst(5));
    assert!(
        wait(strict.check(&pool)).unwrap().is_limited(),
        "5 are owed"
    );
    let row = "SELECT burst FROM resource_control.rate_limit";
    assert_eq!(
        number(&mut database.connect(), row),
        10,
        "a denial changes nothing"
    );
    rewind(&database, 1);
    assert!(is_allowed(
        &strict.quota(Quota::per_minute(1).burst(6)),
        &pool
    ));
}

#[test]
fn several_limits_are_spent_together_or_not_at_all() {
    let database = installed();
    let pool = pool(&database, 1);
    let (a, b) = (
        RateLimit::named("a", Quota::per_minute(3)),
        RateLimit::named("b", Quota::per_minute(2)),
    );
    for round in 0..2 {
        let CheckAll::Allowed(spent) = wait(RateLimit::check_all(&[&b, &a], &pool)).unwrap() else {
            panic!("limited in round {round}")
        };
        assert_eq!(
            spent
                .iter()
                .map(|spent| spent.state.name)
                .collect::<Vec<_>>(),
            ["b", "a"]
        );
    }
    assert_matches!(
        wait(RateLimit::check_all(&[&b, &a], &pool)),
        Ok(CheckAll::Limited(0, _))
    );
    assert_eq!(
        wait(a.peek(&pool)).unwrap().remaining,
        1,
        "nothing was spent"
    );
    // The same key twice costs two units.
    let c = RateLimit::named("c", Quota::per_minute(3));
    assert!(
        wait(RateLimit::check_all(&[&c, &c], &pool))
            .unwrap()
            .is_allowed()
    );
    assert_matches!(
        wait(RateLimit::check_all(&[&c, &c], &pool)),
        Ok(CheckAll::Limited(..))
    );
    assert_eq!(wait(c.peek(&pool)).unwrap().remaining, 1);
    assert!(wait(RateLimit::check_all(&[], &pool)).unwrap().is_allowed());
    let bad = RateLimit::named("", Quota::per_minute(1));
    assert_matches!(
        wait(RateLimit::check_all(&[&c, &bad], &pool)),
        Err(Error::Input(_))
    );
    assert_eq!(wait(c.peek(&pool)).unwrap().remaining, 1);
}

#[test]
fn callers_of_the_same_limits_in_another_order_do_not_deadlock() {
    let database = installed();
    let limits: Vec<_> = ["a", "b", "c"]
        .map(|key| RateLimit::named("all", Quota::per_second(1_000_000)).key(key))
        .into();
    let barrier = Barrier::new(4);
    thread::scope(|scope| {
        for thread in 0..4 {
            let (limits, barrier, database) = (&limits, &barrier, &database);
            scope.spawn(move || {
                let pool = pool(database, 1);
                let mut order: Vec<&RateLimit> = limits.iter().collect();
                order.rotate_left(thread % 3);
                barrier.wait();
                for _ in 0..50 {
                    assert!(
                        wait(RateLimit::check_all(&order, &pool))
                            .unwrap()
                            .is_allowed()
                    );
                }
            });
        }
    });
}

#[test]
fn units_are_given_back() {
    let database = installed();
    let pool = pool(&database, 1);
    let limit = SLOW.cost(4);
    let spent = allowed(&limit, &pool);
    assert!(wait(limit.give_back(&pool, &spent, 3)).unwrap());
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 4);
    rewind(&database, 3600);
    assert!(
        !wait(limit.give_back(&pool, &spent, 1)).unwrap(),
        "they were refilled"
    );
    let spent = allowed(&limit, &pool);
    assert!(wait(SLOW.reset(&pool)).unwrap());
    assert!(
        !wait(limit.give_back(&pool, &spent, 1)).unwrap(),
        "the key was reset"
    );
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 5);
}

#[test]
fn a_key_is_reset_and_full_keys_are_pruned() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(!wait(SLOW.reset(&pool)).unwrap());
    for key in 0..10 {
        assert!(is_allowed(&SLOW.key(key), &pool));
    }
    assert!(is_allowed(&SLOW.cost(5), &pool));
    assert_eq!(wait(RateLimit::prune(&pool)).unwrap(), 0);
    rewind(&database, 61);
    assert_eq!(wait(RateLimit::prune(&pool)).unwrap(), 10);
    assert_eq!(
        wait(SLOW.peek(&pool)).unwrap().remaining,
        1,
        "what is owed stays"
    );
    assert!(wait(SLOW.reset(&pool)).unwrap());
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 5);
}

#[test]
fn a_wait_gives_up_at_once_if_the_units_come_too_late() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(
        wait(SLOW.cost(5).acquire_timeout(&pool, Duration::from_secs(30)))
            .unwrap()
            .is_allowed()
    );
    let began = Instant::now();
    assert!(
        wait(SLOW.acquire_timeout(&pool, Duration::from_secs(30)))
            .unwrap()
            .is_limited()
    );
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "it has waited for what could not come"
    );
}

#[test]
fn a_wait_ends_when_the_units_are_there() {
    let database = installed();
    let pool = pool(&database, 2);
    let limit = RateLimit::named("fast", Quota::per_second(100).burst(1));
    let allowed = thread::scope(|scope| {
        let waits: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    wait(limit.acquire_timeout(&pool, Duration::from_secs(60)))
                        .unwrap()
                        .is_allowed()
                })
            })
            .collect();
        waits
            .into_iter()
            .map(|wait| wait.join().unwrap())
            .filter(|it| *it)
            .count()
    });
    assert_eq!(allowed, 8);
}

#[test]
fn bad_input_is_refused_before_anything_is_sent() {
    let database = Database::new(); // without the schema
    let pool = pool(&database, 1);
    for limit in [
        RateLimit::named("", Quota::per_second(1)),
        RateLimit::named("nul \0", Quota::per_second(1)),
        SLOW.key("x".repeat(1001)),
        SLOW.cost(0),
        SLOW.cost(6),
        SLOW.quota(Quota::per_second(0)),
        SLOW.quota(Quota::new(1, Duration::from_secs(367 * 86_400))),
    ] {
        assert_matches!(wait(limit.check(&pool)), Err(Error::Input(_)));
        assert_matches!(wait(limit.peek(&pool)), Err(Error::Input(_)));
        assert_matches!(
            wait(limit.acquire_timeout(&pool, Duration::MAX)),
            Err(Error::Input(_))
        );
    }
    assert_matches!(wait(SLOW.check(&pool)), Err(Error::NotInstalled));
    wait(migrations::install(&pool)).unwrap();
    let largest = Quota::new(u32::MAX, Duration::from_secs(366 * 86_400));
    assert!(is_allowed(
        &RateLimit::named("large", largest).cost(u32::MAX),
        &pool
    ));
    assert!(!is_allowed(
        &RateLimit::named("large", largest).cost(u32::MAX),
        &pool
    ));
}

/// The most that was granted in any period, by the database's clock, compared with the promise.
fn assert_kept(mut grants: Vec<i64>, quota: Quota) {
    grants.sort_unstable();
    let period = quota.period.as_micros() as i64;
    let mut first = 0;
    for (last, at) in grants.iter().enumerate() {
        while at - grants[first] > period {
            first += 1;
        }
        let granted = (last - first + 1) as u32;
        assert!(granted <= quota.burst + quota.n, "{granted} in a period");
    }
}

fn hammer(database: &Database, limit: &RateLimit, threads: usize, checks: usize) -> Vec<i64> {
    let barrier = Barrier::new(threads);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let pool = pool(database, 1);
                    barrier.wait();
                    let mut grants = Vec::new();
                    for _ in 0..checks {
                        if let Check::Allowed(spent) = wait(limit.check(&pool)).unwrap() {
                            grants.push(spent.at().timestamp_micros());
                        }
                    }
                    grants
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    })
}

#[test]
fn the_promise_holds_under_contention() {
    let database = installed();
    let quota = Quota::new(20, Duration::from_millis(100)).burst(5);
    let limit = RateLimit::named("contended", quota);
    let grants = hammer(&database, &limit, 8, 150);
    assert!(grants.len() > 20);
    assert_kept(grants, quota);
}

#[test]
fn the_promise_holds_while_keys_are_pruned() {
    let database = installed();
    let quota = Quota::new(1, Duration::from_millis(5));
    let limit = RateLimit::named("pruned", quota);
    let pruner = pool(&database, 1);
    let grants = thread::scope(|scope| {
        let pruning = scope.spawn(|| {
            (0..200)
                .map(|_| wait(RateLimit::prune(&pruner)).unwrap())
                .sum::<i64>()
        });
        let grants = hammer(&database, &limit, 4, 150);
        let _ = pruning.join().unwrap();
        grants
    });
    assert_kept(grants, quota);
}

#[test]
fn it_works_at_every_isolation_level_and_search_path() {
    for settings in [
        "default_transaction_isolation = 'repeatable read'",
        "default_transaction_isolation = serializable",
        "timezone = 'Asia/Kolkata'",
        "search_path = ''",
        "intervalstyle = iso_8601",
    ] {
        let database = installed();
        run(
            &mut database.connect(),
            &format!("ALTER DATABASE {} SET {settings}", database.name()),
        );
        let limit = RateLimit::named("any", Quota::per_day(10));
        assert_eq!(hammer(&database, &limit, 4, 10).len(), 10, "{settings}");
    }
}

#[test]
fn only_a_durable_grant_waits_for_the_disk() {
    let database = installed();
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    // A standby that does not exist must confirm each synchronous commit.
    run(
        observer.conn(),
        &format!(
            "ALTER DATABASE {} SET synchronous_commit = 'local'",
            database.name()
        ),
    );
    assert!(is_allowed(&SLOW, &pool));
    assert!(is_allowed(&SLOW.clone().durable(), &pool));
    assert!(truth(
        observer.conn(),
        "(SELECT full_at > spent_at FROM resource_control.rate_limit)"
    ));
}

#[test]
fn cancelled_statements_leave_a_row_that_works() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW, &pool));
    let holder = &mut database.connect();
    for _ in 0..5 {
        run(
            holder,
            "BEGIN; UPDATE resource_control.rate_limit SET spent_at = spent_at",
        );
        thread::scope(|scope| {
            let check = scope.spawn(|| wait(SLOW.check(&pool)));
            let mut observer = Observer::of(&database);
            eventually("the check waits", || observer.all_waiting() == 1);
            run(
                observer.conn(),
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND wait_event_type = 'Lock'",
            );
            assert!(check.join().unwrap().is_err());
        });
        run(holder, "ROLLBACK");
    }
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 3);
}

#[test]
fn a_local_limit_adds_at_most_a_chunk() {
    let database = installed();
    let pool = pool(&database, 2);
    let limit = RateLimit::named("local", Quota::per_day(1000).burst(100));
    let locals: Vec<_> = (0..3).map(|_| limit.local(pool.clone(), 10)).collect();
    let mut allowed = 0;
    for _ in 0..200 {
        for local in &locals {
            allowed += u32::from(wait(local.check("7")).unwrap().is_allowed());
        }
    }
    assert_eq!(allowed, 100, "all units of the row, and no more");
    assert!(
        wait(locals[0].check("7"))
            .unwrap()
            .retry_after_secs()
            .is_some()
    );
    assert!(wait(locals[0].check("8")).unwrap().is_allowed());
    assert_matches!(
        wait(locals[0].check(&"x".repeat(1001))),
        Err(Error::Input(_))
    );
}

#[test]
fn a_local_limit_takes_a_chunk_once_for_all_who_wait() {
    let database = installed();
    let pool = pool(&database, 2);
    let limit = RateLimit::named("local", Quota::per_day(1000).burst(1000));
    let local = limit.local(pool.clone(), 100);
    let barrier = Barrier::new(8);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..10 {
                    assert!(wait(local.check("7")).unwrap().is_allowed());
                }
            });
        }
    });
    assert_eq!(wait(limit.key("7").peek(&pool)).unwrap().remaining, 900);
}
