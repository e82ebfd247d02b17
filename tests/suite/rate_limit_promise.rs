//! A rate limit never allows more than burst + N units in any period, computed from the times of
//! all grants.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use workbench::Database;

use crate::half::{
    Check, Error, PgPool, Quota, RateLimit, execute, on_one, pool, prune, unchecked_pool, wait,
};
use crate::support::{installed, number, run};

const MINUTE: Duration = Duration::from_secs(60);

/// For each key, the time of each grant in microseconds, and how many units it had.
type Grants = HashMap<String, Vec<(i64, u32)>>;

/// Fails if in any window of length W more than `burst + W × N / period` units were granted. One
/// exact pass covers all windows.
#[track_caller]
fn assert_kept(grants: &Grants, quota: Quota) {
    let (n, period) = (i128::from(quota.units), quota.period.as_micros() as i128);
    for (key, grants) in grants {
        let mut grants = grants.clone();
        grants.sort_unstable();
        let (mut before, mut least) = (0, i128::MAX);
        for (at, units) in grants {
            least = least.min(before * period - i128::from(at) * n);
            before += i128::from(units);
            let excess =
                before * period - i128::from(at) * n - i128::from(quota.burst) * period - least;
            assert!(
                excess <= 0,
                "{key}: {} units too many",
                excess as f64 / period as f64
            );
        }
    }
}

fn units(grants: &Grants) -> u32 {
    grants.values().flatten().map(|(_, units)| units).sum()
}

/// A client: gets a pool of its own and the number of the round, and returns the key, the time and
/// the units of a grant.
type Client<'a> = &'a (dyn Fn(&PgPool, u32) -> Option<(String, i64, u32)> + Sync);

/// Runs the clients concurrently for a second, or for longer on a slow machine until `is_enough`,
/// and returns their grants.
fn hammer(
    database: &Database,
    clients: &[Client<'_>],
    is_enough: impl Fn(&Grants) -> bool + Sync,
) -> Grants {
    let (all, start) = (Mutex::new(Grants::new()), Barrier::new(clients.len()));
    thread::scope(|scope| {
        for client in clients {
            scope.spawn(|| {
                let pool = pool(database, 1);
                start.wait();
                let began = Instant::now();
                for round in 0.. {
                    let elapsed = began.elapsed();
                    let is_over = || is_enough(&all.lock().unwrap()) || elapsed > MINUTE;
                    if elapsed > Duration::from_secs(1) && is_over() {
                        break;
                    }
                    if let Some((key, at, units)) = client(&pool, round) {
                        all.lock()
                            .unwrap()
                            .entry(key)
                            .or_default()
                            .push((at, units));
                    }
                }
            });
        }
    });
    all.into_inner().unwrap()
}

/// The outcome, or `None` where a call on a slow machine has waited for the row for too long.
fn in_its_turn<T>(outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Err(Error::KeyLocked(_)) => None,
        outcome => Some(outcome.unwrap()),
    }
}

fn spend(limit: &RateLimit, key: &str, pool: &PgPool) -> Option<(String, i64, u32)> {
    let spent = in_its_turn(wait(limit.key(key).check(pool)))?.allowed()?;
    Some((key.to_owned(), spent.at().timestamp_micros(), spent.units))
}

#[test]
fn a_hot_key_keeps_to_its_quota_at_every_isolation_level_and_in_every_setting() {
    let quota = Quota::per_second(200).burst(60);
    let limit = RateLimit::named("hot", quota);
    for settings in [
        "default_transaction_isolation = 'read committed'",
        "default_transaction_isolation = 'repeatable read'",
        "default_transaction_isolation = serializable",
        "timezone = 'Europe/Paris'",
        "search_path = ''",
        "intervalstyle = iso_8601",
    ] {
        let database = installed();
        run(
            &mut database.connect(),
            &format!("ALTER DATABASE {} SET {settings}", database.name()),
        );
        let client: Client<'_> = &|pool, _| spend(&limit, "hot", pool);
        let grants = hammer(&database, &[client; 8], |grants| units(grants) >= 60);
        assert_kept(&grants, quota);
        assert!(units(&grants) >= 60, "{settings}: {}", units(&grants));
    }
}

#[test]
fn concurrent_first_calls_share_one_burst() {
    let database = installed();
    let quota = Quota::per_hour(3);
    let limit = RateLimit::named("first", quota);
    let client: Client<'_> = &|pool, round| spend(&limit, &round.to_string(), pool);
    let most = |grants: &Grants| grants.values().map(Vec::len).max();
    let grants = hammer(&database, &[client; 8], |grants| {
        grants.len() > 20 && most(grants) == Some(3)
    });
    assert!(grants.len() > 20);
    assert_eq!(most(&grants), Some(3));
}

#[test]
fn calls_of_different_costs_keep_to_the_quota_while_full_keys_are_pruned() {
    let database = installed();
    // Under the second quota a unit refills faster than a round trip.
    for quota in [
        Quota::per_second(3000).burst(30),
        Quota::per_second(30_000).burst(2),
    ] {
        let limit = RateLimit::named("pruned", quota);
        let client: Client<'_> = &|pool, round| {
            let cost = [1, 2, 7, 30][round as usize % 4];
            spend(
                &limit.cost(cost.min(quota.burst)),
                &(round / 3 % 3).to_string(),
                pool,
            )
        };
        let pruner: Client<'_> = &|pool, _| {
            wait(prune::rate_limits(pool)).unwrap();
            None
        };
        let grants = hammer(
            &database,
            &[
                client, client, client, client, client, client, pruner, pruner,
            ],
            |grants| grants.len() == 3,
        );
        assert_kept(&grants, quota);
        assert_eq!(grants.len(), 3);
    }
}

#[test]
fn refunded_units_are_not_granted_twice() {
    let database = installed();
    let quota = Quota::per_second(500).burst(20);
    let limit = RateLimit::named("given back", quota);
    let client: Client<'_> = &|pool, round| {
        let cost = [1, 5, 20][round as usize % 3];
        let limit = limit.cost(cost);
        let spent = in_its_turn(wait(limit.check(pool)))?.allowed()?;
        if round % 2 == 0 {
            // Some of the units have refilled in part before they are given back.
            thread::sleep(Duration::from_millis(u64::from(round % 5)));
            // If nothing is given back, all units have refilled, or the key was pruned because they
            // had.
            let _ = in_its_turn(wait(limit.refund(pool, &spent, cost)));
            return None;
        }
        Some(("hot".into(), spent.at().timestamp_micros(), cost))
    };
    let pruner: Client<'_> = &|pool, _| {
        wait(prune::rate_limits(pool)).unwrap();
        None
    };
    let grants = hammer(
        &database,
        &[client, client, client, client, client, client, pruner],
        |grants| units(grants) > 20,
    );
    assert_kept(&grants, quota);
    assert!(units(&grants) > 20);
}

#[test]
fn a_key_with_changing_quotas_keeps_to_the_largest() {
    let database = installed();
    let largest = Quota::per_second(200).burst(50);
    let quotas = [
        largest,
        Quota::per_second(50).burst(10),
        largest.burst(20),
        Quota::per_minute(600).burst(30),
    ];
    let client: Client<'_> = &|pool, round| {
        let limit = RateLimit::named("changing", quotas[round as usize / 10 % 4]);
        spend(&limit.cost(1 + round % 3), "hot", pool)
    };
    let grants = hammer(&database, &[client; 8], |grants| units(grants) > 50);
    assert_kept(&grants, largest);
    assert!(units(&grants) > 50);
}

#[test]
fn several_limits_keep_to_their_quotas_also_where_one_is_checked_alone() {
    let database = installed();
    let quota = Quota::per_second(300).burst(40);
    let (all, one) = (
        RateLimit::named("all", quota),
        RateLimit::named("one", quota),
    );
    let both: Client<'_> = &|pool, round| {
        let limits = if round % 2 == 0 {
            [&all, &one]
        } else {
            [&one, &all]
        };
        match in_its_turn(wait(RateLimit::check_all(&limits, pool)))? {
            Check::Allowed(spent) => {
                let all = &spent[round as usize % 2];
                assert_eq!(all.state.name, "all");
                Some(("all".into(), all.at().timestamp_micros(), all.units))
            }
            Check::Limited(_) => None,
        }
    };
    let alone: Client<'_> =
        &|pool, _| spend(&all, "", pool).map(|(_, at, units)| ("all".into(), at, units));
    let clients = [both, both, both, both, alone, alone];
    let grants = hammer(&database, &clients, |grants| units(grants) > 40);
    assert_kept(&grants, quota);
    assert!(units(&grants) > 40);
}

#[test]
fn a_check_in_a_transaction_that_is_rolled_back_spends_nothing() {
    let database = installed();
    let quota = Quota::per_second(100).burst(10);
    let limit = RateLimit::named("rolled back", quota);
    let client: Client<'_> = &|pool, round| {
        on_one(pool, |conn| {
            wait(execute(conn, "BEGIN")).unwrap();
            let spent = wait(limit.check_on(conn)).unwrap().allowed();
            let end = if round % 3 == 0 { "ROLLBACK" } else { "COMMIT" };
            wait(execute(conn, end)).unwrap();
            let spent = spent.filter(|_| end == "COMMIT")?;
            Some(("hot".into(), spent.at().timestamp_micros(), spent.units))
        })
    };
    let grants = hammer(&database, &[client; 6], |grants| units(grants) >= 10);
    assert_kept(&grants, quota);
    assert!(units(&grants) >= 10);
}

#[test]
fn cancelled_statements_are_errors_and_spend_once_at_most() {
    let database = installed();
    let quota = Quota::per_second(20_000).burst(1000);
    let holder = &mut database.connect();
    let (errors, allowed) = (Mutex::new(Vec::new()), AtomicU32::new(0));
    let (start, is_over) = (Barrier::new(9), AtomicBool::new(false));
    thread::scope(|scope| {
        for n in 0..8 {
            let (database, errors, allowed) = (&database, &errors, &allowed);
            let (start, is_over) = (&start, &is_over);
            scope.spawn(move || {
                // A pool that checks its connections could time out in that check, too.
                let pool = unchecked_pool(database, 1);
                on_one(&pool, |conn| {
                    let timeout = format!("SET statement_timeout = {}", [1, 2, 5, 0][n % 4]);
                    wait(execute(conn, &timeout)).unwrap();
                });
                start.wait();
                for round in 0.. {
                    if is_over.load(Ordering::SeqCst) {
                        break;
                    }
                    let quota = if round / 10 % 2 == 0 {
                        quota
                    } else {
                        quota.burst(900)
                    };
                    let limit = RateLimit::named("cancelled", quota);
                    match wait(limit.check(&pool)) {
                        Ok(Check::Allowed(_)) => {
                            allowed.fetch_add(1, Ordering::SeqCst);
                        }
                        Ok(Check::Limited(_)) => {}
                        Err(error) => errors.lock().unwrap().push(error),
                    }
                }
            });
        }
        start.wait();
        let began = Instant::now();
        let is_enough =
            || errors.lock().unwrap().len() >= 40 && allowed.load(Ordering::SeqCst) > 100;
        while !is_enough() && began.elapsed() < MINUTE {
            run(
                holder,
                "BEGIN; UPDATE resource_control.rate_limit SET full_at = full_at; SELECT pg_sleep(0.01); COMMIT",
            );
        }
        is_over.store(true, Ordering::SeqCst);
    });
    let (errors, allowed) = (errors.into_inner().unwrap(), allowed.into_inner());
    assert!(
        errors.len() >= 40 && allowed > 100,
        "{} {allowed}",
        errors.len()
    );
    for error in errors {
        assert!(
            matches!(error, Error::Database(_) | Error::KeyLocked(_)),
            "{error}"
        );
    }
    let broken = "SELECT count(*) FROM resource_control.rate_limit AS r WHERE NOT (r IS NOT NULL)";
    assert_eq!(number(holder, broken), 0);
}
