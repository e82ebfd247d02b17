//! Quotas that operators set.

use std::time::Duration;

use crate::half::error::Input;
use crate::half::prelude::*;
use crate::half::{CheckAll, Error, LimitedReason, Quota, RateLimit, cancel_on};
use diesel::connection::SimpleConnection;

use crate::support::{number, truth};

use super::{API, HOUR, SLOW, age, allowed, assert_about, database, limited, reserved};

pub(crate) fn set(conn: &mut PgConnection, name: &str, key: Option<&str>, quota: &str) {
    let key = key.map_or("NULL".to_owned(), |key| format!("'{key}'"));
    conn.batch_execute(&format!(
        "INSERT INTO resource_control.rate_limit_override AS o (name, key, n, period, burst) \
         VALUES ('{name}', {key}, {quota}) \
         ON CONFLICT (name, scope) DO UPDATE SET n = EXCLUDED.n, period = EXCLUDED.period, burst = EXCLUDED.burst"
    ))
    .unwrap();
}

#[test]
fn the_row_of_the_key_counts_else_that_of_the_name_else_the_program() {
    let database = database();
    let conn = &mut database.connect();
    let quota_of = |conn: &mut PgConnection, limit: &RateLimit| {
        let peeked = limit.peek_on(conn).unwrap().quota;
        assert_eq!(allowed(limit.check_on(conn).unwrap()).quota, peeked);
        peeked
    };
    assert_eq!(quota_of(conn, &API.key(7)), SLOW);
    set(conn, "api", None, "10, '1 day', 3");
    let of_the_name = Quota::per_day(10).burst(3);
    assert_eq!(quota_of(conn, &API.key(8)), of_the_name);
    assert_eq!(quota_of(conn, &API), of_the_name);
    set(conn, "api", Some("7"), "20, '2 hours', 9");
    assert_eq!(
        quota_of(conn, &API.key(7)),
        Quota::per(20, 2 * HOUR).burst(9)
    );
    assert_eq!(quota_of(conn, &API.key(8)), of_the_name);
    set(conn, "api", Some("7"), "30, '2 hours', 9");
    assert_eq!(quota_of(conn, &API.key(7)).n, 30);
    set(conn, "api", Some(""), "40, '1 month', 40");
    assert_eq!(quota_of(conn, &API), Quota::per(40, 30 * 24 * HOUR));
    assert_eq!(quota_of(conn, &RateLimit::named("api 2", SLOW)), SLOW);
}

#[test]
fn the_largest_quota_has_no_debt_that_it_cannot_count() {
    let database = database();
    let conn = &mut database.connect();
    let hourly = RateLimit::named("hourly", Quota::per(1, HOUR));
    for _ in 0..2 {
        let _ = reserved(hourly.reserve_on(conn, 2 * HOUR).unwrap());
    }
    // The reserved moment is kept, and an hour is worth more units than a bigint can count.
    set(
        conn,
        "hourly",
        None,
        "4294967295, '1 microsecond', 4294967295",
    );
    assert_eq!(hourly.peek_on(conn).unwrap().remaining, 0);
    let _ = limited(hourly.check_on(conn).unwrap());
    let both = RateLimit::check_all_on(conn, &[&hourly, &API]).unwrap();
    assert!(matches!(both, CheckAll::Limited { by: 0, .. }));
    let by_hand = "SELECT resource_control.check_rate_limit('hourly', '', 1, '1 hour', 1)";
    conn.batch_execute(by_hand).unwrap();
}

#[test]
fn an_override_that_equals_the_quota_of_the_program_counts_as_one() {
    let database = database();
    let conn = &mut database.connect();
    let hourly = RateLimit::named("hourly", Quota::per(5, HOUR));
    // Of two limits the one that is refused is named: the override allows the other one.
    set(conn, "api", None, "24, '1 day', 100");
    match RateLimit::check_all_on(conn, &[&API.cost(50), &hourly.cost(6)]) {
        Err(Error::Input(Input::CostAboveBurst { name, cost: 6, .. })) => {
            assert_eq!(name, "hourly")
        }
        other => panic!("{other:?}"),
    }
    set(conn, "hourly", None, "5, '1 hour', 5");
    let denied = limited(hourly.cost(6).check_on(conn).unwrap());
    assert_eq!(denied.reason, LimitedReason::AboveBurst);
    let both = RateLimit::check_all_on(conn, &[&hourly.cost(6), &API]).unwrap();
    assert!(matches!(both, CheckAll::Limited { by: 0, .. }));
}

#[test]
fn a_raised_quota_takes_effect_at_once_because_units_are_owed_and_not_time() {
    let database = database();
    let conn = &mut database.connect();
    let daily = RateLimit::named("daily", Quota::per_day(20));
    let _ = allowed(daily.cost(20).check_on(conn).unwrap());
    assert!(limited(daily.check_on(conn).unwrap()).retry_after.unwrap() > HOUR);
    set(conn, "daily", None, "100, '1 minute', 20");
    let denied = limited(daily.check_on(conn).unwrap());
    assert!(denied.retry_after.unwrap() <= Duration::from_millis(600));
    std::thread::sleep(denied.retry_after.unwrap());
    assert_eq!(allowed(daily.check_on(conn).unwrap()).remaining, 0);
    // And back: what is owed is still twenty units.
    conn.batch_execute("DELETE FROM resource_control.rate_limit_override")
        .unwrap();
    let denied = limited(daily.check_on(conn).unwrap());
    assert!(denied.full_in > 23 * HOUR && denied.full_in <= 24 * HOUR);
}

#[test]
fn no_quota_moves_a_reserved_moment() {
    let database = database();
    let conn = &mut database.connect();
    let slow = RateLimit::named("queue", Quota::per(1, 2 * HOUR).burst(2));
    let fast = RateLimit::named("queue", Quota::per(1, HOUR / 10).burst(2));
    let after = |limit: &RateLimit, conn: &mut PgConnection| {
        limited(limit.check_on(conn).unwrap()).retry_after.unwrap()
    };
    let _ = allowed(slow.cost(2).check_on(conn).unwrap());
    let reservation = reserved(slow.reserve_on(conn, 9 * HOUR).unwrap());
    assert_about(reservation.wait, 2 * HOUR);

    // At that moment two units are owed, one of which is the reserved one.
    for _ in 0..2 {
        assert_about(after(&fast, conn), 2 * HOUR + HOUR / 10);
        assert_about(after(&slow, conn), 4 * HOUR);
    }
    assert_about(after(&fast, conn), 2 * HOUR + HOUR / 10);
    age(conn, "2 hours");
    assert_about(after(&fast, conn), HOUR / 10);
    age(conn, "6 minutes");
    let _ = allowed(fast.check_on(conn).unwrap());
    let _ = limited(fast.check_on(conn).unwrap());

    // A reservation that was cancelled leaves its moment, and the units that were used before are not forgotten.
    assert!(slow.reset_on(conn).unwrap());
    let _ = allowed(fast.cost(2).check_on(conn).unwrap());
    let reservation = reserved(fast.cost(2).reserve_on(conn, HOUR).unwrap());
    assert_eq!(cancel_on(conn, reservation).unwrap(), 2);
    let _ = limited(slow.check_on(conn).unwrap());
}

#[test]
fn a_call_that_a_reserved_moment_limits_changes_nothing() {
    let database = database();
    let conn = &mut database.connect();
    let old = RateLimit::named("queue", Quota::per_hour(100).burst(50));
    let few = RateLimit::named("queue", Quota::per_day(1).burst(1));
    let many = RateLimit::named("queue", Quota::per_day(1).burst(100));
    let _ = allowed(old.cost(50).check_on(conn).unwrap());
    let reservation = reserved(old.cost(50).reserve_on(conn, HOUR).unwrap());
    assert_about(reservation.wait, HOUR / 2);
    assert_eq!(cancel_on(conn, reservation).unwrap(), 50);

    // The fifty that were used before are still owed, whatever bursts others have.
    let _ = limited(few.check_on(conn).unwrap());
    let _ = limited(many.cost(51).check_on(conn).unwrap());
    let _ = limited(old.check_on(conn).unwrap());
    let several = RateLimit::check_all_on(conn, &[&few]).unwrap();
    assert!(matches!(several, CheckAll::Limited { .. }), "{several:?}");
    // All came back by then, and no burst is owed because of the calls that were limited.
    age(conn, "31 minutes");
    let _ = allowed(many.cost(100).check_on(conn).unwrap());
}

#[test]
fn a_clock_that_is_set_back_moves_reserved_moments_with_it() {
    let database = database();
    let conn = &mut database.connect();
    let slow = RateLimit::named("queue", Quota::per_hour(1).burst(2));
    let fast = RateLimit::named("queue", Quota::per_minute(1).burst(2));
    let _ = allowed(slow.cost(2).check_on(conn).unwrap());
    let reservation = reserved(slow.reserve_on(conn, 9 * HOUR).unwrap());
    assert_about(reservation.wait, HOUR);
    // The row is as far ahead as if the clock had been set back.
    age(conn, "-5 hours");
    for (limit, wait) in [(&slow, 2 * HOUR), (&fast, HOUR + HOUR / 60)] {
        let denied = limited(limit.check_on(conn).unwrap());
        assert_about(denied.retry_after.unwrap(), wait);
    }
}

#[test]
fn a_cost_above_the_burst_is_an_error_of_the_program_and_a_limited_call_under_an_override() {
    let database = database();
    let conn = &mut database.connect();
    match API.cost(6).check_on(conn) {
        Err(Error::Input(Input::CostAboveBurst {
            cost: 6, burst: 5, ..
        })) => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        RateLimit::check_all_on(conn, &[&API.key(1), &API.cost(3), &API.cost(3)]),
        Err(Error::Input(Input::CostAboveBurst {
            cost: 6,
            burst: 5,
            ..
        }))
    ));
    set(conn, "api", Some("7"), "1, '1 hour', 2");
    let denied = limited(API.key(7).cost(3).check_on(conn).unwrap());
    assert_eq!(denied.reason, LimitedReason::AboveBurst);
    assert_eq!((denied.retry_after, denied.remaining), (None, 2));
    assert_eq!(denied.quota.burst, 2);
    assert_eq!(denied.headers().retry_after, None);
    match RateLimit::check_all_on(conn, &[&API.key(8), &API.key(7).cost(3)]).unwrap() {
        CheckAll::Limited { by: 1, limited } => {
            assert_eq!(limited.reason, LimitedReason::AboveBurst);
            assert_eq!(limited.retry_after, None);
        }
        other => panic!("{other:?}"),
    }
    // The override may allow what the program's own quota does not.
    set(conn, "api", Some("7"), "1, '1 hour', 20");
    assert_eq!(
        allowed(API.key(7).cost(20).check_on(conn).unwrap()).remaining,
        0
    );
    assert_about(API.key(7).peek_on(conn).unwrap().full_in, 20 * HOUR);
}

#[test]
fn bad_overrides_are_refused_by_the_table() {
    let database = database();
    let conn = &mut database.connect();
    for (name, quota) in [
        ("", "1, '1 s', 1"),
        ("api", "0, '1 s', 1"),
        ("api", "4294967296, '1 s', 1"),
        ("api", "1, '0', 1"),
        ("api", "1, '-1 s', 1"),
        ("api", "1, '367 days', 1"),
        ("api", "1, '1 s', 0"),
        ("api", "1, '1 s', 4294967296"),
        ("api", "1, '366 days', 101"),
    ] {
        let insert = format!(
            "INSERT INTO resource_control.rate_limit_override (name, n, period, burst) VALUES ('{name}', {quota})"
        );
        assert!(conn.batch_execute(&insert).is_err(), "{name:?} {quota}");
    }
    set(conn, "api", None, "1, '366 days', 100");
    set(conn, "api", None, "4294967295, '1 us', 4294967295");
    let _ = allowed(API.cost(5).check_on(conn).unwrap());
}

/// Under the quota that blocks, the debt is longer than an interval that is exact.
#[test]
fn a_quota_that_blocks_a_key_forgives_none_of_its_debt() {
    let database = database();
    let conn = &mut database.connect();
    let daily = RateLimit::named("daily", Quota::per_day(1000));
    let _ = allowed(daily.cost(1000).check_on(conn).unwrap());
    for clock in ["0", "1 hour"] {
        age(conn, &format!("-{clock}")); // the clock is set back
        set(conn, "daily", None, "1, '366 days', 1");
        for _ in 0..2 {
            limited(daily.check_on(conn).unwrap());
            let all = RateLimit::check_all_on(conn, &[&daily]).unwrap();
            assert!(matches!(all, CheckAll::Limited { .. }));
        }
        conn.batch_execute("DELETE FROM resource_control.rate_limit_override")
            .unwrap();
        limited(daily.cost(10).check_on(conn).unwrap());
        assert!(daily.peek_on(conn).unwrap().full_in > 23 * HOUR);
    }
}

#[test]
fn under_a_smaller_burst_a_key_owes_as_much_at_a_reserved_moment_as_before() {
    let database = database();
    let conn = &mut database.connect();
    let large = RateLimit::named("deployed", Quota::per_hour(1).burst(10));
    let small = RateLimit::named("deployed", Quota::per(2, 2 * HOUR));
    let _ = allowed(large.cost(10).check_on(conn).unwrap());
    let _ = reserved(large.reserve_on(conn, HOUR).unwrap());
    assert_about(small.peek_on(conn).unwrap().full_in, 11 * HOUR);
}

/// Otherwise a key that only calls of several limits use would be refilled at the speed of the old quota.
#[test]
fn a_limited_call_of_several_limits_rewrites_the_key() {
    let database = database();
    let conn = &mut database.connect();
    let fast = RateLimit::named("deployed", Quota::per_minute(1).burst(5));
    let slow = RateLimit::named("deployed", Quota::per_hour(1).burst(5));
    let mut is_limited = |limit: &RateLimit| {
        let all = RateLimit::check_all_on(conn, &[limit]).unwrap();
        matches!(all, CheckAll::Limited { .. })
    };
    assert!(!is_limited(&fast.cost(5)));
    assert!(is_limited(&slow));
    age(&mut database.connect(), "30 minutes");
    assert!(is_limited(&slow));
    age(&mut database.connect(), "-1 hour"); // the clock is set back
    assert!(is_limited(&slow));
    age(&mut database.connect(), "1 hour");
    assert!(!is_limited(&slow));
}

#[test]
fn denials_while_two_versions_disagree_about_a_quota_begin_new_generations() {
    let database = database();
    let conn = &mut database.connect();
    let versions = [6, 5].map(|n| RateLimit::named("daily", Quota::per_day(n).burst(5)));
    let _ = allowed(versions[0].cost(5).check_on(conn).unwrap());
    for version in versions.iter().cycle().skip(1).take(450) {
        assert_eq!(
            limited(version.check_on(conn).unwrap()).reason,
            LimitedReason::Spent
        );
    }
    let row = "SELECT FROM resource_control.rate_limit WHERE generation = 3 AND updates <= 200";
    assert!(truth(conn, &format!("EXISTS ({row})")));
    let rows = "SELECT count(*) FROM resource_control.rate_limit";
    assert_eq!(number(conn, rows), 2);
    assert!(versions[0].reset_on(conn).unwrap());
    assert_eq!(number(conn, rows), 0);
}
