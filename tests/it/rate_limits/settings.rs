//! Settings of a user that must not change the behaviour of rate limits.

use crate::half::prelude::*;
use crate::half::{Error, Quota, RateLimit, cancel_on, give_back_on};
use diesel::connection::SimpleConnection;

use super::{API, HOUR, SLOW, age, allowed, assert_about, database, limited};
use crate::support::{number, setting, truth};

/// Every operation of a rate limit, once, and as many checks of one key.
fn works(conn: &mut PgConnection, checks: u32) {
    for _ in 0..5 {
        let _ = allowed(API.check_on(conn).unwrap());
    }
    let denied = limited(API.check_on(conn).unwrap());
    assert_about(denied.retry_after.unwrap(), HOUR);
    let reservation = API.reserve_on(conn, 2 * HOUR).unwrap().reserved().unwrap();
    assert_about(reservation.wait, HOUR);
    assert_eq!(cancel_on(conn, reservation).unwrap(), 1);
    age(conn, "30 hours");
    let spent = allowed(API.cost(5).check_on(conn).unwrap());
    assert_eq!(give_back_on(conn, &spent, 2).unwrap(), 2);
    assert_eq!(API.peek_on(conn).unwrap().remaining, 2);
    let both = RateLimit::check_all_on(conn, &[&API.key(7), &API.cost(2)]).unwrap();
    assert_eq!(both.allowed().unwrap()[0].remaining, 4);
    assert!(API.reset_on(conn).unwrap());
    let yearly = RateLimit::named("yearly", Quota::per(12, 366 * 24 * HOUR).burst(1200));
    let spent = allowed(yearly.cost(1200).check_on(conn).unwrap());
    assert_about(spent.full_in, 100 * 366 * 24 * HOUR);
    age(conn, "36600 days");
    assert_eq!(RateLimit::prune_on(conn).unwrap(), 2);
    // What was pruned in one session and inserted in another.
    let hot = RateLimit::named("hot", SLOW.burst(24 * 100));
    for _ in 0..checks {
        let _ = allowed(hot.check_on(conn).unwrap());
    }
    assert_eq!(hot.reset_all_on(conn).unwrap(), 1);
}

#[test]
fn a_session_with_settings_of_its_own() {
    let database = database();
    for settings in [
        "SET TimeZone = 'Europe/Paris'",
        "SET TimeZone = 'Australia/Lord_Howe'; SET DateStyle = 'SQL, DMY'; SET IntervalStyle = 'iso_8601'",
        "SET default_transaction_isolation = 'serializable'; SET default_transaction_deferrable = on",
        "SET default_transaction_isolation = 'repeatable read'; SET synchronous_commit = off",
        "SET search_path = ''",
        "SET statement_timeout = '9s'; SET lock_timeout = '9s'",
        // Without its index scans a statement seems so costly that PostgreSQL would compile it each time, which takes long.
        "SET plan_cache_mode = force_generic_plan; SET enable_indexscan = off; SET enable_indexonlyscan = off; SET jit = off",
        "SET plan_cache_mode = force_custom_plan; SET jit_above_cost = 0",
        "SET row_security = off; SET standard_conforming_strings = off; SET backslash_quote = off",
        "SET extra_float_digits = -15; SET bytea_output = escape; SET client_encoding = 'LATIN1'",
        "SET plpgsql.variable_conflict = use_variable; SET plpgsql.extra_errors = 'all'",
    ] {
        let conn = &mut database.connect();
        conn.batch_execute(settings).unwrap();
        // After 200 checks the row of the key is replaced. A session that compiles each statement would take too long for them.
        let checks = if settings.contains("jit_above_cost") {
            5
        } else {
            250
        };
        works(conn, checks);
        assert_eq!(
            number(conn, "(SELECT count(*) FROM resource_control.rate_limit)"),
            0,
            "{settings}"
        );
    }
}

#[test]
fn objects_of_the_caller_do_not_hide_those_of_the_server() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute(
        "CREATE SCHEMA mine; \
         CREATE FUNCTION mine.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT timestamptz ''epoch'''; \
         CREATE FUNCTION mine.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false'; \
         CREATE OPERATOR mine.<= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = mine.never); \
         CREATE OPERATOR mine.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = mine.never); \
         CREATE FUNCTION mine.nothing(bigint, bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint'; \
         CREATE OPERATOR mine.* (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = mine.nothing); \
         CREATE OPERATOR mine.- (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = mine.nothing); \
         CREATE TABLE mine.rate_limit (); \
         SET search_path = mine, pg_catalog",
    )
    .unwrap();
    for _ in 0..2 {
        let spent = allowed(API.cost(4).check_on(conn).unwrap());
        assert_eq!(spent.remaining, 1);
        assert_eq!(API.peek_on(conn).unwrap().remaining, 1);
        limited(API.cost(2).check_on(conn).unwrap());
        assert_eq!(give_back_on(conn, &spent, 1).unwrap(), 1);
        assert!(API.reset_on(conn).unwrap());
    }
}

#[test]
fn names_and_keys_that_a_collation_holds_equal_are_different() {
    let database = database();
    let conn = &mut database.connect();
    if !truth(
        conn,
        "EXISTS (SELECT FROM pg_collation WHERE collprovider = 'i')",
    ) {
        eprintln!("no ICU here: not tried");
        return;
    }
    conn.batch_execute(
        "CREATE COLLATION nocase (provider = icu, locale = 'und-u-ks-level2', deterministic = false); \
         CREATE TABLE tenant (id integer, name text COLLATE nocase, key text COLLATE nocase); \
         INSERT INTO tenant VALUES (0, 'api', 'geo'), (1, 'api', 'GEO'), (2, 'API', 'geo')",
    )
    .unwrap();
    let tenants = [0, 1, 2];
    let of =
        |tenant: i32, call: &str| format!("SELECT {call} FROM tenant AS t WHERE id = {tenant}");
    let peek = |conn: &mut PgConnection, column: &str| {
        let call =
            format!("(resource_control.peek_rate_limit(t.name, t.key, 24, '1 day', 5)).{column}");
        tenants.map(|tenant| number(conn, &of(tenant, &call)))
    };

    let check = "(resource_control.check_rate_limit(t.name, t.key, 24, '1 day', 5, 5)).allowed";
    for tenant in tenants {
        assert!(truth(conn, &of(tenant, check)));
        assert!(!truth(conn, &of(tenant, check)));
    }
    let give_back = "resource_control.give_back_rate_limit(t.name, t.key, 2, ( \
        SELECT changed_at FROM resource_control.rate_limit AS r \
            WHERE (r.name, r.key) = (t.name COLLATE \"C\", t.key COLLATE \"C\")))";
    assert_eq!(number(conn, &of(0, give_back)), 2);
    assert_eq!(peek(conn, "remaining"), [2, 0, 0]);
    let reset = "resource_control.reset_rate_limit(t.name, t.key)";
    assert_eq!(number(conn, &of(0, reset)), 1);
    assert_eq!(peek(conn, "remaining"), [5, 0, 0]);
    let reset_all = "resource_control.reset_rate_limit(t.name)";
    assert_eq!(number(conn, &of(0, reset_all)), 1);
    assert_eq!(peek(conn, "remaining"), [5, 5, 0]);
    assert_eq!(number(conn, &of(2, reset_all)), 1);

    // Together they would cost more than the burst of one key.
    let check_all = "SELECT (resource_control.check_rate_limits(array_agg(name), array_agg(key), \
        '{24, 24, 24}', '{1 day, 1 day, 1 day}', '{5, 5, 5}', '{5, 5, 5}')).allowed FROM tenant";
    assert!(truth(conn, check_all));
    assert!(!truth(conn, check_all));
    let reserve = "(resource_control.reserve_rate_limit(t.name, t.key, 24, '1 day', 5, 1, '90 minutes')).allowed";
    for tenant in tenants {
        assert!(truth(conn, &of(tenant, reserve)));
        assert!(!truth(conn, &of(tenant, reserve)));
    }

    conn.batch_execute(
        "INSERT INTO resource_control.rate_limit_override (name, key, n, period, burst) \
         SELECT name, CASE WHEN id < 2 THEN key END, 24, '1 day', 7 + id FROM tenant",
    )
    .unwrap();
    assert_eq!(peek(conn, "quota_burst"), [7, 8, 9]);
    conn.batch_execute("DELETE FROM resource_control.rate_limit_override WHERE key = 'GEO'")
        .unwrap();
    assert_eq!(peek(conn, "quota_burst"), [7, 5, 9]);

    // Upper case comes first, by bytes.
    age(conn, "30 days");
    let prune = "(resource_control.prune_rate_limits(t.name, t.key)).pruned";
    assert_eq!(
        [1, 2].map(|tenant| number(conn, &of(tenant, prune))),
        [1, 1]
    );
}

#[test]
fn days_have_twenty_four_hours_where_the_clocks_change() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute("SET TimeZone = 'Europe/Paris'").unwrap();
    let daily = RateLimit::named("daily", Quota::per(1, 24 * HOUR).burst(400));
    let spent = allowed(daily.cost(400).check_on(conn).unwrap());
    assert_eq!(spent.full_in, 400 * 24 * HOUR);
    let state = daily.peek_on(conn).unwrap();
    assert_about(state.full_in, 400 * 24 * HOUR);
    assert_eq!(state.quota.period, 24 * HOUR);
    let retry_after = limited(daily.check_on(conn).unwrap()).retry_after;
    assert_about(retry_after.unwrap(), 24 * HOUR);
}

#[test]
fn a_stricter_default_level_is_retried_and_a_callers_own_transaction_may_fail() {
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    for level in ["repeatable read", "serializable"] {
        conn.batch_execute(&format!("SET default_transaction_isolation = '{level}'"))
            .unwrap();
        let _ = allowed(API.check_on(other).unwrap());
        // In plain SQL: the row is newer than the snapshot.
        conn.batch_execute("BEGIN; SELECT 1").unwrap();
        let _ = allowed(API.check_on(other).unwrap());
        let spend = "SELECT resource_control.check_rate_limit('api', '', 24, '1 day', 5, 1)";
        assert!(conn.batch_execute(spend).is_err());
        conn.batch_execute("ROLLBACK; BEGIN; SELECT 1").unwrap();
        API.reset_on(other).unwrap();
        let _ = allowed(API.key(level).check_on(other).unwrap());
        // So is the first call for a key that another one has inserted since then.
        let first = format!(
            "SELECT resource_control.check_rate_limit('api', '{level}', 24, '1 day', 5, 1)"
        );
        assert!(conn.batch_execute(&first).is_err());
        conn.batch_execute("ROLLBACK").unwrap();
        conn.batch_execute(&first).unwrap();
        assert_eq!(API.key(level).peek_on(conn).unwrap().remaining, 3);
    }
}

#[test]
fn the_settings_of_the_session_are_as_before() {
    let database = database();
    let conn = &mut database.connect();
    let settings = [
        "synchronous_commit",
        "lock_timeout",
        "search_path",
        "enable_seqscan",
    ];
    conn.batch_execute("SET lock_timeout = '7s'; SET synchronous_commit = local")
        .unwrap();
    let before = settings.map(|name| setting(conn, name));
    works(conn, 250);
    assert_eq!(settings.map(|name| setting(conn, name)), before);
}

#[test]
fn a_read_only_session_is_told() {
    let database = database();
    let conn = &mut database.connect();
    conn.batch_execute("SET default_transaction_read_only = on")
        .unwrap();
    assert!(matches!(API.check_on(conn), Err(Error::ReadOnly)));
    assert_eq!(API.peek_on(conn).unwrap().remaining, 5);
    assert!(matches!(API.reserve_on(conn, HOUR), Err(Error::ReadOnly)));
}

/// Against PostgreSQL's numbers without limits, up to the largest arguments that a call can have.
#[test]
fn the_arithmetic_is_exact() {
    let database = database();
    let conn = &mut database.connect();
    let wrong = number(
        conn,
        "(SELECT count(*) FROM \
             (VALUES (0::bigint), (1), (7), (4294967295), (31622400000000), (3162240000000000)) AS a (amount), \
             (VALUES (1::bigint), (2), (1000003), (4294967295), (31622400000000)) AS m (multiplier), \
             (VALUES (1::bigint), (3), (4294967295), (31622400000000)) AS d (divisor), \
             LATERAL (SELECT div(amount::numeric * multiplier + divisor - 1, divisor) AS up, \
                 div(amount::numeric * multiplier, divisor) AS down) AS exact \
             WHERE up < 9e18 AND (resource_control.scaled_up(amount, multiplier, divisor) <> up \
                 OR resource_control.scaled_down(amount, multiplier, divisor) <> down))",
    );
    assert_eq!(wrong, 0);
    let largest = "resource_control.scaled_up(3600000001, 4294967295, 1)";
    assert_eq!(number(conn, largest), i64::MAX);
    let wrong = number(
        conn,
        "(SELECT count(*) FROM \
             (VALUES (0::bigint), (1), (4294967295), (3162240000000000)) AS d (debt), \
             (VALUES (1::bigint, 1::bigint), (7, 3), (4294967295, 1), (1, 31622400000000)) AS q (n, period), \
             (VALUES (1::bigint, 1::bigint), (5, 11), (4294967295, 1), (1, 31622400000000)) AS w (n, period), \
             LATERAL (SELECT debt::numeric * q.n * w.period AS amount, q.period::numeric * w.n AS divisor) AS parts \
             WHERE resource_control.rescaled(debt, q.n, q.period, w.n, w.period) \
                 <> LEAST(div(amount, divisor) + (mod(amount, divisor) > 0)::integer, 9000000000000000))",
    );
    assert_eq!(wrong, 0);
}
