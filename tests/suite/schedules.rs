//! Schedules: which attempt a run is, what a pause stops, and what a schedule keeps.
#![cfg(feature = "testing")] // whose leases may be short

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::PgConnection;
use diesel::prelude::*;
use diesel_interlock::testing::make_tick_due;
use workbench::{RoundTrips, When};

use crate::assert_matches;
use crate::half::schedule::{CatchUp, RunDue};
use crate::half::*;
use crate::support::{LEASE, eventually, hourly, installed, number, run, text, truth};

const HOUR: Duration = Duration::from_secs(3600);
static REPORT: Schedule = Schedule::named("report").after_crash(HOUR, 3);
const STATE: &str = "(SELECT state FROM resource_control.schedule_state)";

/// Sees the schedule for the first time, and lets hours pass.
#[track_caller]
fn due(schedule: &Schedule, pool: &PgPool, hours: u32) {
    assert_eq!(looked(schedule, pool), RunDue::Later(Duration::ZERO));
    assert_matches!(looked(schedule, pool), RunDue::Later(_));
    assert!(wait(make_tick_due(schedule, pool, HOUR * hours)).unwrap());
}

/// Looks, and runs what is due as the first attempt.
#[track_caller]
fn looked(schedule: &Schedule, pool: &PgPool) -> RunDue {
    wait(schedule.run_due(
        pool,
        hourly,
        work!(|tick| {
            assert_eq!(tick.attempt(), 1);
            Ok::<_, Error>(())
        }),
    ))
    .unwrap()
}

fn panics() -> Result<()> {
    panic!("it dies")
}

fn crash(schedule: &Schedule, pool: &PgPool, conn: &mut PgConnection) {
    let died = catch_unwind(AssertUnwindSafe(|| {
        wait(schedule.run_due(pool, hourly, work!(|_tick| panics())))
    }));
    assert!(died.is_err());
    eventually("a panic gives it to others", || {
        text(conn, STATE) == "crashed"
    });
}

/// Looks until the tick has run, which it does once and as the first attempt.
#[track_caller]
fn runs_once(schedule: &Schedule, pool: &PgPool, runs: &AtomicU64) {
    eventually("it has run", || {
        let look = wait(schedule.run_due(
            pool,
            hourly,
            work!(|tick| {
                assert_eq!(tick.attempt(), 1);
                runs.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Error>(())
            }),
        ));
        // Its end may have been stored before.
        look.is_ok_and(|_| runs.load(Ordering::SeqCst) > 0)
    });
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// Whether a run that has begun holds the tick.
fn is_held(conn: &mut PgConnection, name: &str) -> bool {
    let held = format!(
        "(SELECT attempt = 1 AND expires_at > clock_timestamp() FROM resource_control.schedule WHERE name = '{name}')"
    );
    truth(conn, &format!("COALESCE({held}, false)"))
}

/// At most one run is allowed, so a claim that counts as an attempt loses the tick.
#[test]
fn a_claim_whose_reply_is_lost_is_no_attempt_if_its_process_looks_again() {
    let database = installed();
    let look = &mut database.connect();
    let proxy = RoundTrips::in_front_of(&database);
    let (mut orphans, mut has_happened) = (Vec::new(), true);
    let mut n = 0;
    while has_happened {
        n += 1;
        let schedule = Schedule::named("cut").after_crash(HOUR, 1).key(n);
        let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
        due(&schedule, &pool, 1);
        let (fault, runs) = (proxy.sever_at(n, When::BeforeReply), AtomicU64::new(0));
        let first = wait(schedule.run_due(
            &pool,
            hourly,
            work!(|_tick| {
                runs.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Error>(())
            }),
        ));
        let name = format!("cut {n}");
        if first.is_err() && is_held(look, &name) {
            assert_eq!(runs.load(Ordering::SeqCst), 0);
            orphans.push(n);
        }
        runs_once(&schedule, &pool, &runs);
        has_happened = fault.has_happened();
        proxy.disarm();
    }
    assert_eq!(orphans.len(), 1, "{orphans:?}");
    let done = "(SELECT bool_and(attempt = 1 AND expires_at IS NULL AND error IS NULL) FROM resource_control.schedule)";
    assert!(truth(look, done));

    // The reply to any round trip of the next look is lost, too: it gives back once.
    let (orphan, last) = (orphans[0], n);
    for n in 1..=last {
        let schedule = Schedule::named("cut twice").after_crash(HOUR, 1).key(n);
        let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
        due(&schedule, &pool, 1);
        let runs = AtomicU64::new(0);
        let first = proxy.sever_at(orphan, When::BeforeReply);
        let look_of_orphan = wait(schedule.run_due(&pool, hourly, work!(|_tick| panics())));
        assert!(look_of_orphan.is_err() && first.has_happened());
        proxy.sever_at(n, When::BeforeReply);
        runs_once(&schedule, &pool, &runs);
        proxy.disarm();
    }
    assert!(truth(look, done));
}

#[test]
fn a_tick_that_crashed_longer_ago_than_its_grace_is_not_run_again() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    due(&REPORT, &pool, 1);
    // There is no tick but this one.
    crash(&REPORT, &pool, look);
    let only = |_: DateTime<Utc>| None;
    let age = number(
        look,
        "(SELECT ceil(date_part('epoch', clock_timestamp() - tick)) FROM resource_control.schedule)",
    );
    let age = Duration::from_secs(age.try_into().unwrap());
    let attempts = AtomicU64::new(0);
    for (grace, expected) in [
        (Duration::from_micros(1), RunDue::Never),
        (age + HOUR, RunDue::Ran),
        (age + HOUR, RunDue::Never),
    ] {
        let schedule = REPORT.clone().catch_up(CatchUp::Skip(grace));
        let ran = wait(schedule.run_due(
            &pool,
            only,
            work!(|tick| {
                attempts.store(tick.attempt() as u64, Ordering::SeqCst);
                Ok::<_, Error>(())
            }),
        ));
        assert_eq!(ran.unwrap(), expected);
    }
    assert_eq!(attempts.into_inner(), 2);
}

#[test]
fn a_deleted_row_does_not_restart_the_tokens_of_a_schedule() {
    let database = installed();
    let pool = pool(&database, 2);
    let conn = &mut database.connect();
    let passes = |schedule: &Schedule| {
        due(schedule, &pool, 1);
        let token = AtomicU64::new(0);
        let ran = wait(schedule.run_due(
            &pool,
            hourly,
            work!(|tick| {
                token.store(tick.fencing_token() as u64, Ordering::SeqCst);
                Ok::<_, Error>(())
            }),
        ));
        assert_eq!(ran.unwrap(), RunDue::Ran);
        token.into_inner()
    };
    let mut last = 0;
    for _ in 0..3 {
        let token = passes(&REPORT);
        assert!(token > last);
        last = token;
        run(
            conn,
            &format!("SELECT resource_control.pass_fence('reports', {token})"),
        );
        run(conn, "DELETE FROM resource_control.schedule");
    }
}

#[test]
fn an_error_that_says_nothing_is_stored_as_failed() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    for error in ["", "\0"] {
        let schedule = REPORT.key(error.len());
        due(&schedule, &pool, 1);
        let ran = wait(schedule.run_due(&pool, hourly, work!(|_tick| Err::<(), _>(error))));
        assert_eq!(ran.unwrap(), RunDue::Ran);
        let failed = "(SELECT bool_and(state = 'failed' AND error > '') FROM resource_control.schedule_state)";
        assert!(truth(look, failed));
        assert_matches!(looked(&schedule, &pool), RunDue::Later(_));
    }
}

#[test]
fn a_schedule_that_never_ran_can_be_paused() {
    let database = installed();
    let pool = pool(&database, 2);
    let look = &mut database.connect();
    assert!(!wait(REPORT.resume(&pool)).unwrap());
    assert!(wait(REPORT.pause(&pool)).unwrap());
    assert!(!wait(REPORT.pause(&pool)).unwrap());
    assert!(truth(
        look,
        "(SELECT state = 'new' AND paused_at <= clock_timestamp() FROM resource_control.schedule_state)"
    ));
    assert_eq!(looked(&REPORT, &pool), RunDue::Paused);
    assert!(wait(make_tick_due(&REPORT, &pool, 3 * HOUR)).unwrap());
    assert_eq!(looked(&REPORT, &pool), RunDue::Paused);
    // Others are not.
    assert_eq!(looked(&REPORT.key(7), &pool), RunDue::Later(Duration::ZERO));
    assert!(wait(REPORT.resume(&pool)).unwrap());
    assert!(!wait(REPORT.resume(&pool)).unwrap());
    assert_eq!(looked(&REPORT, &pool), RunDue::Ran);
    assert!(truth(
        look,
        "(SELECT bool_and(paused_at IS NULL) FROM resource_control.schedule_state)"
    ));
    assert_matches!(wait(Schedule::named("").pause(&pool)), Err(Error::Input(_)));
}

#[test]
fn a_run_that_has_begun_ends_though_its_schedule_is_paused() {
    let database = installed();
    let pool = pool(&database, 3);
    let look = &mut database.connect();
    due(&REPORT, &pool, 1);
    // A run that renews itself meanwhile.
    let schedule = REPORT.clone().after_crash(LEASE, 3);
    let expiry = "(SELECT date_part('epoch', expires_at) * 1000000 FROM resource_control.schedule)";
    let ran = wait(schedule.run_due(
        &pool,
        hourly,
        work!(|tick| {
            assert!(reply!(REPORT.pause(&pool))?);
            let before = number(look, expiry);
            eventually("it was renewed", || number(look, expiry) > before);
            assert!(!tick.is_lost());
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!(ran.unwrap(), RunDue::Ran);
    assert!(truth(
        look,
        "(SELECT state = 'done' AND paused_at < ended_at FROM resource_control.schedule_state)"
    ));
    assert_eq!(looked(&schedule, &pool), RunDue::Paused);
}

#[test]
fn a_paused_schedule_takes_no_tick_also_of_a_run_that_has_crashed() {
    let database = installed();
    let look = &mut database.connect();
    {
        let pool = pool(&database, 2);
        due(&REPORT, &pool, 1);
        crash(&REPORT, &pool, look);
        assert!(wait(REPORT.pause(&pool)).unwrap());
        assert_eq!(looked(&REPORT, &pool), RunDue::Paused);
    }
    // Also for those who come later.
    let (later, pool) = (REPORT.clone(), pool(&database, 2));
    assert_eq!(looked(&later, &pool), RunDue::Paused);
    assert_eq!(text(look, STATE), "crashed");
    assert!(wait(later.resume(&pool)).unwrap());
    let attempt = AtomicU64::new(0);
    let ran = wait(later.run_due(
        &pool,
        hourly,
        work!(|tick| {
            attempt.store(tick.attempt() as u64, Ordering::SeqCst);
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!((ran.unwrap(), attempt.into_inner()), (RunDue::Ran, 2));
}

/// Between the look and the claim.
#[test]
fn a_claim_of_a_schedule_that_was_paused_meanwhile_takes_nothing() {
    let database = installed();
    let pool = pool(&database, 3);
    due(&REPORT, &pool, 1);
    let other = std::sync::Mutex::new(database.connect());
    let next = |after| {
        run(
            &mut other.lock().unwrap(),
            "UPDATE resource_control.schedule SET paused_at = COALESCE(paused_at, clock_timestamp())",
        );
        hourly(after)
    };
    let ran = wait(REPORT.run_due(&pool, next, work!(|_tick| panics())));
    assert_matches!(ran, Ok(RunDue::Later(_)));
    assert_eq!(looked(&REPORT, &pool), RunDue::Paused);
}

#[test]
fn what_was_missed_in_a_pause_is_caught_up_with_as_the_schedule_says() {
    let database = installed();
    let pool = pool(&database, 2);
    for (index, (catch_up, expected)) in [
        (CatchUp::Latest, vec![4]),
        (CatchUp::Skip(Duration::from_micros(1)), vec![]),
        (CatchUp::All(3), vec![2, 0, 0]),
    ]
    .into_iter()
    .enumerate()
    {
        let schedule = REPORT.key(index).catch_up(catch_up);
        due(&schedule, &pool, 0);
        assert!(wait(schedule.pause(&pool)).unwrap());
        assert!(wait(make_tick_due(&schedule, &pool, 5 * HOUR)).unwrap());
        assert_eq!(looked(&schedule, &pool), RunDue::Paused);
        assert!(wait(schedule.resume(&pool)).unwrap());
        let missed = std::sync::Mutex::new(Vec::new());
        let mut look = RunDue::Ran;
        while look == RunDue::Ran {
            look = wait(schedule.run_due(
                &pool,
                hourly,
                work!(|tick| {
                    missed.lock().unwrap().push(tick.missed());
                    Ok::<_, Error>(())
                }),
            ))
            .unwrap();
        }
        assert_eq!(missed.into_inner().unwrap(), expected, "{catch_up:?}");
    }
}

#[test]
fn the_model_of_the_view_tells_since_when_a_schedule_is_paused() {
    use crate::half::monitor::ScheduleState;
    let database = installed();
    let pool = pool(&database, 2);
    let conn = &mut database.connect();
    wait(REPORT.pause(&pool)).unwrap();
    let [state] = &ScheduleState::all().load(conn).unwrap()[..] else {
        panic!("there is one")
    };
    assert!(state.paused_at.is_some());
    wait(REPORT.resume(&pool)).unwrap();
    let [state] = &ScheduleState::all().load(conn).unwrap()[..] else {
        panic!("there is one")
    };
    assert!(state.paused_at.is_none());
}
