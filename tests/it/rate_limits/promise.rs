//! The promise, taken literally: the worst of all windows over the moments of all grants.

use std::collections::HashMap;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use crate::half::prelude::*;
use crate::half::{Database, Quota, RateLimit, Reserve, cancel_on, give_back_on};
use chrono::{DateTime, Utc};
use diesel::connection::SimpleConnection;
use diesel::sql_types::{BigInt, Text, Timestamptz};

use super::database;

/// When units of a key were allowed, in microseconds, and how many.
type Grants = HashMap<String, Vec<(i64, i64)>>;

/// How far the worst of all windows is above `burst + W × n / period`, in units of `1 / period`. Not above zero, if the
/// promise holds. Exact, and for all windows in one pass.
fn excess(grants: &[(i64, i64)], quota: Quota) -> i128 {
    let mut grants = grants.to_vec();
    grants.sort();
    let period = quota.period.as_micros() as i128;
    let (n, burst) = (i128::from(quota.n), i128::from(quota.burst));
    let (mut before, mut least, mut worst) = (0, i128::MAX, i128::MIN);
    for (at, units) in grants {
        least = least.min(before * period - i128::from(at) * n);
        before += i128::from(units);
        worst = worst.max(before * period - i128::from(at) * n - burst * period - least);
    }
    worst
}

#[track_caller]
fn assert_kept(grants: &Grants, quota: Quota) {
    for (key, grants) in grants {
        let excess = excess(grants, quota);
        assert!(excess <= 0, "{key}: {excess} of {} grants", grants.len());
    }
}

/// At least 95 % of what was promised between the first and the last grant, on a machine that runs other tests as well.
#[track_caller]
fn assert_not_withheld(grants: &Grants, quota: Quota) {
    for (key, grants) in grants {
        let (first, last) = (
            grants.iter().map(|it| it.0).min().unwrap(),
            grants.iter().map(|it| it.0).max().unwrap(),
        );
        let units: i64 = grants.iter().map(|it| it.1).sum();
        let promised = (last - first) as f64 * f64::from(quota.n) / quota.period.as_micros() as f64;
        assert!(
            units as f64 >= 0.95 * promised,
            "{key}: {units} of {promised}"
        );
    }
}

/// What a client does, with the number of its round.
type Client<'a> = &'a (dyn Fn(&mut PgConnection, u32) -> Vec<(String, DateTime<Utc>, i64)> + Sync);

/// Runs the clients at once for a second and a half, and returns what they were allowed.
fn run(database: &Database, settings: &str, clients: &[Client<'_>]) -> Grants {
    let all = Mutex::new(Grants::new());
    let start = Barrier::new(clients.len());
    std::thread::scope(|scope| {
        for client in clients {
            scope.spawn(|| {
                let conn = &mut database.connect();
                conn.batch_execute(settings).unwrap();
                let mut mine = Vec::new();
                start.wait();
                let end = Instant::now() + Duration::from_millis(1500);
                let mut round = 0;
                while Instant::now() < end {
                    mine.extend(client(conn, round));
                    round += 1;
                }
                let mut all = all.lock().unwrap();
                for (key, at, units) in mine {
                    let grants = all.entry(key).or_default();
                    grants.push((at.timestamp_micros(), units));
                }
            });
        }
    });
    all.into_inner().unwrap()
}

fn check(
    limit: &RateLimit,
    key: &str,
    conn: &mut PgConnection,
) -> Option<(String, DateTime<Utc>, i64)> {
    let spent = limit.key(key).check_on(conn).unwrap().allowed()?;
    Some((key.to_owned(), spent.at, spent.units.into()))
}

#[derive(QueryableByName)]
struct Row {
    #[diesel(sql_type = BigInt)]
    units: i64,
    #[diesel(sql_type = Timestamptz)]
    decided_at: DateTime<Utc>,
}

/// A check as a client in any other language sends it.
fn check_in_sql(
    key: &str,
    conn: &mut PgConnection,
    quota: Quota,
) -> Option<(String, DateTime<Utc>, i64)> {
    let row: Row = diesel::sql_query(format!(
        "SELECT units, decided_at FROM resource_control.check_rate_limit('promise', $1, {}, '{} us', {})",
        quota.n,
        quota.period.as_micros(),
        quota.burst
    ))
    .bind::<Text, _>(key)
    .get_result(conn)
    .unwrap();
    (row.units > 0).then(|| (key.to_owned(), row.decided_at, row.units))
}

#[test]
fn one_hot_key_from_two_kinds_of_clients_at_every_isolation_level() {
    let quota = Quota::per_second(200).burst(60);
    let limit = RateLimit::named("promise", quota);
    for level in ["read committed", "repeatable read", "serializable"] {
        let database = database();
        let settings =
            format!("SET default_transaction_isolation = '{level}'; SET TimeZone = 'Europe/Paris'");
        let rust: Client<'_> = &|conn, _| check(&limit, "hot", conn).into_iter().collect();
        let sql: Client<'_> = &|conn, _| {
            // Other languages retry by themselves at a stricter level.
            conn.batch_execute("SET default_transaction_isolation = 'read committed'")
                .unwrap();
            check_in_sql("hot", conn, quota).into_iter().collect()
        };
        let grants = run(
            &database,
            &settings,
            &[rust, rust, rust, rust, rust, rust, sql, sql],
        );
        assert_kept(&grants, quota);
        // At a stricter level each conflict costs more round trips, so a busy machine may not use up the limit.
        if level == "read committed" {
            assert_not_withheld(&grants, quota);
        }
    }
}

#[test]
fn many_first_calls_at_once_share_one_burst() {
    let quota = Quota::per_hour(3);
    let limit = RateLimit::named("promise", quota);
    for level in ["read committed", "repeatable read"] {
        let database = database();
        let settings = format!("SET default_transaction_isolation = '{level}'");
        let client: Client<'_> = &|conn, round| {
            check(&limit, &round.to_string(), conn)
                .into_iter()
                .collect()
        };
        let grants = run(&database, &settings, &[client; 16]);
        assert_kept(&grants, quota);
        assert!(grants.len() > 20, "{}", grants.len());
        let most = grants.values().map(Vec::len).max();
        assert_eq!(most, Some(3));
    }
}

#[test]
fn calls_of_different_costs_while_full_keys_are_pruned() {
    let quota = Quota::per_second(3000).burst(30);
    let limit = RateLimit::named("promise", quota);
    let database = database();
    let client: Client<'_> = &|conn, round| {
        let cost = [1, 2, 7, 30][round as usize % 4];
        let key = (round / 3 % 3).to_string();
        check(&limit.cost(cost), &key, conn).into_iter().collect()
    };
    let pruner: Client<'_> = &|conn, _| {
        RateLimit::prune_on(conn).unwrap();
        Vec::new()
    };
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[
            client, client, client, client, client, client, pruner, pruner,
        ],
    );
    assert_kept(&grants, quota);
    assert_eq!(grants.len(), 3);
}

#[test]
fn keys_that_are_full_again_at_once_are_pruned_and_inserted_without_end() {
    // A unit is refilled faster than a round trip takes.
    let quota = Quota::per_second(30_000).burst(2);
    let limit = RateLimit::named("promise", quota);
    let database = database();
    let client: Client<'_> = &|conn, round| {
        check(&limit.cost(2), &(round % 2).to_string(), conn)
            .into_iter()
            .collect()
    };
    let pruner: Client<'_> = &|conn, _| {
        RateLimit::prune_on(conn).unwrap();
        Vec::new()
    };
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[client, client, client, client, pruner, pruner],
    );
    assert_kept(&grants, quota);
}

#[test]
fn units_that_were_given_back_are_not_given_twice() {
    let quota = Quota::per_second(500).burst(20);
    let limit = RateLimit::named("promise", quota);
    let database = database();
    let client: Client<'_> = &|conn, round| {
        let cost = [1, 5, 20][round as usize % 3];
        let Some(spent) = limit.cost(cost).check_on(conn).unwrap().allowed() else {
            return Vec::new();
        };
        if round % 2 == 0 {
            std::thread::sleep(Duration::from_millis(u64::from(round % 50)));
            give_back_on(conn, &spent, cost).unwrap();
            return Vec::new();
        }
        vec![("hot".into(), spent.at, cost.into())]
    };
    let canceller: Client<'_> = &|conn, _| {
        if let Reserve::Reserved(reservation) = limit
            .cost(3)
            .reserve_on(conn, Duration::from_millis(20))
            .unwrap()
        {
            assert!(cancel_on(conn, reservation).unwrap() <= 3);
        }
        Vec::new()
    };
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[client, client, client, client, client, canceller],
    );
    assert_kept(&grants, quota);
}

#[test]
fn two_versions_that_disagree_allow_no_more_than_the_looser_one() {
    let (old, new) = (
        Quota::per_second(500).burst(20),
        Quota::per_second(2000).burst(100),
    );
    let looser = RateLimit::named("promise", new);
    let stricter = RateLimit::named("promise", old);
    let database = database();
    let one: Client<'_> = &|conn, _| check(&looser, "hot", conn).into_iter().collect();
    let other: Client<'_> = &|conn, _| check(&stricter, "hot", conn).into_iter().collect();
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[one, one, one, one, other, other, other, other],
    );
    assert_kept(&grants, new);
}

#[test]
fn overrides_that_come_and_go_allow_no_more_than_the_loosest_quota() {
    let quota = Quota::per_second(500).burst(20);
    let loosest = Quota::per_second(2000).burst(100);
    let limit = RateLimit::named("promise", quota);
    let database = database();
    let client: Client<'_> = &|conn, _| check(&limit, "hot", conn).into_iter().collect();
    let operator: Client<'_> = &|conn, round| {
        let key = if round % 2 == 0 { "'hot'" } else { "NULL" };
        conn.batch_execute(&match round % 4 {
            0 | 1 => format!(
                "INSERT INTO resource_control.rate_limit_override (name, key, n, period, burst) \
                 VALUES ('promise', {key}, 2000, '1 s', 100)"
            ),
            _ => format!(
                "DELETE FROM resource_control.rate_limit_override WHERE key IS NOT DISTINCT FROM {key}"
            ),
        })
        .unwrap();
        std::thread::sleep(Duration::from_millis(30));
        Vec::new()
    };
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[client, client, client, client, operator],
    );
    assert_kept(&grants, loosest);
}

#[test]
fn a_reset_adds_no_more_than_a_burst() {
    let quota = Quota::per_second(100).burst(20);
    let limit = RateLimit::named("promise", quota);
    let database = database();
    let resets = Mutex::new(0);
    let client: Client<'_> = &|conn, round| {
        let Some(spent) = limit.check_on(conn).unwrap().allowed() else {
            return Vec::new();
        };
        // Gives back what may have been spent before a reset.
        if round % 5 == 0 && give_back_on(conn, &spent, 1).unwrap() > 0 {
            return Vec::new();
        }
        vec![("hot".into(), spent.at, 1)]
    };
    let resetter: Client<'_> = &|conn, _| {
        limit.reset_on(conn).unwrap();
        *resets.lock().unwrap() += 1;
        std::thread::sleep(Duration::from_millis(100));
        Vec::new()
    };
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[client, client, client, client, resetter],
    );
    let resets = resets.into_inner().unwrap();
    let grants = &grants["hot"];
    let units = grants.len() as i64;
    let span =
        grants.iter().map(|it| it.0).max().unwrap() - grants.iter().map(|it| it.0).min().unwrap();
    assert!(
        units <= 20 * (resets + 1) + span * 100 / 1_000_000,
        "{units} with {resets} resets in {span} us"
    );
    assert!(units > 20 * (resets - 1), "{units} with {resets} resets");
}

#[test]
fn several_limits_at_once_keep_each_promise_and_do_not_deadlock() {
    let (tenant, global) = (
        Quota::per_second(300).burst(20),
        Quota::per_second(500).burst(50),
    );
    let (tenants, everything) = (
        RateLimit::named("tenant", tenant),
        RateLimit::named("everything", global),
    );
    let database = database();
    let client: Client<'_> = &|conn, round| {
        let names = [(round % 3).to_string(), (round % 2).to_string()];
        let (one, two) = (tenants.key(&names[0]), tenants.key(&names[1]).cost(2));
        let (limits, names) = if round % 2 == 0 {
            (
                [&one, &everything, &two],
                [&*names[0], "everything", &*names[1]],
            )
        } else {
            (
                [&two, &everything, &one],
                [&*names[1], "everything", &*names[0]],
            )
        };
        let spent = RateLimit::check_all_on(conn, &limits).unwrap().allowed();
        let spent = spent.into_iter().flatten();
        names
            .iter()
            .zip(spent)
            .map(|(name, spent)| ((*name).to_owned(), spent.at, spent.units.into()))
            .collect()
    };
    let pruner: Client<'_> = &|conn, _| {
        RateLimit::prune_on(conn).unwrap();
        Vec::new()
    };
    let grants = run(
        &database,
        "SET TimeZone = 'Asia/Tokyo'",
        &[client, client, client, client, client, pruner, pruner],
    );
    for (key, grants) in &grants {
        let quota = if key == "everything" { global } else { tenant };
        assert!(excess(grants, quota) <= 0, "{key}");
    }
    assert_eq!(grants.len(), 4, "{:?}", grants.keys());
}

#[test]
fn the_measure_finds_one_unit_too_many() {
    let quota = Quota::per_second(1).burst(2);
    assert!(excess(&[(0, 1), (0, 1), (1_000_000, 1)], quota) <= 0);
    assert!(excess(&[(0, 1), (0, 1), (999_999, 1)], quota) > 0);
    assert!(excess(&[(0, 3)], quota) > 0);
    assert!(
        excess(
            &[(0, 2), (9_000_000, 1), (9_000_000, 1), (9_500_000, 1)],
            quota
        ) > 0
    );
}
