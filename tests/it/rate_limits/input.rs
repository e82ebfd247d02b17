//! Arguments that are refused.

use std::fmt;
use std::time::Duration;

use crate::half::error::{Input, Schema};
use crate::half::{Database, Error, Quota, RateLimit, pool_with_patience};
use diesel::connection::SimpleConnection;
use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::{API, HOUR, SLOW, allowed, database};

struct Unprintable;

impl fmt::Display for Unprintable {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Err(fmt::Error)
    }
}

#[test]
fn bad_input_is_an_error_before_anything_is_sent() {
    // No server is asked, because this one has nothing installed and would say so.
    let database = Database::new();
    let pool = database.pool(1);
    let (long, longest) = ("x".repeat(1001), "x".repeat(1000));
    let year = 366 * 24 * HOUR;
    let bad_quotas = [
        Quota::per_minute(0),
        Quota::per_minute(1).burst(0),
        Quota::per(1, Duration::ZERO),
        Quota::per(1, year + Duration::from_nanos(1)),
        Quota::per(1, year).burst(101),
        Quota::per(u32::MAX, Duration::MAX),
    ];
    let mut cases = vec![
        (RateLimit::named("", SLOW), Input::EmptyName),
        (RateLimit::named("a\0", SLOW), Input::NulCharacter),
        (API.key("\0"), Input::NulCharacter),
        (API.key(""), Input::EmptyKey),
        (API.key(Unprintable), Input::Unformatted),
        (
            RateLimit::new(long.clone(), SLOW),
            Input::TooLong {
                what: "the name of a rate limit",
                longest: 1000,
            },
        ),
        (
            API.key(&long),
            Input::TooLong {
                what: "the key",
                longest: 1000,
            },
        ),
        (
            API.cost(0),
            Input::BadUnits {
                name: "api".into(),
                units: 0,
                most: u32::MAX,
            },
        ),
    ];
    for quota in bad_quotas {
        cases.push((
            RateLimit::named("api", quota),
            Input::BadQuota { name: "api".into() },
        ));
    }
    for (limit, expected) in cases {
        let errors = [
            limit.check(&pool).unwrap_err(),
            limit.check_on(&mut database.connect()).unwrap_err(),
            limit.reserve(&pool, HOUR).unwrap_err(),
            limit.acquire_timeout(&pool, HOUR).unwrap_err(),
            limit.peek(&pool).unwrap_err(),
            limit.reset(&pool).unwrap_err(),
            RateLimit::check_all(&pool, &[&API, &limit]).unwrap_err(),
        ];
        for error in errors {
            assert!(
                matches!(&error, Error::Input(input) if *input == expected),
                "{error:?}, not {expected:?}"
            );
        }
    }
    let other = RateLimit::named("api", Quota::per_day(24).burst(6));
    assert!(matches!(
        RateLimit::check_all(&pool, &[&API.key(1), &API, &other]),
        Err(Error::Input(Input::DifferentQuotas { name })) if name == "api"
    ));
    let installed = super::database();
    let conn = &mut installed.connect();
    for quota in [
        Quota::per(1, year).burst(100),
        Quota::per(u32::MAX, Duration::from_nanos(1)),
    ] {
        let limit = RateLimit::new(longest.clone(), quota).key(&longest);
        let _ = allowed(limit.check_on(conn).unwrap());
        limit.reset_on(conn).unwrap();
    }
}

#[test]
fn callers_in_sql_get_the_name_of_what_is_wrong() {
    let database = database();
    let conn = &mut database.connect();
    for (call, expected) in [
        ("check_rate_limit('', 'k', 1, '1 s', 1)", "bad_rate_limit"),
        ("check_rate_limit(NULL, 'k', 1, '1 s', 1)", "bad_rate_limit"),
        (
            "check_rate_limit('api', NULL, 1, '1 s', 1)",
            "bad_rate_limit",
        ),
        (
            "check_rate_limit('api', repeat('x', 1001), 1, '1 s', 1)",
            "bad_rate_limit",
        ),
        ("check_rate_limit('api', 'k', 0, '1 s', 1)", "bad_quota"),
        ("check_rate_limit('api', 'k', NULL, '1 s', 1)", "bad_quota"),
        ("check_rate_limit('api', 'k', 1, '0', 1)", "bad_quota"),
        ("check_rate_limit('api', 'k', 1, NULL, 1)", "bad_quota"),
        (
            "check_rate_limit('api', 'k', 1, '367 days', 1)",
            "bad_quota",
        ),
        ("check_rate_limit('api', 'k', 1, '1 s', NULL)", "bad_quota"),
        (
            "check_rate_limit('api', 'k', 1, '366 days', 101)",
            "bad_quota",
        ),
        ("check_rate_limit('api', 'k', 1, '1 s', 1, 0)", "bad_cost"),
        (
            "check_rate_limit('api', 'k', 1, '1 s', 1, NULL)",
            "bad_cost",
        ),
        (
            "check_rate_limit('api', 'k', 1, '1 s', 1, 2)",
            "cost_above_burst",
        ),
        (
            "reserve_rate_limit('api', 'k', 1, '1 s', 1, 1, '-1 s')",
            "bad_cost",
        ),
        (
            "reserve_rate_limit('api', 'k', 1, '1 s', 1, 1, NULL)",
            "bad_cost",
        ),
        (
            "decide_rate_limit('api', 'k', 1, 1, 1, 1, 0, 2, false)",
            "bad_cost",
        ),
        (
            "decide_rate_limit('api', 'k', 1, 1, 1, 1, 0, 0, false)",
            "bad_cost",
        ),
        ("peek_rate_limit('', 'k', 1, '1 s', 1)", "bad_rate_limit"),
        ("give_back_rate_limit('api', 'k', 0, now())", "bad_cost"),
        ("give_back_rate_limit('api', 'k', 1, NULL)", "bad_cost"),
        (
            "give_back_rate_limit('api', 'k', 1, now(), '-1 s')",
            "bad_cost",
        ),
        ("prune_rate_limits('', '', 0)", "bad_pruning"),
        ("prune_rate_limits(NULL, '', 1)", "bad_pruning"),
        (
            "check_rate_limits(ARRAY['a'], ARRAY['k'], ARRAY[1], ARRAY[interval '1 s'], ARRAY[1], ARRAY[]::bigint[])",
            "bad_rate_limit",
        ),
        (
            "check_rate_limits(ARRAY['a', 'a'], ARRAY['k', 'k'], ARRAY[1, 2], ARRAY[interval '1 s', '1 s'], ARRAY[1, 1], ARRAY[1, 1])",
            "different_quotas",
        ),
        (
            "check_rate_limits(ARRAY['a'], ARRAY['k'], ARRAY[1], ARRAY[interval '1 s'], ARRAY[1], ARRAY[0])",
            "bad_cost",
        ),
    ] {
        let error = conn
            .batch_execute(&format!("SELECT resource_control.{call}"))
            .unwrap_err();
        let DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, information) = &error
        else {
            panic!("{call}: {error:?}");
        };
        let expected = format!("diesel_interlock_{expected}");
        assert_eq!(information.constraint_name(), Some(&*expected), "{call}");
    }
}

#[test]
fn a_missing_schema_is_reported_as_such() {
    let database = Database::new();
    let pool = database.pool(1);
    for error in [
        API.check(&pool).unwrap_err(),
        API.peek(&pool).unwrap_err(),
        API.reset(&pool).unwrap_err(),
        RateLimit::prune(&pool).unwrap_err(),
        RateLimit::check_all(&pool, &[&API]).unwrap_err(),
    ] {
        assert!(
            matches!(error, Error::Schema(Schema::NotInstalled)),
            "{error:?}"
        );
    }
}

#[test]
fn a_pool_without_a_connection_in_time_is_an_error_and_spends_nothing() {
    let database = database();
    let pool = pool_with_patience(&database, 1, Duration::from_millis(50));
    let only = pool.get().unwrap();
    for error in [
        API.check(&pool).unwrap_err(),
        API.reserve(&pool, HOUR).unwrap_err(),
        API.acquire_timeout(&pool, Duration::ZERO).unwrap_err(),
        API.peek(&pool).unwrap_err(),
        RateLimit::check_all(&pool, &[&API]).unwrap_err(),
        API.local(&pool, 3).unwrap().check("7", 1).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Pool(_)), "{error:?}");
    }
    drop(only);
    assert_eq!(API.peek(&pool).unwrap().remaining, 5);
}
