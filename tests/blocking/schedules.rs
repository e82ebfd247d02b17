//! Schedules of the blocking half.
#![cfg(feature = "testing")] // whose leases may be short

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use diesel_interlock::schedule::{CatchUp, RunDue, every};
use diesel_interlock::testing::make_tick_due;
use workbench::{RoundTrips, When};

use crate::assert_matches;
use crate::half::*;
use crate::support::{
    eventually, hourly, impatient_pool, installed, number, once_at_least, run, text, truth,
};

const HOUR: Duration = Duration::from_secs(3600);
static REPORT: Schedule = Schedule::named("report").after_crash(HOUR, 3);
/// A lease that a slow machine may lose.
const BRIEF: Duration = Duration::from_millis(600);

/// Lets the lease of the run expire, as if its process had died.
const EXPIRE: &str = "UPDATE resource_control.schedule SET expires_at = clock_timestamp() WHERE expires_at IS NOT NULL";

/// Registers the schedule by a first look, and makes ticks of so many hours due.
#[track_caller]
fn due(schedule: &Schedule, pool: &PgPool, hours: u32) {
    let never = |_: &Tick| -> Result<()> { panic!("nothing is due") };
    assert_matches!(schedule.run_due(pool, hourly, never), Ok(RunDue::Later(_)));
    assert!(make_tick_due(schedule, pool, HOUR * hours).unwrap());
}

/// The latest tick of `hourly`.
fn last_tick() -> DateTime<Utc> {
    hourly(Utc::now()).unwrap() - TimeDelta::hours(1)
}

/// Runs the due tick with a brief lease.
#[track_caller]
fn run_briefly<E: std::fmt::Display>(
    schedule: &Schedule,
    pool: &PgPool,
    mut work: impl FnMut(&Tick) -> std::result::Result<(), E>,
) -> Result<RunDue> {
    let schedule = schedule.clone().after_crash(BRIEF, 3);
    let mut ran = Ok(RunDue::Never);
    eventually("a claim takes less time than the lease", || {
        ran = schedule.run_due(pool, hourly, &mut work);
        !matches!(ran, Ok(RunDue::Later(_)) | Err(Error::TimedOut))
    });
    ran
}

/// Waits until the crash of the run is stored, and lets its lease expire, so that another run may
/// take the tick.
fn expire_after_crash(database: &workbench::Database) {
    let conn = &mut database.connect();
    eventually("the crash is stored", || {
        text(conn, "(SELECT state FROM resource_control.schedule_state)") == "crashed"
    });
    run(conn, EXPIRE);
}

fn ran_well(_: &Tick) -> Result<()> {
    Ok(())
}

#[test]
fn missed_ticks_are_caught_up_with_as_the_schedule_says() {
    let database = installed();
    let pool = pool(&database, 4);
    for (index, (catch_up, expected)) in [
        (CatchUp::Latest, vec![(0, 4)]),
        (CatchUp::Skip(2 * HOUR), vec![(0, 4)]),
        (CatchUp::Skip(Duration::from_micros(1)), vec![]),
        (CatchUp::All(3), vec![(2, 2), (1, 0), (0, 0)]),
        (
            CatchUp::All(100),
            vec![(4, 0), (3, 0), (2, 0), (1, 0), (0, 0)],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let schedule = REPORT.key(index).catch_up(catch_up);
        due(&schedule, &pool, 5);
        let (now, mut ran, mut last) = (last_tick(), Vec::new(), 0);
        let mut admin = RunDue::Ran;
        while admin == RunDue::Ran {
            admin = schedule
                .run_due(&pool, hourly, |tick| {
                    assert!(tick.attempt() == 1 && tick.fencing_token() > last);
                    last = tick.fencing_token();
                    ran.push(((now - tick.at()).num_hours(), tick.missed()));
                    Ok::<_, Error>(())
                })
                .unwrap();
        }
        assert_eq!(ran, expected, "{catch_up:?}");
        assert_matches!(admin, RunDue::Later(_));
    }
}

#[test]
fn an_error_is_stored_and_not_retried() {
    let database = installed();
    let pool = pool(&database, 4);
    let admin = &mut database.connect();
    due(&REPORT, &pool, 1);
    let failed = REPORT
        .clone()
        .details("web-3")
        .run_due(&pool, hourly, |_| Err("no \0 luck"));
    assert_eq!(failed.unwrap(), RunDue::Ran);
    assert_matches!(
        REPORT.run_due(&pool, hourly, ran_well),
        Ok(RunDue::Later(_))
    );
    let row = "(SELECT concat_ws(' | ', runner, attempt, error, ended_at >= started_at, expires_at) FROM resource_control.schedule)";
    assert_eq!(text(admin, row), "web-3 | 1 | no  luck | t");
    make_tick_due(&REPORT, &pool, HOUR).unwrap();
    assert_eq!(
        REPORT.run_due(&pool, hourly, ran_well).unwrap(),
        RunDue::Ran
    );
    assert!(truth(
        admin,
        "(SELECT error IS NULL AND runner LIKE '%pid %' FROM resource_control.schedule)"
    ));
}

#[test]
fn a_tick_whose_process_dies_runs_again_a_limited_number_of_times() {
    let database = installed();
    let pool = pool(&database, 4);
    due(&REPORT, &pool, 2);
    let mut ticks = Vec::new();
    for attempt in 1..=3 {
        let died = catch_unwind(AssertUnwindSafe(|| {
            REPORT.run_due(&pool, hourly, |tick| -> Result<()> {
                ticks.push((tick.at(), tick.fencing_token()));
                assert_eq!(tick.attempt(), attempt);
                panic!("the work crashes")
            })
        }));
        assert!(died.is_err());
        expire_after_crash(&database);
    }
    assert!(
        ticks
            .windows(2)
            .all(|two| two[0].0 == two[1].0 && two[0].1 < two[1].1),
        "{ticks:?}"
    );
    assert_matches!(
        REPORT.run_due(&pool, hourly, ran_well),
        Ok(RunDue::Later(_))
    );
    // The next tick runs.
    make_tick_due(&REPORT, &pool, HOUR).unwrap();
    let next = REPORT.run_due(&pool, hourly, |tick| {
        assert_eq!(tick.attempt(), 1);
        Ok::<_, Error>(())
    });
    assert_eq!(next.unwrap(), RunDue::Ran);
}

#[test]
fn a_tick_that_runs_again_has_the_same_number_of_missed_ticks() {
    let database = installed();
    let pool = pool(&database, 4);
    due(&REPORT, &pool, 5);
    let died = catch_unwind(AssertUnwindSafe(|| {
        REPORT.run_due(&pool, hourly, |tick| -> Result<()> {
            assert_eq!((tick.attempt(), tick.missed()), (1, 4));
            panic!("the work crashes")
        })
    }));
    assert!(died.is_err());
    expire_after_crash(&database);
    let again = REPORT.run_due(&pool, hourly, |tick| {
        assert_eq!((tick.attempt(), tick.missed()), (2, 4));
        Ok::<_, Error>(())
    });
    assert_eq!(again.unwrap(), RunDue::Ran);
}

#[test]
fn a_tick_that_ends_after_its_lease_is_not_run_by_an_instance_that_saw_the_lease_expired() {
    let database = installed();
    let pool = pool(&database, 4);
    let (admin, end) = (&mut database.connect(), Mutex::new(database.connect()));
    due(&REPORT, &pool, 1);
    let ran = REPORT.run_due(&pool, hourly, |_| {
        run(admin, EXPIRE);
        // The first run ends between the look and the claim of the second instance.
        let next = |after| {
            run(
                &mut end.lock().unwrap(),
                "UPDATE resource_control.schedule SET expires_at = NULL, ended_at = clock_timestamp()",
            );
            hourly(after)
        };
        let second = REPORT.run_due(&pool, next, |tick| -> Result<()> { panic!("{tick:?}") });
        assert_matches!(second, Ok(RunDue::Later(_)));
        Ok::<_, Error>(())
    });
    // Storing the same end again, as after a lost reply, changes nothing.
    assert_eq!(ran.unwrap(), RunDue::Ran);
}

#[test]
fn a_claim_that_takes_longer_than_its_lease_does_not_run() {
    let database = installed();
    let pool = pool(&database, 4);
    // On a slow machine some of these runs may lose their leases, too.
    let schedule = REPORT.clone().after_crash(Duration::from_millis(300), 1000);
    due(&REPORT, &pool, 1);
    let admin = &mut database.connect();
    run(
        admin,
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.4); RETURN NEW; END $$;
        CREATE TRIGGER slow BEFORE UPDATE ON resource_control.schedule FOR EACH ROW
            WHEN (NEW.token = 1 AND OLD.token = 0) EXECUTE FUNCTION slow()",
    );
    let work = |tick: &Tick| {
        assert!(tick.fencing_token() > 1);
        Ok::<_, Error>(())
    };
    eventually(
        "the tick runs when the server is fast again",
        || match schedule.run_due(&pool, hourly, work) {
            Err(Error::TimedOut | Error::PermitLost(_)) => false,
            ran => ran.unwrap() == RunDue::Ran,
        },
    );
}

#[test]
fn a_run_that_has_lost_its_lease_notices_and_does_not_affect_the_next_run() {
    let database = installed();
    let pool = pool(&database, 4);
    let admin = &mut database.connect();
    due(&REPORT, &pool, 1);
    // The first renewal, which notices the loss, comes after four seconds.
    let first = REPORT.clone().after_crash(Duration::from_secs(12), 3);
    let outcome = first.run_due(&pool, hourly, |tick| {
        run(admin, EXPIRE);
        let again = REPORT.run_due(&pool, hourly, |again| {
            assert_eq!((again.at(), again.attempt()), (tick.at(), 2));
            assert!(again.fencing_token() > tick.fencing_token());
            Err("of the second")
        });
        assert_eq!(again.unwrap(), RunDue::Ran);
        assert!(tick.wait_for_loss(Duration::MAX) && tick.is_lost());
        Ok::<_, Error>(())
    });
    assert_matches!(outcome, Err(Error::PermitLost(_)));
    assert_eq!(
        text(admin, "(SELECT error FROM resource_control.schedule)"),
        "of the second"
    );
}

#[test]
fn a_long_run_keeps_its_tick_for_itself() {
    let database = installed();
    let pool = pool(&database, 4);
    // On a slow machine a brief lease may be lost, but not in every round.
    for round in 0..20 {
        let schedule = REPORT.key(round);
        due(&schedule, &pool, 1);
        let mut is_kept = false;
        let ran = run_briefly(&schedule, &pool, |tick| {
            if !tick.wait_for_loss(3 * BRIEF) {
                let others = schedule.run_due(&pool, hourly, ran_well);
                is_kept = !tick.is_lost();
                assert!(!is_kept || matches!(others, Ok(RunDue::Later(_))));
            }
            Ok::<_, Error>(())
        });
        if is_kept && ran.is_ok() {
            return;
        }
    }
    panic!("the lease of every round was lost");
}

/// The tick is free when the lease expires. If no other run has taken it when the work returns, the
/// end of this run is stored.
#[test]
fn a_run_that_ignores_its_time_limit_holds_the_tick_until_the_lease_expires() {
    let database = installed();
    let pool = pool(&database, 4);
    let admin = &mut database.connect();
    let limit = Duration::from_secs(4);
    let schedule = REPORT.clone().after_crash(limit, 3).longest(limit);
    let stored = "(SELECT state = 'crashed' AND error LIKE '%longer than 4s' FROM resource_control.schedule_state)";
    // On a slow machine the lease may be lost before the run is too long, so rounds are repeated.
    once_at_least("the reason is stored, and then the end", || {
        run(admin, "DELETE FROM resource_control.schedule");
        due(&REPORT, &pool, 1);
        let (began, mut is_stored) = (Instant::now(), false);
        let ran = schedule.run_due(&pool, hourly, |_| {
            while !is_stored && began.elapsed() < 3 * limit {
                is_stored = truth(admin, stored);
            }
            Ok::<_, Error>(())
        });
        // A reply to the end may come too late, too.
        let is_done =
            "(SELECT state = 'done' AND error IS NULL FROM resource_control.schedule_state)";
        is_stored && matches!(ran, Ok(RunDue::Ran)) && truth(admin, is_done)
    });
}

#[test]
fn instances_share_the_ticks_and_each_runs_once() {
    let database = installed();
    let stop = Stop::new();
    let (running, ran) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let schedule = REPORT.clone().catch_up(CatchUp::All(1000));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (pool, schedule) = (pool(&database, 2), &schedule);
            let (stop, running, ran) = (&stop, &running, &ran);
            scope.spawn(move || {
                let work = |tick: &Tick| {
                    assert_eq!(
                        running.fetch_add(1, Ordering::SeqCst),
                        0,
                        "two runs at a time"
                    );
                    ran.lock().unwrap().push((
                        tick.at(),
                        tick.fencing_token(),
                        tick.attempt(),
                        tick.missed(),
                    ));
                    running.fetch_sub(1, Ordering::SeqCst);
                    Ok::<_, Error>(())
                };
                schedule
                    .run(&pool, stop, every(Duration::from_millis(50)), work)
                    .unwrap();
            });
        }
        eventually("thirty ticks have run", || ran.lock().unwrap().len() >= 30);
        stop.stop();
    });
    let ran = ran.into_inner().unwrap();
    let step = TimeDelta::milliseconds(50);
    for two in ran.windows(2) {
        assert!(
            two[1].0 == two[0].0 + step && two[1].1 > two[0].1,
            "{two:?}"
        );
    }
    assert!(
        ran.iter()
            .all(|(_, _, attempt, missed)| (*attempt, *missed) == (1, 0))
    );
}

#[test]
fn a_stop_lets_the_run_end_and_a_schedule_may_have_no_more_ticks() {
    let database = installed();
    let pool = pool(&database, 4);
    due(&REPORT, &pool, 1);
    let (stop, mut runs) = (Stop::new(), 0);
    REPORT
        .run(&pool, &stop, hourly, |_| {
            stop.stop();
            runs += 1;
            Ok::<_, Error>(())
        })
        .unwrap();
    assert_eq!(runs, 1);
    let ended = "(SELECT count(ended_at) FROM resource_control.schedule)";
    assert_eq!(number(&mut database.connect(), ended), 1);
    assert_eq!(
        REPORT.run_due(&pool, |_| None, ran_well).unwrap(),
        RunDue::Never
    );
    REPORT.run(&pool, &Stop::new(), |_| None, ran_well).unwrap();
}

#[test]
fn permanent_errors_end_the_loop_and_an_exhausted_pool_does_not() {
    let (empty, database) = (workbench::Database::new(), installed());
    let schema = REPORT.run(&pool(&empty, 2), &Stop::new(), hourly, ran_well);
    assert_matches!(schema, Err(Error::NotInstalled));
    let pool = impatient_pool(&database, Duration::from_millis(100));
    due(&REPORT, &pool, 1);
    for bad in [
        Schedule::named(""),
        Schedule::named("").key(7),
        Schedule::named("a\0b"),
        Schedule::named("x".repeat(1001).leak()),
        REPORT.key("\0"),
        REPORT.details("\0"),
        Schedule::named("x").after_crash(Duration::from_millis(299), 3),
        Schedule::named("x").after_crash(Duration::MAX, 3),
        REPORT.clone().after_crash(HOUR, 0),
    ] {
        assert_matches!(
            bad.run(&pool, &Stop::new(), hourly, ran_well),
            Err(Error::Input(_))
        );
    }
    // An expression whose ticks do not advance.
    let not_at_all = every(Duration::from_nanos(999));
    for ran in [
        REPORT.run(&pool, &Stop::new(), Some, ran_well),
        REPORT.run(&pool, &Stop::new(), not_at_all, ran_well),
    ] {
        assert_matches!(ran, Err(Error::Input(_)));
    }

    let stop = Stop::new();
    std::thread::scope(|scope| {
        let only = pool.get().unwrap();
        let runs = scope.spawn(|| {
            REPORT.run(&pool, &stop, hourly, |_| {
                stop.stop();
                Ok::<_, Error>(())
            })
        });
        let began = Instant::now();
        eventually("the pool was empty", || {
            began.elapsed() > Duration::from_millis(300)
        });
        assert!(!runs.is_finished());
        drop(only);
        runs.join().unwrap().unwrap();
    });
}

#[test]
fn a_stricter_default_isolation_level_changes_nothing() {
    let database = installed();
    let alter = "SET default_transaction_isolation = 'serializable'";
    run(
        &mut database.connect(),
        &format!("ALTER DATABASE {} {alter}", database.name()),
    );
    let pool = pool(&database, 4);
    due(&REPORT, &pool, 3);
    let runs = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let work = |_: &Tick| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    Ok::<_, Error>(())
                };
                assert_matches!(REPORT.run_due(&pool, hourly, work), Ok(_));
            });
        }
    });
    assert_eq!(runs.into_inner(), 1);
}

#[test]
fn a_function_of_the_clocks_name_in_the_search_path_is_not_used() {
    let database = installed();
    let own = format!(
        "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$ SELECT '2001-01-01'::timestamptz $$;
         ALTER DATABASE {} SET search_path = public, pg_catalog",
        database.name()
    );
    run(&mut database.connect(), &own);
    let pool = pool(&database, 1);
    let often = || every(Duration::from_micros(1));
    let look = || {
        REPORT.run_due(&pool, often(), |tick| {
            assert!(tick.at() > Utc::now() - HOUR);
            Ok::<_, Error>(())
        })
    };
    assert_matches!(look(), Ok(RunDue::Later(_)));
    assert_matches!(look(), Ok(RunDue::Ran));
}

/// Work that has noticed the loss has stopped early, so its result does not count as the end of the
/// tick.
#[test]
fn a_run_that_has_noticed_its_loss_stores_no_end_and_its_tick_runs_again() {
    type Notice = fn(&Tick);
    let ways_to_notice: [Notice; 3] = [
        |tick| eventually("the lease is lost", || tick.is_lost()),
        |tick| assert!(tick.wait_for_loss(Duration::MAX)),
        |tick| while !tick.wait_for_loss(Duration::from_millis(10)) {},
    ];
    let database = installed();
    let pool = pool(&database, 4);
    let admin = &mut database.connect();
    for (index, notice) in ways_to_notice.into_iter().enumerate() {
        for outcome in [Ok(()), Err("stopped")] {
            let schedule = REPORT.key(index).key(outcome.is_ok());
            run(admin, "DELETE FROM resource_control.schedule");
            due(&schedule, &pool, 1);
            let lost = run_briefly(&schedule, &pool, |tick| {
                run(admin, EXPIRE);
                notice(tick);
                outcome
            });
            assert_matches!(lost, Err(Error::PermitLost(_)));
            let has_no_end = "(SELECT ended_at IS NULL AND error IS NULL AND expires_at <= clock_timestamp() FROM resource_control.schedule)";
            assert!(truth(admin, has_no_end));
            let again = schedule.run_due(&pool, hourly, |tick| {
                assert_eq!(tick.attempt(), 2);
                Ok::<_, Error>(())
            });
            assert_eq!(again.unwrap(), RunDue::Ran);
        }
    }
}

#[test]
fn a_loop_runs_a_tick_again_whose_loss_was_noticed() {
    let database = installed();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = make_pool(&proxy.url(), 4, Duration::from_secs(20));
    due(&REPORT, &pool, 1);
    let (stop, mut ticks) = (Stop::new(), Vec::new());
    REPORT
        .clone()
        // On a slow machine the lease may be lost before the work begins.
        .after_crash(BRIEF, 1000)
        .run(&pool, &stop, hourly, |tick| {
            ticks.push((tick.at(), tick.attempt()));
            if ticks.len() == 1 {
                // The loss is noticed by the clock of the process, without the database.
                proxy.cut();
                assert!(tick.wait_for_loss(Duration::MAX));
                proxy.sever();
                proxy.restore();
            } else {
                stop.stop();
            }
            Ok::<_, Error>(())
        })
        .unwrap();
    let [(first, before), (again, after)] = ticks[..] else {
        panic!("{ticks:?}")
    };
    assert!(first == again && before < after, "{ticks:?}");
}

/// The schedule allows one attempt, so the tick would be lost if the claim counted as one.
#[test]
fn in_a_loop_a_claim_whose_reply_is_lost_is_not_an_attempt() {
    let database = installed();
    std::thread::scope(|scope| {
        for n in 1..=9 {
            let database = &database;
            scope.spawn(move || {
                let proxy = RoundTrips::in_front_of(database);
                let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
                let schedule = Schedule::named("cut").after_crash(HOUR, 1).key(n);
                due(&schedule, &pool, 1);
                let (stop, mut runs) = (Stop::new(), 0);
                proxy.sever_at(n, When::BeforeReply);
                schedule
                    .run(&pool, &stop, hourly, |tick| {
                        assert_eq!(tick.attempt(), 1);
                        runs += 1;
                        stop.stop();
                        Ok::<_, Error>(())
                    })
                    .unwrap();
                assert_eq!(runs, 1);
            });
        }
    });
    let done = "(SELECT bool_and(attempt = 1 AND expires_at IS NULL AND error IS NULL) FROM resource_control.schedule)";
    assert!(truth(&mut database.connect(), done));
}

#[test]
fn a_stop_ends_the_loop_though_the_pool_is_empty() {
    let database = installed();
    // Longer than a test waits.
    let pool = make_pool(&database.url(), 1, Duration::from_secs(600));
    due(&REPORT, &pool, 1);
    let (stop, conn) = (Stop::new(), pool.get().unwrap());
    std::thread::scope(|scope| {
        let runs = scope.spawn(|| REPORT.run(&pool, &stop, hourly, ran_well));
        let began = Instant::now();
        eventually("the loop has waited for the pool", || {
            began.elapsed() > Duration::from_millis(300)
        });
        assert!(!runs.is_finished());
        stop.stop();
        eventually("the loop has ended", || runs.is_finished());
        runs.join().unwrap().unwrap();
    });
    drop(conn);
    assert_eq!(
        number(
            &mut database.connect(),
            "(SELECT sum(attempt) FROM resource_control.schedule)"
        ),
        0
    );
}
