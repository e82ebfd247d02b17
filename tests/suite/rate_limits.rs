//! Rate limits: what they allow and deny, refunds, resets, waits and header fields.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::rate_limit::{Limited, Spent};
use workbench::{Database, RoundTrips};

use crate::assert_matches;
use crate::half::{
    Check, Error, IS_ASYNC, PgPool, Quota, RateLimit, execute, make_pool, migrations, on_one, pool,
    prune, wait,
};
use crate::support::{
    HAS_WRITTEN_NOTHING, Observer, eventually, in_a_quick_round, installed, number, once_at_least,
    run, text, truth,
};

const HOUR: Duration = Duration::from_secs(3600);

/// One unit in a minute, so that nothing refills during a test.
static SLOW: RateLimit = RateLimit::named("slow", Quota::per_minute(1).burst(5));

fn is_allowed(limit: &RateLimit, pool: &PgPool) -> bool {
    wait(limit.check(pool)).unwrap().is_allowed()
}

fn allowed(limit: &RateLimit, pool: &PgPool) -> Spent {
    wait(limit.check(pool))
        .unwrap()
        .allowed()
        .expect("the check is allowed")
}

/// Moves all stored times into the past, as if that many seconds had passed.
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
fn each_key_has_a_quota_of_its_own() {
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
    for limit in [
        &SLOW,
        &SLOW.cost(5),
        &SLOW.quota(Quota::per_minute(1).burst(4)),
        &SLOW.quota(Quota::per_hour(1).burst(5)),
    ] {
        on_one(&pool, |conn| {
            wait(execute(conn, "BEGIN")).unwrap();
            assert!(wait(limit.check_on(conn)).unwrap().is_limited());
            wait(execute(conn, HAS_WRITTEN_NOTHING)).unwrap();
            wait(execute(conn, "ROLLBACK")).unwrap();
        });
    }
    let conn = &mut database.connect();
    let row = "SELECT string_agg(concat_ws(' ', name, ctid, xmin, xmax), ',') FROM resource_control.rate_limit";
    let before = text(conn, row);
    let other = RateLimit::named("another", Quota::per_minute(1));
    assert_matches!(
        wait(RateLimit::check_all(&[&other, &SLOW], &pool)),
        Ok(Check::Limited(Limited { index: 1, .. }))
    );
    assert_eq!(
        text(conn, row),
        before,
        "a denial of several limits writes nothing, too"
    );
}

#[test]
fn a_denial_that_the_committed_row_shows_does_not_wait() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW.cost(5), &pool));
    let holder = &mut database.connect();
    run(
        holder,
        "BEGIN; SELECT FROM resource_control.rate_limit FOR UPDATE",
    );
    assert!(!is_allowed(&SLOW, &pool));
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 0);
    assert!(
        wait(RateLimit::check_all(&[&SLOW], &pool))
            .unwrap()
            .is_limited()
    );
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
    let spent = allowed(&SLOW, &pool);
    let forgotten = &mut database.connect();
    run(
        forgotten,
        "BEGIN; UPDATE resource_control.rate_limit SET spent_at = spent_at",
    );
    let first = SLOW.key("first");
    for locked in [
        wait(SLOW.check(&pool)).map(drop),
        wait(RateLimit::check_all(&[&first, &SLOW], &pool)).map(drop),
        wait(SLOW.refund(&pool, &spent, 1)).map(drop),
        wait(SLOW.reset(&pool)).map(drop),
    ] {
        assert_matches!(locked, Err(Error::KeyLocked("slow")));
    }
    // On a slow machine no try has a reply in time, so rounds are repeated.
    once_at_least("a wait returns the same error", || {
        let waited = wait(SLOW.acquire_timeout(&pool, Duration::from_secs(2)));
        assert_matches!(waited, Err(Error::KeyLocked("slow") | Error::TimedOut));
        matches!(waited, Err(Error::KeyLocked(_)))
    });
    assert_eq!(wait(first.peek(&pool)).unwrap().remaining, 5);
    assert!(is_allowed(&SLOW.key("another"), &pool));
    run(forgotten, "ROLLBACK");
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 3);
}

#[test]
fn a_forgotten_first_call_is_an_error_that_says_so() {
    let database = installed();
    let (pool, other) = (pool(&database, 1), pool(&database, 1));
    on_one(&other, |forgotten| {
        wait(execute(forgotten, "BEGIN")).unwrap();
        assert!(wait(SLOW.check_on(forgotten)).unwrap().is_allowed());
        assert_matches!(wait(SLOW.check(&pool)), Err(Error::KeyLocked("slow")));
        wait(execute(forgotten, "COMMIT")).unwrap();
    });
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 3);
}

/// Runs a call while another session locks the row of the key. The session frees the row each time
/// after the call has waited in vain, and locks it again as soon as the call has found it free.
fn while_the_row_is_locked_in_turns<T>(database: &Database, call: impl Fn(&PgPool) -> T) -> T {
    const HOLD: &str = "BEGIN; UPDATE resource_control.rate_limit SET spent_at = spent_at";
    const HAS_LOOKED: &str = "EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() \
                              AND pid <> pg_backend_pid() AND query LIKE '%SKIP LOCKED%')";
    let proxy = RoundTrips::in_front_of(database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    let (holder, mut observer) = (&mut database.connect(), Observer::of(database));
    // Prepares the statements, so that below `pg_stat_activity` shows each only when it is
    // executed.
    run(holder, HOLD);
    let _ = call(&pool);
    run(holder, "COMMIT");
    // The delay leaves time to observe the server between two statements of the call.
    proxy.set_delay(Duration::from_millis(100), Duration::ZERO);
    let (start, is_over) = (Barrier::new(2), AtomicBool::new(false));
    thread::scope(|scope| {
        let (start, is_over) = (&start, &is_over);
        scope.spawn(move || {
            let mut until = |is_so: &dyn Fn(&mut Observer) -> bool| {
                eventually("the call goes on", || {
                    is_over.load(Ordering::SeqCst) || is_so(&mut observer)
                });
            };
            for round in 0.. {
                run(holder, HOLD);
                if round == 0 {
                    start.wait();
                }
                until(&|observer| observer.all_waiting() == 1);
                until(&|observer| observer.all_waiting() == 0);
                run(holder, "COMMIT");
                until(&|observer| truth(observer.conn(), HAS_LOOKED));
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        start.wait();
        let called = call(&pool);
        is_over.store(true, Ordering::SeqCst);
        called
    })
}

#[test]
fn a_key_that_is_free_after_each_wait_is_no_error_of_the_database() {
    let database = installed();
    let own = pool(&database, 1);
    let succeeds = |name: &str, outcome: Result<bool, Error>| match outcome {
        Ok(is_success) => is_success,
        Err(Error::KeyLocked("slow")) => false,
        Err(error) => panic!("{name}: {error}"),
    };
    once_at_least("each call succeeds as soon as the key is free", || {
        wait(SLOW.reset(&own)).unwrap();
        // Two units, because `refund` is called twice, and a refund that fails counts as made.
        let spent = allowed(&SLOW.cost(2), &own);
        let checked = while_the_row_is_locked_in_turns(&database, |pool| wait(SLOW.check(pool)));
        let several = while_the_row_is_locked_in_turns(&database, |pool| {
            wait(RateLimit::check_all(&[&SLOW], pool))
        });
        let refunded =
            while_the_row_is_locked_in_turns(&database, |pool| wait(SLOW.refund(pool, &spent, 1)));
        let reset = while_the_row_is_locked_in_turns(&database, |pool| wait(SLOW.reset(pool)));
        [
            succeeds("check", checked.map(|check| check.is_allowed())),
            succeeds("check_all", several.map(|check| check.is_allowed())),
            succeeds("refund", refunded),
            succeeds("reset", reset),
        ]
        .iter()
        .all(|is_success| *is_success)
    });
}

#[test]
fn another_failure_is_not_taken_for_a_locked_key() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW, &pool));
    let conn = &mut database.connect();
    run(
        conn,
        "ALTER TABLE resource_control.rate_limit ADD CHECK (burst <> 5) NOT VALID",
    );
    assert_matches!(wait(SLOW.check(&pool)), Err(Error::Database(_)));
    run(
        conn,
        "ALTER TABLE resource_control.rate_limit RENAME burst TO other",
    );
    assert_matches!(wait(SLOW.check(&pool)), Err(Error::Database(_)));
}

#[test]
fn a_wait_outlasts_a_transaction_that_holds_the_key() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW, &pool));
    let holder = &mut database.connect();
    run(
        holder,
        "BEGIN; UPDATE resource_control.rate_limit SET spent_at = spent_at",
    );
    thread::scope(|scope| {
        let check = scope.spawn(|| wait(SLOW.acquire_timeout(&pool, HOUR)));
        let mut observer = Observer::of(&database);
        for _ in 0..3 {
            eventually("the check waits for the row", || {
                observer.all_waiting() == 1
            });
            eventually("the check pauses", || observer.all_waiting() == 0);
        }
        run(holder, "COMMIT");
        assert!(check.join().unwrap().unwrap().is_allowed());
    });
}

#[test]
fn a_changed_quota_keeps_what_is_owed() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW.cost(4), &pool));
    let generous = SLOW.quota(Quota::per_minute(2).burst(10));
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
fn an_empty_key_is_the_same_as_no_key() {
    let database = installed();
    let pool = pool(&database, 1);
    assert!(is_allowed(&SLOW.key(""), &pool));
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 4);
    assert_eq!(wait(SLOW.key(7).key("").peek(&pool)).unwrap().remaining, 4);
}

#[test]
fn several_limits_are_spent_together_or_not_at_all() {
    let database = installed();
    let pool = pool(&database, 1);
    let (a, b) = (
        RateLimit::named("a", Quota::per_hour(3)),
        RateLimit::named("b", Quota::per_hour(2)),
    );
    for round in 0..2 {
        let Check::Allowed(spent) = wait(RateLimit::check_all(&[&b, &a], &pool)).unwrap() else {
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
        Ok(Check::Limited(Limited { index: 0, .. }))
    );
    assert_eq!(
        wait(a.peek(&pool)).unwrap().remaining,
        1,
        "nothing was spent"
    );
    // The same key twice costs two units.
    let c = RateLimit::named("c", Quota::per_hour(3));
    assert!(
        wait(RateLimit::check_all(&[&c, &c], &pool))
            .unwrap()
            .is_allowed()
    );
    assert_matches!(
        wait(RateLimit::check_all(&[&c, &c], &pool)),
        Ok(Check::Limited(_))
    );
    assert_eq!(wait(c.peek(&pool)).unwrap().remaining, 1);
    let Check::Limited(limited @ Limited { index: 0, .. }) =
        wait(RateLimit::check_all(&[&c, &a, &c], &pool)).unwrap()
    else {
        panic!("only one unit of two is there")
    };
    assert!(
        limited.retry_after > Duration::from_secs(15 * 60),
        "until both are there"
    );
    for refused in [
        &[&c.cost(2), &c.cost(2)],
        &[&c, &c.quota(Quota::per_hour(4))],
    ] {
        assert_matches!(
            wait(RateLimit::check_all(refused, &pool)),
            Err(Error::Input(_))
        );
    }
    assert_matches!(
        wait(RateLimit::check_all(&[&c; 1001], &pool)),
        Err(Error::Input(_))
    );
    assert!(wait(RateLimit::check_all(&[], &pool)).unwrap().is_allowed());
    let bad = RateLimit::named("", Quota::per_minute(1));
    assert_matches!(
        wait(RateLimit::check_all(&[&c, &bad], &pool)),
        Err(Error::Input(_))
    );
    assert_eq!(wait(c.peek(&pool)).unwrap().remaining, 1);
}

/// A trigger notes with which `synchronous_commit` each transaction commits.
#[test]
fn several_limits_commit_durably_if_one_of_them_is_durable() {
    let database = installed();
    let (pool, conn) = (pool(&database, 1), &mut database.connect());
    run(
        conn,
        "CREATE TABLE noted (setting text);
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.noted VALUES (current_setting('synchronous_commit'));
            RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER note AFTER UPDATE ON resource_control.rate_limit
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION note()",
    );
    let (a, b) = (&SLOW.key("a"), &SLOW.key("b"));
    let (durable_a, durable_b) = (&a.clone().durable(), &b.clone().durable());
    for (limits, expected) in [
        (&[a, b][..], "off"),
        (&[durable_a, b], "on"),
        (&[a, durable_b], "on"),
        (&[a, durable_a], "on"),
        (&[durable_a, a], "on"),
    ] {
        run(conn, "DELETE FROM resource_control.rate_limit");
        let check = wait(RateLimit::check_all(limits, &pool)).unwrap();
        assert!(check.is_allowed());
        let noted = "(SELECT string_agg(DISTINCT setting, ' ') FROM noted)";
        assert_eq!(text(conn, noted), expected, "{limits:?}");
        run(conn, "DELETE FROM noted");
    }
}

#[test]
fn callers_of_the_same_limits_in_another_order_do_not_deadlock() {
    let database = installed();
    let mut observer = Observer::of(&database);
    // Deadlocks must be found before a check gives up.
    let alter = format!(
        "ALTER DATABASE {} SET deadlock_timeout = '10ms'",
        database.name()
    );
    run(observer.conn(), &alter);
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
                    match wait(RateLimit::check_all(&order, &pool)) {
                        Ok(check) => assert!(check.is_allowed()),
                        // On a slow machine, the row is locked by others for too long.
                        Err(error) => assert_matches!(error, Error::KeyLocked(_)),
                    }
                }
            });
        }
    });
    // A session counts its deadlocks at its end at the latest.
    eventually("the sessions have ended", || observer.sessions() == 0);
    let deadlocks = "(SELECT deadlocks FROM pg_stat_database WHERE datname = current_database())";
    assert_eq!(number(observer.conn(), deadlocks), 0);
}

#[test]
fn units_are_given_back_once() {
    let database = installed();
    let pool = pool(&database, 1);
    let limit = SLOW.cost(4);
    let spent = allowed(&limit, &pool);
    assert_eq!(spent.units, 4);
    assert!(wait(limit.refund(&pool, &spent, 3)).unwrap());
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 4);
    assert!(wait(limit.refund(&pool, &spent, 3)).unwrap(), "one is left");
    assert!(!wait(limit.refund(&pool, &spent, 3)).unwrap());
    assert!(is_allowed(&SLOW.cost(4), &pool));
    assert!(
        !is_allowed(&SLOW.cost(2), &pool),
        "what was given back cannot be given back again"
    );
}

/// The units that have refilled since the check are deducted once, and not from each part.
#[test]
fn a_refund_in_parts_equals_a_refund_at_once() {
    let database = installed();
    let pool = pool(&database, 1);
    let admin = &mut database.connect();
    // A unit refills in 200 milliseconds.
    let limit = RateLimit::named("parts", Quota::per_second(5).burst(100));
    let keys = [(limit.key("whole"), 8), (limit.key("parts"), 1)];
    let began = Instant::now();
    let spent = keys.each_ref().map(|(limit, _)| {
        let _ = allowed(&limit.cost(50), &pool);
        allowed(&limit.cost(8), &pool)
    });
    let checks_took = began.elapsed();
    let refilled =
        "(SELECT min(spent_at) + '500 ms' <= clock_timestamp() FROM resource_control.rate_limit)";
    eventually("two and a half were refilled", || truth(admin, refilled));
    let began = Instant::now();
    for ((limit, part), spent) in keys.iter().zip(&spent) {
        for _ in 0..8 / part {
            let _ = wait(limit.refund(&pool, spent, *part)).unwrap();
        }
    }
    let difference = "(SELECT date_part('epoch', max(full_at) - min(full_at)) * 1000 FROM resource_control.rate_limit)";
    // The two keys differ by what has refilled between their checks. An error would be more than a
    // second.
    let between = checks_took + began.elapsed() + Duration::from_millis(10);
    assert!(number(admin, difference) <= between.as_millis() as i64);
}

/// The units that have refilled since the check are deducted from all parts together, and not from
/// each part.
#[test]
fn a_refund_of_nothing_does_not_change_the_next_one() {
    let database = installed();
    let pool = pool(&database, 1);
    let admin = &mut database.connect();
    let limit = RateLimit::named("nothing", Quota::per_minute(1).burst(20)).cost(20);
    let spent = allowed(&limit, &pool);
    let full_at = text(admin, "(SELECT full_at FROM resource_control.rate_limit)");
    for _ in 0..20 {
        assert!(!wait(limit.refund(&pool, &spent, 0)).unwrap());
        assert!(wait(limit.refund(&pool, &spent, 1)).unwrap());
    }
    let deducted = format!("full_at - (timestamptz '{full_at}' - interval '20 min')");
    let refilled = "clock_timestamp() - spent_at + interval '1 ms'";
    assert!(truth(
        admin,
        &format!("(SELECT {deducted} <= {refilled} FROM resource_control.rate_limit)")
    ));
}

/// A million units are owed, which take a year each to refill under the new quota.
#[test]
fn units_that_refill_beyond_the_last_timestamp_are_no_error() {
    let database = installed();
    let pool = pool(&database, 1);
    let fast = RateLimit::named("plan", Quota::per_second(1_000_000)).cost(1_000_000);
    let slow = RateLimit::named("plan", Quota::once_per(Duration::from_secs(366 * 86_400)));
    let spent = allowed(&fast, &pool);
    // Instead of a second, the million units take a day to refill, so that they are still owed
    // below.
    run(
        &mut database.connect(),
        "UPDATE resource_control.rate_limit SET full_at = clock_timestamp() + interval '1 day', \
         unit_us = 86400",
    );
    let limited = wait(slow.check(&pool)).unwrap().limited().unwrap();
    assert!(limited.retry_after > Duration::from_secs(99_000 * 31_557_600));
    assert_eq!(wait(slow.peek(&pool)).unwrap().remaining, 0);
    let both = wait(RateLimit::check_all(&[&slow, &SLOW], &pool)).unwrap();
    assert!(both.is_limited());
    assert!(
        wait(slow.acquire_timeout(&pool, HOUR))
            .unwrap()
            .is_limited()
    );
    rewind(&database, 2 * 86_400);
    assert!(is_allowed(&slow, &pool));
    assert!(!wait(slow.refund(&pool, &spent, 1_000_000)).unwrap());
    assert!(wait(slow.reset(&pool)).unwrap());
}

#[test]
fn refunds_under_another_quota_give_back_nothing_and_do_not_panic() {
    let database = installed();
    let pool = pool(&database, 1);
    let limit = RateLimit::named("foreign", Quota::per_day(1_000_000));
    let spent = allowed(&limit.cost(600_000), &pool);
    assert!(wait(limit.reset(&pool)).unwrap());
    // 175,000 years in microseconds are more than half of the largest bigint.
    let other = limit.quota(Quota::once_per(Duration::from_secs(366 * 86_400)));
    for _ in 0..3 {
        assert!(!wait(other.refund(&pool, &spent, 175_000)).unwrap());
    }
}

#[test]
fn refilled_units_and_units_that_are_no_longer_owed_are_not_given_back() {
    let database = installed();
    let pool = pool(&database, 1);
    let limit = SLOW.cost(4);
    let spent = allowed(&limit, &pool);
    assert!(wait(SLOW.reset(&pool)).unwrap());
    assert!(is_allowed(&limit, &pool));
    assert!(
        !wait(limit.refund(&pool, &spent, 1)).unwrap(),
        "the key was reset"
    );
    assert!(wait(SLOW.reset(&pool)).unwrap());

    let spent = allowed(&limit, &pool);
    assert!(is_allowed(&SLOW.quota(Quota::per_hour(1).burst(5)), &pool));
    assert!(
        !wait(limit.refund(&pool, &spent, 1)).unwrap(),
        "the quota was changed"
    );
    assert!(wait(SLOW.reset(&pool)).unwrap());

    // As after a crash of the server that has lost the grant.
    let spent = allowed(&limit, &pool);
    run(
        &mut database.connect(),
        "UPDATE resource_control.rate_limit SET spent_at = since - interval '1 s'",
    );
    assert!(!wait(limit.refund(&pool, &spent, 1)).unwrap());
    assert!(wait(SLOW.reset(&pool)).unwrap());

    // A unit refills in a millisecond.
    let fast = RateLimit::named("fast", Quota::per_second(1000)).cost(2);
    let spent = allowed(&fast, &pool);
    let refilled = "(SELECT full_at <= clock_timestamp() FROM resource_control.rate_limit WHERE name = 'fast')";
    eventually("both units have refilled", || {
        truth(&mut database.connect(), refilled)
    });
    assert!(
        !wait(fast.refund(&pool, &spent, 2)).unwrap(),
        "they were refilled"
    );
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
    assert_eq!(wait(prune::rate_limits(&pool)).unwrap(), 0);
    rewind(&database, 61);
    assert_eq!(wait(prune::rate_limits(&pool)).unwrap(), 10);
    assert_eq!(
        wait(SLOW.peek(&pool)).unwrap().remaining,
        1,
        "what is owed stays"
    );
    assert!(wait(SLOW.reset(&pool)).unwrap());
    assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 5);
    assert!(is_allowed(&SLOW, &pool));
    rewind(&database, 61);
    assert!(!wait(SLOW.reset(&pool)).unwrap(), "the key was full");
}

#[test]
fn a_wait_gives_up_at_once_if_the_units_come_too_late() {
    let database = installed();
    let pool = pool(&database, 1);
    // A unit refills in an hour.
    let slow = RateLimit::named("slow", Quota::per_hour(1));
    assert!(
        wait(slow.acquire_timeout(&pool, HOUR / 2))
            .unwrap()
            .is_allowed()
    );
    // A waiter for other units does not keep a call from giving up at once.
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            barrier.wait();
            wait(slow.acquire_timeout(&pool, 2 * HOUR))
        });
        barrier.wait();
        for _ in 0..100 {
            assert!(
                wait(slow.acquire_timeout(&pool, HOUR / 2))
                    .unwrap()
                    .is_limited()
            );
        }
        assert!(!waiter.is_finished());
        // A reset in this process wakes the waiter.
        assert!(wait(slow.reset(&pool)).unwrap());
        assert!(waiter.join().unwrap().unwrap().is_allowed());
    });
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
                    wait(limit.acquire_timeout(&pool, HOUR))
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
        let is_cancelled = AtomicBool::new(false);
        thread::scope(|scope| {
            // A check gives up after 250 ms, so there are many to cancel.
            scope.spawn(|| {
                while !is_cancelled.load(Ordering::SeqCst) {
                    assert!(wait(SLOW.check(&pool)).is_err());
                }
            });
            let mut observer = Observer::of(&database);
            let cancel = "(SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event_type = 'Lock')";
            eventually("a wait is cancelled", || {
                number(observer.conn(), cancel) > 0
            });
            is_cancelled.store(true, Ordering::SeqCst);
        });
        run(holder, "ROLLBACK");
    }
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 3);
}

#[test]
fn header_fields_contain_the_quota_and_the_remaining_units() {
    let database = installed();
    let pool = pool(&database, 1);
    let fields = |check: &Check| {
        check
            .headers()
            .into_iter()
            .map(|(name, value)| format!("{name}: {value}"))
            .collect::<Vec<_>>()
    };
    let api = RateLimit::named("api", Quota::per_hour(100).burst(20));
    let slow = RateLimit::named("a \"b\" é", Quota::per_hour(1).burst(3)).cost(2);
    // A time in the past is not in the header.
    let mut round = 0;
    let checks = in_a_quick_round(Duration::from_millis(500), || {
        round += 1;
        let (api, slow) = (api.key(round), slow.key(round));
        [&api.cost(5), &slow, &slow].map(|limit| fields(&wait(limit.check(&pool)).unwrap()))
    });
    let expected = [
        r#"ratelimit-policy: "api";q=20;w=720"#,
        r#"ratelimit: "api";r=15;t=180"#,
    ];
    assert_eq!(checks[0], expected);
    let expected = [
        r#"ratelimit-policy: "a \"b\" %C3%A9";q=3;w=10800"#,
        r#"ratelimit: "a \"b\" %C3%A9";r=0;t=3600"#,
        "retry-after: 3600",
    ];
    assert_eq!(checks[2], expected);
    let slow = slow.key(round);
    let all = wait(RateLimit::check_all(&[&slow], &pool)).unwrap();
    assert_matches!(all, Check::Limited(limited @ Limited { index: 0, .. }) if limited.headers().len() == 3);
}

#[test]
fn a_check_takes_one_round_trip_and_the_first_of_a_key_three() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 1, Duration::from_secs(20));
    for key in 0..3 {
        let prepared = SLOW.key(format!("prepared {key}"));
        assert!(is_allowed(&prepared, &pool) && is_allowed(&prepared, &pool));
        let waited = wait(prepared.acquire_timeout(&pool, Duration::from_secs(30)));
        assert!(waited.unwrap().is_allowed());
        let _ = wait(prepared.peek(&pool)).unwrap();
    }
    // A peek is one round trip, beside the check of the pool.
    let one = proxy.count(|| assert_eq!(wait(SLOW.peek(&pool)).unwrap().remaining, 5));
    assert_eq!(
        proxy.count(|| assert!(is_allowed(&SLOW, &pool))),
        one + 2,
        "the first check of a key"
    );
    assert_eq!(
        proxy.count(|| assert!(is_allowed(&SLOW.cost(4), &pool))),
        one
    );
    assert_eq!(
        proxy.count(|| assert!(!is_allowed(&SLOW, &pool))),
        one,
        "a denial"
    );
    assert_eq!(
        proxy.count(|| drop(wait(SLOW.acquire_timeout(&pool, Duration::from_secs(30))))),
        one,
        "a wait in vain"
    );
    assert_eq!(
        proxy.count(|| assert!(wait(SLOW.cost(6).check(&pool)).is_err())),
        0
    );
}

#[test]
fn the_longest_names_and_keys_of_any_characters_are_stored() {
    static LONGEST: [u8; 1000] = [b'x'; 1000];
    let database = installed();
    let pool = pool(&database, 1);
    let name = std::str::from_utf8(&LONGEST).unwrap();
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from_u32((state >> 40) as u32 % 0x11_0000).filter(|c| *c != '\0')
    };
    // Random characters, because PostgreSQL compresses others, and index entries have a limit.
    let key: String = std::iter::repeat_with(&mut random)
        .flatten()
        .take(250)
        .collect();
    let limit = RateLimit::named(name, Quota::per_day(1)).key(key);
    assert!(is_allowed(&limit, &pool));
    assert!(!is_allowed(&limit, &pool));
    assert!(wait(limit.reset(&pool)).unwrap());
}

#[test]
fn a_transaction_that_was_left_in_the_pool_is_reported_and_rolled_back() {
    if IS_ASYNC {
        return; // nobody can see it there
    }
    let database = installed();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| wait(execute(conn, "BEGIN")).unwrap());
    assert_matches!(wait(SLOW.check(&pool)), Err(Error::DirtyConnection));
    let mut observer = Observer::of(&database);
    eventually("the session has ended", || observer.in_transaction() == 0);
    assert_eq!(allowed(&SLOW, &pool).state.remaining, 4);
}
