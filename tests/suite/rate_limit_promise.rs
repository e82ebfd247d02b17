//! A rate limit never allows more than burst + N in a period: the worst of all windows over the moments of all grants.

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

/// When units of a key were allowed, in microseconds, and how many.
type Grants = HashMap<String, Vec<(i64, u32)>>;

/// Fails if in any window W more than `burst + W × N / period` was allowed. Exact, and for all windows in one pass.
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

/// What a client does on a pool of its own, in its round of this number.
type Client<'a> = &'a (dyn Fn(&PgPool, u32) -> Option<(String, i64, u32)> + Sync);

/// Runs the clients at once for a second, and on a slow machine until they were allowed enough, and returns what that is.
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

/// On a machine that is too slow, the turn of a call does not come in time.
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
fn a_hot_key_at_every_default_isolation_level_and_in_every_setting() {
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
fn first_calls_at_once_share_one_burst() {
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
fn calls_of_different_costs_while_full_keys_are_pruned() {
    let database = installed();
    // The second refills a unit faster than a round trip takes.
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
fn units_that_were_given_back_are_not_given_twice() {
    let database = installed();
    let quota = Quota::per_second(500).burst(20);
    let limit = RateLimit::named("given back", quota);
    let client: Client<'_> = &|pool, round| {
        let cost = [1, 5, 20][round as usize % 3];
        let limit = limit.cost(cost);
        let spent = in_its_turn(wait(limit.check(pool)))?.allowed()?;
        if round % 2 == 0 {
            // Some when they are refilled in part.
            thread::sleep(Duration::from_millis(u64::from(round % 5)));
            // If nothing is given back, everything is refilled, or the key has been pruned, which is the same.
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
fn quotas_that_change_keep_to_the_largest() {
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
fn several_limits_at_once_and_one_of_them_alone() {
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
                // Whose check would time out, too.
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
