//! No statement of the crate uses an operator that another role may have created.
//!
//! PostgreSQL looks in the whole search path for an operator that `pg_catalog` does not have for
//! exactly these types, so a role that may create operators in `public` would run code as the
//! service.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::schema::resource_control::service_request;
use workbench::{Cluster, Database};

use super::throttles::Resource;
use crate::assert_matches;
use crate::half::monitor::views::slot_in_flight;
use crate::half::monitor::{
    Leadership, Lock, RateLimitState, ScheduleState, ServiceRequest, Slot, ThrottleState,
    ThrottledResource, has_timed_out, is_in_flight,
};
use crate::half::schedule::every;
use crate::half::*;
use crate::support::{Own, Step, eventually, foreign_holder, install, run};

const HOUR: Duration = Duration::from_secs(3600);
const MOMENT: Duration = Duration::from_millis(100);

/// Repeats a wait until its first try has a reply before the deadline.
fn replied<T>(mut wait: impl FnMut() -> Result<T>) -> T {
    loop {
        match wait() {
            Err(Error::TimedOut) => {}
            replied => return replied.unwrap(),
        }
    }
}

/// A server on which everybody may create operators, and a database of it with the schema, the
/// declared resources, and every operator that `pg_catalog` lacks.
fn with_operators() -> (Cluster, Database) {
    let cluster = Cluster::start();
    let database = cluster.database();
    install(&mut database.connect());
    let synced = wait(Throttle::sync::<Resource>(&pool(&database, 1))).unwrap();
    assert_eq!(synced.added.len(), 2);
    database.set_operators();
    (cluster, database)
}

/// Calls each of the operations, whether or not it succeeds. Fails if a statement has used one of
/// the traps.
#[track_caller]
fn assert_none_found(cluster: &Cluster, operations: &[(&str, &dyn Fn())]) {
    let failed: Vec<_> = operations
        .iter()
        .filter(|(_, operation)| catch_unwind(AssertUnwindSafe(operation)).is_err())
        .map(|(name, _)| name)
        .collect();
    let found = cluster.found_operators();
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn the_traps_find_a_statement_that_mixes_types() {
    let (cluster, database) = with_operators();
    let conn = &mut database.connect();
    for (mixed, plain) in [
        ("7::bigint % 2", "7 % 2"),
        ("2 * interval '1 day'", "2::float8 * interval '1 day'"),
        (
            "'pg_class'::regclass = 1259::oid",
            "'pg_class'::regclass::oid = 1259::oid",
        ),
        ("ARRAY[1] || ARRAY[2]", "1 + 2"),
        (
            "resource_id = resource_id FROM resource_control.throttled_resource",
            "resource_id OPERATOR(pg_catalog.=) resource_id FROM resource_control.throttled_resource",
        ),
        (
            "service = 'a'::text FROM resource_control.service_request",
            "service::text = 'a' FROM resource_control.service_request",
        ),
        ("-interval '1 day' = - '1'::\"char\"", "-interval '1 day'"),
    ] {
        let before = cluster.found_operators().len();
        let select = |what| diesel::sql_query(format!("SELECT {what}"));
        assert!(select(mixed).execute(conn).is_err(), "{mixed}");
        assert_eq!(cluster.found_operators().len(), before + 1, "{mixed}");
        assert!(select(plain).execute(conn).is_ok(), "{plain}");
    }
}

#[test]
fn an_installation_uses_no_operator_of_another_role() {
    if Command::new("psql").arg("--version").output().is_err() {
        eprintln!("no psql here: not tried");
        return;
    }
    let cluster = Cluster::start();
    let database = cluster.database();
    database.set_operators();
    let psql = |arguments: &[&str]| {
        let mut psql = Command::new("psql");
        psql.args(["-qX", "-v", "ON_ERROR_STOP=1"]).args(arguments);
        let root = env!("CARGO_MANIFEST_DIR");
        let output = psql.arg(database.url()).current_dir(root).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    let run_files = |name: &str| {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations");
        let mut files: Vec<_> = std::fs::read_dir(root)
            .unwrap()
            .map(|entry| entry.unwrap().path().join(name))
            .filter(|file| file.exists())
            .collect();
        files.sort();
        if name == "down.sql" {
            files.reverse();
        }
        for file in files {
            psql(&["--file", file.to_str().unwrap()]);
        }
    };
    let again = || {
        run(
            &mut database.connect(),
            "DELETE FROM resource_control.installed_migration",
        );
        // The types of the schema exist now: create traps for them, too.
        database.set_operators();
    };
    run(
        &mut database.connect(),
        "CREATE ROLE app; CREATE ROLE grafana",
    );
    let of_crate = || wait(migrations::install(&pool(&database, 2))).unwrap();
    assert_none_found(
        &cluster,
        &[
            ("psql, at first", &|| run_files("up.sql")),
            ("psql, again", &|| {
                again();
                run_files("up.sql");
            }),
            ("install", &|| {
                again();
                of_crate();
                of_crate();
                wait(migrations::check(&pool(&database, 1))).unwrap();
            }),
            ("grants", &|| {
                psql(&["--set=role=app", "--file=migrations/grants.sql"]);
                psql(&[
                    "--set=role=grafana",
                    "--set=reads=1",
                    "--file=migrations/grants.sql",
                ]);
            }),
            ("down", &|| run_files("down.sql")),
        ],
    );
}

#[test]
fn no_operation_uses_an_operator_of_another_role() {
    static LOCK: AdvisoryLock = AdvisoryLock::named("lock");
    static BUSY: AdvisoryLock = AdvisoryLock::named("busy");
    static LIMIT: RateLimit = RateLimit::named("limit", Quota::per_day(4));
    static SLOTS: Semaphore = Semaphore::named("slots", 2, HOUR);
    static LEADS: Leader = Leader::named("leads", HOUR);
    static REPORT: Schedule = Schedule::named("report").after_crash(HOUR, 3);
    static CHARGE: Once = Once::named("charge");

    let (cluster, database) = with_operators();
    let pool = pool(&database, 3);
    let _holder = foreign_holder(&database, BUSY.lock_key());
    let owned = |sql: &str| {
        let path = "SET search_path = pg_catalog, resource_control, pg_temp";
        run(&mut database.connect(), &format!("{path}; {sql}"));
    };
    let throttles = |throttle: Throttle| {
        for is_first in [true, false] {
            let attempt = wait(throttle.attempt(&pool)).unwrap();
            assert_eq!(attempt.is_granted(), is_first);
        }
        on_one(&pool, |conn| {
            let key = throttle.key("on");
            assert!(wait(key.attempt_on(conn)).unwrap().is_granted());
        });
        let key = throttle.key("run");
        let ran: Result<_> = wait(key.run(&pool, work!(|| Ok(()))));
        assert!(ran.unwrap().is_granted());
    };
    let several = || AdvisoryLock::all([&LOCK, &LOCK.key(1), &LOCK.key(2).shared()]);
    let kinds = || {
        [
            LOCK.clone(),
            LOCK.clone().shared(),
            AdvisoryLock::new(LockKey::pair(1, -2)),
            AdvisoryLock::new(LockKey::pair(1, -2)).shared(),
            several(),
        ]
    };
    let busy = || {
        [
            BUSY.clone(),
            BUSY.clone().shared(),
            AdvisoryLock::all([&LOCK, &BUSY]),
        ]
    };
    assert_none_found(
        &cluster,
        &[
            ("named throttles", &|| {
                throttles(Throttle::named("rebuild", HOUR));
            }),
            ("resources", &|| throttles(Throttle::of(Resource::Import))),
            ("pruned throttles", &|| {
                owned("UPDATE throttle SET last_granted = last_granted - interval '1 day'");
                assert!(wait(prune::throttles(&pool)).unwrap() > 0);
            }),
            ("declared resources", &|| {
                owned("UPDATE throttled_resource SET throttle_interval = interval '1 day'");
                let synced = wait(Throttle::sync::<Resource>(&pool)).unwrap();
                assert_eq!(synced.different.len(), 2);
                let synced = wait(Throttle::sync_intervals::<Resource>(&pool)).unwrap();
                assert_eq!(synced.different.len(), 2);
                owned("DELETE FROM throttled_resource");
                let synced = wait(Throttle::sync::<Resource>(&pool)).unwrap();
                assert_eq!(synced.added.len(), 2);
            }),
            ("rate limits", &|| {
                let spent = wait(LIMIT.check(&pool)).unwrap().allowed().unwrap();
                assert!(
                    wait(LIMIT.cost(3).durable().check(&pool))
                        .unwrap()
                        .is_allowed()
                );
                assert!(wait(LIMIT.check(&pool)).unwrap().is_limited());
                assert!(replied(|| wait(LIMIT.acquire_timeout(&pool, MOMENT))).is_limited());
                wait(LIMIT.quota(Quota::per_day(9)).peek(&pool)).unwrap();
                assert!(
                    wait(LIMIT.quota(Quota::per_day(9)).check(&pool))
                        .unwrap()
                        .is_allowed()
                );
                wait(LIMIT.refund(&pool, &spent, 1)).unwrap();
                wait(LIMIT.quota(Quota::per_day(9)).refund(&pool, &spent, 1)).unwrap();
                let both = [&LIMIT.key(1), &LIMIT.key(2)];
                assert!(
                    wait(RateLimit::check_all(&both, &pool))
                        .unwrap()
                        .is_allowed()
                );
                let [spent, last] = [&LIMIT.key(1), &LIMIT.key(2)]
                    .map(|limit| wait(limit.check(&pool)).unwrap().allowed().unwrap());
                assert!(wait(LIMIT.key(1).refund(&pool, &spent, 1)).unwrap());
                assert!(wait(LIMIT.key(2).refund(&pool, &last, 1)).unwrap());
                on_one(&pool, |conn| {
                    assert!(wait(LIMIT.key(3).check_on(conn)).unwrap().is_allowed());
                });
                let local = LIMIT.key("local").local(pool.clone(), 2);
                assert!(wait(local.check("local")).unwrap().is_allowed());
                assert!(wait(LIMIT.reset(&pool)).unwrap());
                let soon = LIMIT.key("soon").quota(Quota::per_second(9).burst(1));
                assert!(wait(soon.check(&pool)).unwrap().is_allowed());
                assert!(
                    wait(soon.acquire_timeout(&pool, HOUR))
                        .unwrap()
                        .is_allowed()
                );
                owned("UPDATE rate_limit SET full_at = clock_timestamp()");
                assert!(wait(prune::rate_limits(&pool)).unwrap() > 0);
            }),
            ("a key in use", &|| {
                let locked = LIMIT.key("locked");
                assert!(wait(locked.check(&pool)).unwrap().is_allowed());
                let mut other = database.connect();
                run(&mut other, "BEGIN; SET LOCAL search_path = pg_catalog");
                run(
                    &mut other,
                    "UPDATE resource_control.rate_limit SET burst = burst",
                );
                assert_matches!(wait(locked.check(&pool)), Err(Error::KeyLocked { .. }));
                let both = [&locked, &LIMIT.key("new")];
                assert!(wait(RateLimit::check_all(&both, &pool)).is_err());
            }),
            ("semaphores", &|| {
                let permit = wait(SLOTS.try_acquire(&pool)).unwrap().admitted().unwrap();
                wait(permit.renew()).unwrap();
                let other = wait(SLOTS.clone().keep_alive().acquire(&pool)).unwrap();
                assert!(wait(SLOTS.try_acquire(&pool)).unwrap().is_full());
                assert!(replied(|| wait(SLOTS.acquire_timeout(&pool, MOMENT))).is_full());
                let lowered = Semaphore::named("slots", 1, HOUR);
                wait(permit.release()).unwrap();
                assert!(wait(lowered.try_acquire(&pool)).unwrap().is_full());
                drop(other);
                let ran: Result<()> = wait(SLOTS.key(1).with(&pool, work!(|_permit| Ok(()))));
                ran.unwrap();
                let key = SLOTS.key(2);
                let id = wait(key.acquire(&pool)).unwrap().detach();
                assert!(wait(key.renew(&pool, id)).unwrap());
                assert!(wait(key.complete(&pool, id)).unwrap());
                let _ = wait(key.acquire(&pool)).unwrap().detach();
                let _ = wait(key.acquire(&pool)).unwrap().detach();
                owned("UPDATE service_request SET expires_at = created_at");
                let _ = wait(key.acquire(&pool)).unwrap().detach();
                assert!(wait(prune::requests(&pool, Duration::ZERO)).unwrap() > 0);
            }),
            ("elections", &|| {
                while_it_leads(
                    &LEADS,
                    &pool,
                    |_| {},
                    || {
                        eventually("the instance leads", || {
                            wait(LEADS.current(&pool)).unwrap().is_some()
                        });
                    },
                );
            }),
            ("schedules", &|| {
                let fails = || Err(Error::TimedOut);
                for failing in [true, false, false] {
                    let look = wait(REPORT.run_due(
                        &pool,
                        every(HOUR),
                        work!(|_tick| if failing { fails() } else { Ok(()) }),
                    ));
                    let _ = look.unwrap();
                    owned(
                        "UPDATE schedule SET counted_from = counted_from - interval '2 hours', next_at = next_at - interval '2 hours'",
                    );
                }
                while_it_runs(&REPORT, &pool, &every(HOUR), &|_| false, || {
                    eventually("the schedule has run", || {
                        let mut conn = database.connect();
                        run(&mut conn, "SET search_path = pg_catalog, pg_temp");
                        let state = ScheduleState::all().load(&mut conn).unwrap();
                        state.iter().any(|it| it.state == "done")
                    });
                });
                assert!(wait(REPORT.pause(&pool)).unwrap());
                assert!(wait(REPORT.resume(&pool)).unwrap());
            }),
            ("session locks", &|| {
                for lock in kinds() {
                    let mut guard = wait(lock.try_acquire(&pool)).unwrap().acquired().unwrap();
                    assert!(wait(guard.is_held()).unwrap());
                    wait(guard.fencing_token()).unwrap();
                    wait(guard.release()).unwrap();
                    drop(wait(lock.acquire(&pool)).unwrap());
                    let done: Result<()> = wait(lock.with(&pool, work!(|_conn| Ok(()))));
                    done.unwrap();
                    on_one(&pool, |conn| {
                        let done: Result<()> = wait(lock.with_on(conn, work!(|_conn| Ok(()))));
                        done.unwrap();
                    });
                }
                for lock in busy() {
                    assert!(wait(lock.try_acquire(&pool)).unwrap().is_busy());
                    assert!(replied(|| wait(lock.acquire_timeout(&pool, MOMENT))).is_busy());
                    on_one(&pool, |conn| {
                        let done: Result<_> = wait(lock.try_with_on(conn, work!(|_conn| Ok(()))));
                        assert!(done.unwrap().is_busy());
                    });
                }
            }),
            ("a wait on a lent connection", &|| {
                let waited = AdvisoryLock::named("waited");
                let holder = foreign_holder(&database, waited.lock_key());
                std::thread::scope(|scope| {
                    let waiter = scope.spawn(|| {
                        on_one(&pool, |conn| {
                            let all = AdvisoryLock::all([&LOCK, &waited]);
                            let done: Result<()> = wait(all.with_on(conn, work!(|_conn| Ok(()))));
                            done.unwrap();
                        });
                    });
                    eventually("the lock is awaited", || {
                        let mut admin = database.connect();
                        run(&mut admin, "SET search_path = pg_catalog, pg_temp");
                        let all = Lock::of(waited.lock_key()).load(&mut admin).unwrap();
                        all.iter().any(|it| !it.is_held)
                    });
                    drop(holder);
                    waiter.join().unwrap();
                });
            }),
            ("transaction locks", &|| {
                on_one(&pool, |conn| {
                    for lock in kinds() {
                        begin(conn);
                        assert!(wait(lock.try_acquire_xact(conn)).unwrap().is_acquired());
                        wait(lock.acquire_xact(conn)).unwrap();
                        end(conn);
                        let done: Result<()> = wait(lock.transaction(conn, work!(|_conn| Ok(()))));
                        done.unwrap();
                    }
                    begin(conn);
                    for lock in busy() {
                        assert!(wait(lock.try_acquire_xact(conn)).unwrap().is_busy());
                        let waited = wait(lock.acquire_xact_timeout(conn, MOMENT));
                        assert!(waited.unwrap().is_busy());
                    }
                    end(conn);
                });
            }),
            ("once", &|| {
                for is_first in [true, false] {
                    on_one(&pool, |conn| {
                        let ran = wait(CHARGE.run(conn, work!(|_conn| Ok::<_, Error>("done"))));
                        assert_eq!(ran.unwrap().is_first(), is_first);
                        let key = CHARGE.key(1);
                        let tried = key.try_run(conn, work!(|_conn| Ok::<_, Error>("done")));
                        let tried = wait(tried).unwrap();
                        assert_eq!(tried.acquired().unwrap().is_first(), is_first);
                    });
                }
                assert!(wait(prune::once(&pool, Duration::ZERO)).unwrap() > 0);
            }),
            ("fences", &|| {
                on_one(&pool, |conn| {
                    begin(conn);
                    wait(Fence::named("fence").pass(conn, 2)).unwrap();
                    assert!(wait(Fence::named("fence").pass(conn, 1)).is_err());
                    end(conn);
                });
            }),
            ("migrations and exclusion", &|| {
                wait(migrations::install(&pool)).unwrap();
                wait(migrations::check(&pool)).unwrap();
                wait(check_exclusion(&pool)).unwrap();
                const OWN: Own = Own(&[(
                    "2026-01-01-000000_users",
                    Step::Sql("CREATE TABLE users (id int)"),
                )]);
                assert_eq!(run_pending(&database.url(), OWN).unwrap().len(), 1);
                assert!(run_pending(&database.url(), OWN).unwrap().is_empty());
            }),
            ("rows of the views", &|| {
                let conn = &mut database.connect();
                Lock::all().load::<Lock>(conn).unwrap();
                Lock::of(LOCK.lock_key()).load::<Lock>(conn).unwrap();
                let slots = Slot::all().filter(slot_in_flight::service.eq("slots"));
                slots
                    .filter(slot_in_flight::slot.eq(0))
                    .load::<Slot>(conn)
                    .unwrap();
                ThrottleState::all().load::<ThrottleState>(conn).unwrap();
                RateLimitState::all().load::<RateLimitState>(conn).unwrap();
                Leadership::all().load::<Leadership>(conn).unwrap();
                ScheduleState::all().load::<ScheduleState>(conn).unwrap();
                ThrottledResource::all()
                    .load::<ThrottledResource>(conn)
                    .unwrap();
                let flight = ServiceRequest::all().filter(is_in_flight());
                flight.load::<ServiceRequest>(conn).unwrap();
                let out = ServiceRequest::all().filter(has_timed_out());
                out.load::<ServiceRequest>(conn).unwrap();
                service_request::table
                    .count()
                    .get_result::<i64>(conn)
                    .unwrap();
            }),
            #[cfg(feature = "testing")]
            ("helpers for tests", &|| {
                use diesel_interlock::testing::{depose, expire, make_due, make_tick_due, use_up};

                wait(make_due(&Throttle::named("rebuild", HOUR), &pool)).unwrap();
                wait(make_due(&Throttle::of(Resource::Import), &pool)).unwrap();
                wait(make_due(&Throttle::of(Resource::Import).key("on"), &pool)).unwrap();
                wait(expire(&SLOTS, &pool)).unwrap();
                wait(use_up(&LIMIT, &pool)).unwrap();
                wait(depose(&LEADS, &pool)).unwrap();
                wait(make_tick_due(&REPORT, &pool, HOUR)).unwrap();
            }),
        ],
    );
}
