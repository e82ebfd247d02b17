//! Rate limits after a crash of the server and on a standby, and a comparison of their decisions
//! with a model.

#![deny(unfulfilled_lint_expectations)]

use std::process::Command;
use std::time::Duration;

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use proptest::prelude::*;
use workbench::{Cluster, Database, StopMode};

use crate::half::{Check, Error, PgPool, Quota, RateLimit, pool};
use crate::support::{eventually, install, installed, number, run};

#[test]
fn an_outcome_that_is_not_used_is_a_warning() {
    let database = installed();
    let pool = pool(&database, 1);
    let limit = RateLimit::named("unused", Quota::per_minute(10));
    #[expect(unused_must_use)]
    limit.check(&pool).unwrap();
    #[expect(unused_must_use)]
    limit.check_on(&mut pool.get().unwrap()).unwrap();
    #[expect(unused_must_use)]
    RateLimit::check_all(&[&limit], &pool).unwrap();
    #[expect(unused_must_use)]
    limit.local(pool.clone(), 3).check("7").unwrap();
    #[expect(unused_must_use)]
    limit.key(7);
    assert_eq!(limit.peek(&pool).unwrap().remaining, 7);
}

#[test]
fn a_crash_of_the_server_forgets_no_durable_grant_and_of_the_others_only_the_last() {
    // With these settings the WAL reaches the disk only by a durable grant.
    let cluster = Cluster::builder()
        .setting("wal_writer_delay", "10s")
        .setting("autovacuum", "off")
        .setting("bgwriter_lru_maxpages", "0")
        .start();
    let url = cluster.url("postgres");
    install(&mut PgConnection::establish(&url).unwrap());
    let pool: PgPool = Pool::builder()
        .max_size(2)
        .build(ConnectionManager::new(&url))
        .unwrap();
    let limit = RateLimit::named("crash", Quota::per_day(24).burst(5)).cost(5);
    let (before, durable, after) = (
        limit.key("before"),
        limit.key("durable").durable(),
        limit.key("after"),
    );
    let writer = "(SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter')";
    let writer = number(&mut PgConnection::establish(&url).unwrap(), writer);
    let stopped = Command::new("kill")
        .args(["-STOP", &writer.to_string()])
        .status();
    assert!(stopped.unwrap().success());
    for limit in [&before, &durable, &after] {
        assert!(limit.check(&pool).unwrap().is_allowed());
    }
    // An immediate stop kills stopped processes after five seconds.
    cluster.restart(StopMode::Immediate);
    eventually("the pool has replaced its connections", || {
        before.peek(&pool).is_ok()
    });
    assert!(durable.check(&pool).unwrap().is_limited());
    assert!(
        before.check(&pool).unwrap().is_limited(),
        "the WAL has this grant before the durable one"
    );
    assert!(
        after.check(&pool).unwrap().is_allowed(),
        "this grant was not flushed"
    );
}

#[test]
fn on_a_standby_a_peek_reads_and_a_check_is_refused() {
    let primary = Cluster::start();
    let database = primary.database();
    install(&mut database.connect());
    let limit = RateLimit::named("standby", Quota::per_day(24).burst(5));
    assert!(
        limit
            .cost(2)
            .check(&pool(&database, 1))
            .unwrap()
            .is_allowed()
    );
    let standby = primary.standby();
    let pool: PgPool = Pool::builder()
        .max_size(1)
        .build(ConnectionManager::new(standby.url(database.name())))
        .unwrap();
    eventually("the standby has replayed the grant", || {
        limit.peek(&pool).is_ok_and(|state| state.remaining == 3)
    });
    assert!(matches!(limit.check(&pool), Err(Error::Standby)));
    assert!(matches!(limit.reset(&pool), Err(Error::Standby)));
}

/// A model of one key, in units and minutes: the generic cell rate algorithm as a leaky bucket.
#[derive(Debug, Default)]
struct Model {
    owed: f64,
}

/// In how many minutes a unit refills, for each of the quotas.
const MINUTES: [u64; 3] = [20, 30, 60];

impl Model {
    /// More units than refill during a test.
    const MOMENT: f64 = 0.02;

    fn check(&mut self, units: u32, burst: u32) -> bool {
        let is_allowed = self.owed + f64::from(units) <= f64::from(burst) + Self::MOMENT;
        if is_allowed {
            self.owed += f64::from(units);
        }
        is_allowed
    }

    fn pass(&mut self, minutes: u64, a_unit: u64) {
        self.owed = (self.owed - minutes as f64 / a_unit as f64).max(0.0);
    }
}

fn let_pass(conn: &mut PgConnection, minutes: u64) {
    run(
        conn,
        &format!(
            "UPDATE resource_control.rate_limit SET since = since - interval '{minutes} min',
                spent_at = spent_at - interval '{minutes} min', full_at = full_at - interval '{minutes} min'"
        ),
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Each call is `(tens of minutes that pass, index of the quota, its burst, units)`. In steps
    /// of ten minutes, no decision is closer to its limit than `MOMENT`.
    #[test]
    fn each_decision_is_that_of_the_model(
        calls in prop::collection::vec((0..7_u64, 0..3_usize, 1..9_u32, 1..9_u32), 1..30),
    ) {
        thread_local! {
            static SERVER: (Database, PgPool) = {
                let database = installed();
                let pool = pool(&database, 1);
                (database, pool)
            };
        }
        SERVER.with(|(database, pool)| {
            let (conn, mut model) = (&mut database.connect(), Model::default());
            run(conn, "DELETE FROM resource_control.rate_limit");
            // The key refills at the rate of the quota of the last grant.
            let mut in_force = MINUTES[0];
            for (tens, index, burst, units) in calls {
                let_pass(conn, 10 * tens);
                model.pass(10 * tens, in_force);
                let (minutes, units) = (MINUTES[index], units.min(burst));
                let quota = Quota::new(1, Duration::from_secs(60 * minutes)).burst(burst);
                let limit = RateLimit::named("model", quota).cost(units);
                match limit.check(pool).unwrap() {
                    Check::Allowed(spent) => {
                        prop_assert!(model.check(units, burst));
                        let left = f64::from(burst) - model.owed;
                        prop_assert!((left - f64::from(spent.state.remaining)).abs() < 1.0);
                        in_force = minutes;
                    }
                    Check::Limited(limited) => {
                        prop_assert!(!model.check(units, burst));
                        let missing = model.owed + f64::from(units) - f64::from(burst);
                        let seconds = missing * 60.0 * minutes as f64;
                        prop_assert!((limited.retry_after.as_secs_f64() - seconds).abs() < 60.0);
                    }
                }
            }
            Ok(())
        })?;
    }
}
