//! Other transactions that hold a key, and what survives a crash.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::half::prelude::*;
use crate::half::{
    CheckAll, Cluster, Error, LimitedReason, Quota, RateLimit, StopMode, give_back_on, migrations,
};
use diesel::connection::SimpleConnection;

use super::overrides::set;
use super::{API, HOUR, age, allowed, database, limited};
use crate::support::{Observer, number};

const SPEND: &str = "SELECT resource_control.check_rate_limit('api', '', 24, '1 day', 5, 1)";

#[test]
fn a_forgotten_begin_delays_a_call_and_does_not_stop_it() {
    let database = database();
    let pool = database.pool(1);
    for before in [0, 1] {
        API.reset(&pool).unwrap();
        for _ in 0..before {
            let _ = allowed(API.check(&pool).unwrap());
        }
        let forgotten = &mut database.connect();
        forgotten.batch_execute(&format!("BEGIN; {SPEND}")).unwrap();
        for _ in 0..2 {
            let since = Instant::now();
            let denied = limited(API.check(&pool).unwrap());
            assert_eq!(denied.reason, LimitedReason::Contended);
            assert_eq!(denied.retry_after, Some(Duration::from_millis(250)));
            assert_eq!(denied.retry_after_secs(), Some(1));
            assert!(since.elapsed() >= Duration::from_millis(200));
        }
        assert!(
            matches!(API.reset(&pool), Err(Error::Contended { name }) if name == "api")
                || before == 0
        );
        match RateLimit::check_all(&pool, &[&API.key(1), &API]).unwrap() {
            CheckAll::Limited { by: 1, limited } => {
                assert_eq!(limited.reason, LimitedReason::Contended);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(API.key(1).peek(&pool).unwrap().remaining, 5);
        // Others are not affected, nor is a call that the committed row limits.
        let _ = allowed(API.key(2).cost(5).check(&pool).unwrap());
        limited(API.key(2).check(&pool).unwrap());
        API.key(2).reset(&pool).unwrap();
        forgotten.batch_execute("ROLLBACK").unwrap();
        assert_eq!(allowed(API.check(&pool).unwrap()).remaining, 4 - before);
    }
}

#[test]
fn a_denial_that_the_committed_row_shows_does_not_wait() {
    let database = database();
    let pool = database.pool(1);
    let _ = allowed(API.cost(5).check(&pool).unwrap());
    let forgotten = &mut database.connect();
    forgotten
        .batch_execute("BEGIN; SELECT FROM resource_control.rate_limit FOR UPDATE")
        .unwrap();
    assert_eq!(
        limited(API.check(&pool).unwrap()).reason,
        LimitedReason::Spent
    );
    assert_eq!(API.peek(&pool).unwrap().remaining, 0);
}

#[test]
fn a_wait_outlasts_a_transaction_that_holds_the_key() {
    let database = database();
    let pool = database.pool(1);
    let _ = allowed(API.check(&pool).unwrap());
    let forgotten = &mut database.connect();
    forgotten.batch_execute(&format!("BEGIN; {SPEND}")).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| API.acquire_timeout(&pool, Duration::from_secs(20)).unwrap());
        let mut observer = Observer::of(&database);
        crate::support::eventually("it waits", || observer.all_waiting() == 1);
        forgotten.batch_execute("COMMIT").unwrap();
        assert_eq!(allowed(waiting.join().unwrap()).remaining, 2);
    });
}

#[test]
fn a_shorter_statement_timeout_of_the_session_limits_the_call_and_is_no_error() {
    let database = database();
    let conn = &mut database.connect();
    let _ = allowed(API.check_on(conn).unwrap());
    // Shorter than the 250 milliseconds that a call waits otherwise.
    conn.batch_execute("SET statement_timeout = '150ms'")
        .unwrap();
    let forgotten = &mut database.connect();
    forgotten.batch_execute(&format!("BEGIN; {SPEND}")).unwrap();
    assert_eq!(
        limited(API.check_on(conn).unwrap()).reason,
        LimitedReason::Contended
    );
}

#[test]
fn pruning_skips_a_key_that_another_transaction_holds() {
    let database = database();
    let conn = &mut database.connect();
    for key in 0..10 {
        let _ = allowed(API.key(key).check_on(conn).unwrap());
    }
    age(conn, "1 day");
    let forgotten = &mut database.connect();
    forgotten
        .batch_execute("BEGIN; SELECT FROM resource_control.rate_limit WHERE key = '4' FOR UPDATE")
        .unwrap();
    assert_eq!(RateLimit::prune_on(conn).unwrap(), 9);
    assert_eq!(
        number(conn, "(SELECT key FROM resource_control.rate_limit)"),
        4
    );
    forgotten.batch_execute("COMMIT").unwrap();
    assert_eq!(RateLimit::prune_on(conn).unwrap(), 1);
}

#[test]
fn a_clock_that_was_set_back_takes_no_time_and_gives_none() {
    let database = database();
    let conn = &mut database.connect();
    let quota = Quota::per_second(10).burst(5);
    let limit = RateLimit::named("clock", quota);
    let _ = allowed(limit.cost(5).check_on(conn).unwrap());
    // As if the row had been written before the clock was set back by an hour.
    age(conn, "-1 hour");
    let denied = limited(limit.check_on(conn).unwrap());
    assert!(denied.retry_after.unwrap() <= Duration::from_millis(100));
    std::thread::sleep(Duration::from_millis(150));
    let _ = allowed(limit.check_on(conn).unwrap());
    limited(limit.cost(5).check_on(conn).unwrap());
    // A call that is allowed also writes the present time.
    limit.reset_on(conn).unwrap();
    let _ = allowed(limit.cost(2).check_on(conn).unwrap());
    age(conn, "-1 hour");
    assert_eq!(limit.peek_on(conn).unwrap().remaining, 3);
    let _ = allowed(limit.cost(3).check_on(conn).unwrap());
    assert!(
        limited(limit.check_on(conn).unwrap()).retry_after.unwrap() <= Duration::from_millis(100)
    );
    // What was spent at a time that the clock has not reached again cannot be given back.
    let mut spent = allowed(API.cost(5).check_on(conn).unwrap());
    spent.at += HOUR;
    assert_eq!(give_back_on(conn, &spent, 5).unwrap(), 0);
}

#[test]
fn keys_that_are_spent_as_others_are_pruned_or_replaced_fail_no_call() {
    let database = database();
    let limit = RateLimit::named("busy", Quota::per_second(100_000));
    let start = Barrier::new(6);
    std::thread::scope(|scope| {
        for client in 0..6 {
            let (database, limit, start) = (&database, &limit, &start);
            scope.spawn(move || {
                let conn = &mut database.connect();
                start.wait();
                for _ in 0..300 {
                    match client {
                        0 => drop(RateLimit::prune_on(conn).unwrap()),
                        1 => drop(limit.reset_on(conn).unwrap()),
                        _ => drop(allowed(limit.check_on(conn).unwrap())),
                    }
                }
            });
        }
    });
    let conn = &mut database.connect();
    let rows = "(SELECT count(*) FROM resource_control.rate_limit WHERE full_at > '-infinity')";
    assert!(number(conn, rows) <= 1);
}

#[test]
fn a_crash_of_the_server_loses_the_last_moments_and_nothing_that_is_durable() {
    let cluster = Cluster::builder()
        .setting("wal_writer_delay", "10s")
        .start();
    let connect = || PgConnection::establish(&cluster.url("postgres")).unwrap();
    migrations::install(&mut connect()).unwrap();
    let durable = API.key("durable").durable();
    let conn = &mut connect();
    let _ = allowed(API.cost(5).check_on(conn).unwrap());
    let _ = allowed(durable.cost(5).check_on(conn).unwrap());
    let _ = allowed(API.key("late").cost(5).check_on(conn).unwrap());
    cluster.restart(StopMode::Immediate);
    let conn = &mut connect();
    limited(durable.check_on(conn).unwrap());
    // It was written before the durable one, so it is on the disk as well.
    limited(API.check_on(conn).unwrap());
    let _ = allowed(API.key("late").check_on(conn).unwrap());
}

#[test]
fn a_standby_refuses_checks_and_can_be_looked_at() {
    let primary = Cluster::start();
    let database = primary.database();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let _ = allowed(API.cost(2).check_on(conn).unwrap());
    let standby = primary.standby();
    let conn = &mut PgConnection::establish(&standby.url(database.name())).unwrap();
    crate::support::eventually("the standby has followed", || {
        API.peek_on(conn).is_ok_and(|state| state.remaining == 3)
    });
    for error in [
        API.check_on(conn).unwrap_err(),
        API.key(7).check_on(conn).unwrap_err(),
        API.reserve_on(conn, HOUR).unwrap_err(),
        API.reset_on(conn).unwrap_err(),
        RateLimit::check_all_on(conn, &[&API]).unwrap_err(),
    ] {
        assert!(matches!(error, Error::ReadOnly), "{error:?}");
    }
}

/// A call of several limits waits only for a moment while it holds one of the keys.
#[test]
fn a_key_that_somebody_holds_keeps_nobody_from_a_limit_that_all_share() {
    static ALL: RateLimit = RateLimit::named("all", Quota::per_second(1_000_000));
    static TENANT: RateLimit = RateLimit::named("tenant", Quota::per_second(1_000_000));
    let database = database();
    let held = TENANT.key(7);
    let conn = &mut database.connect();
    let _ = allowed(ALL.check_on(conn).unwrap());
    let _ = allowed(held.check_on(conn).unwrap());
    let forgotten = &mut database.connect();
    let hold = "BEGIN; SELECT FROM resource_control.rate_limit WHERE name = 'tenant' FOR UPDATE";
    forgotten.batch_execute(hold).unwrap();
    // The row is rewritten for another quota before it is spent from.
    set(conn, "tenant", Some("7"), "2000000, '1 second', 2000000");
    std::thread::scope(|threads| {
        let callers: Vec<_> = (0..2)
            .map(|_| {
                threads.spawn(|| {
                    let conn = &mut database.connect();
                    for _ in 0..3 {
                        match RateLimit::check_all_on(conn, &[&held, &ALL]).unwrap() {
                            CheckAll::Limited { by: 0, limited } => {
                                assert_eq!(limited.reason, LimitedReason::Contended);
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                })
            })
            .collect();
        while !callers.iter().all(|caller| caller.is_finished()) {
            let _ = allowed(ALL.check_on(conn).unwrap());
        }
    });
    forgotten.batch_execute("ROLLBACK").unwrap();
    let all = RateLimit::check_all_on(conn, &[&held, &ALL]).unwrap();
    assert!(matches!(all, CheckAll::Allowed(_)));
}
