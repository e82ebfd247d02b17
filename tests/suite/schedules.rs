//! Schedules in both halves: attempts and retries, pauses, triggers, and what the row of a schedule
//! stores.
#![cfg(feature = "testing")] // whose leases may be short

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::PgConnection;
use diesel::prelude::*;
use diesel_interlock::testing::make_tick_due;
use workbench::{Database, RoundTrips, When};

use crate::assert_matches;
use crate::half::schedule::{CatchUp, RunDue};
use crate::half::*;
use crate::support::{LEASE, Observer, eventually, hourly, installed, number, run, text, truth};

const HOUR: Duration = Duration::from_secs(3600);
static REPORT: Schedule = Schedule::named("report").after_crash(HOUR, 3);
/// Lets the lease of the run expire, or the pause before its retry.
const EXPIRE: &str = "UPDATE resource_control.schedule SET expires_at = clock_timestamp() WHERE expires_at IS NOT NULL";
const STATE: &str = "(SELECT state FROM resource_control.schedule_state)";

/// Registers the schedule by a first look, and makes ticks of so many hours due.
#[track_caller]
fn due(schedule: &Schedule, pool: &PgPool, hours: u32) {
    assert_matches!(look(schedule, pool), RunDue::Later(_));
    assert!(wait(make_tick_due(schedule, pool, HOUR * hours)).unwrap());
}

/// Looks once, and runs a due tick, which must be its first attempt.
#[track_caller]
fn look(schedule: &Schedule, pool: &PgPool) -> RunDue {
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
    panic!("the work crashes")
}

fn crash(schedule: &Schedule, pool: &PgPool, conn: &mut PgConnection) {
    let died = catch_unwind(AssertUnwindSafe(|| {
        wait(schedule.run_due(pool, hourly, work!(|_tick| panics())))
    }));
    assert!(died.is_err());
    eventually("the crash is stored", || text(conn, STATE) == "crashed");
    // The tick is not free before the lease has expired.
    assert_matches!(look(schedule, pool), RunDue::Later(_));
    run(conn, EXPIRE);
}

/// Only a loop keeps the random number of its claim. After a single look the tick waits until the
/// lease has expired. Another database has a schedule of the same name, which is not concerned.
#[test]
fn a_claim_of_a_single_look_whose_reply_is_lost_counts_as_an_attempt_and_runs_again() {
    let [database, other] = [installed(), installed()];
    let admin = &mut database.connect();
    let other_pool = pool(&other, 2);
    let proxy = RoundTrips::in_front_of(&database);
    let (mut orphans, mut n, mut has_happened) = (0, 0, true);
    while has_happened {
        n += 1;
        let schedule = REPORT.key(n);
        let pool = make_pool(&proxy.url(), 2, Duration::from_secs(20));
        for pool in [&pool, &other_pool] {
            due(&schedule, pool, 1);
        }
        let (fault, attempts) = (proxy.sever_at(n, When::BeforeReply), AtomicU64::new(0));
        let run_it = || {
            wait(schedule.run_due(
                &pool,
                hourly,
                work!(|tick| {
                    attempts.fetch_add(1 << (16 * (tick.attempt() - 1)), Ordering::SeqCst);
                    Ok::<_, Error>(())
                }),
            ))
        };
        let first = run_it();
        has_happened = fault.has_happened();
        proxy.disarm();
        let held = format!(
            "COALESCE((SELECT expires_at > clock_timestamp() FROM resource_control.schedule WHERE name = 'report {n}'), false)"
        );
        if first.is_err() && truth(admin, &held) {
            orphans += 1;
            assert_eq!(attempts.load(Ordering::SeqCst), 0);
            assert_matches!(run_it(), Ok(RunDue::Later(_)));
            run(admin, EXPIRE);
            assert_eq!(run_it().unwrap(), RunDue::Ran);
            assert_eq!(attempts.into_inner(), 1 << 16);
        } else {
            eventually("the tick has run", || {
                run_it().is_ok_and(|_| attempts.load(Ordering::SeqCst) > 0)
            });
            assert_eq!(attempts.into_inner(), 1);
        }
        assert_eq!(look(&schedule, &other_pool), RunDue::Ran);
    }
    assert_eq!(orphans, 1);
}

#[test]
fn a_tick_that_crashed_longer_ago_than_its_grace_is_not_run_again() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    due(&REPORT, &pool, 1);
    // This is the only tick: a later one would replace it.
    crash(&REPORT, &pool, admin);
    let only = |_: DateTime<Utc>| None;
    let age = number(
        admin,
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
fn deleting_the_row_does_not_restart_the_tokens_of_a_schedule() {
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
fn an_error_without_a_text_is_stored_as_failed() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    for error in ["", "\0"] {
        let schedule = REPORT.key(error.len());
        due(&schedule, &pool, 1);
        let ran = wait(schedule.run_due(&pool, hourly, work!(|_tick| Err::<(), _>(error))));
        assert_eq!(ran.unwrap(), RunDue::Ran);
        let failed = "(SELECT bool_and(state = 'failed' AND error > '') FROM resource_control.schedule_state)";
        assert!(truth(admin, failed));
        assert_matches!(look(&schedule, &pool), RunDue::Later(_));
    }
}

#[test]
fn a_schedule_that_never_ran_can_be_paused() {
    let database = installed();
    let pool = pool(&database, 2);
    let admin = &mut database.connect();
    assert!(!wait(REPORT.resume(&pool)).unwrap());
    assert!(wait(REPORT.pause(&pool)).unwrap());
    assert!(!wait(REPORT.pause(&pool)).unwrap());
    assert!(truth(
        admin,
        "(SELECT state = 'new' AND paused_at <= clock_timestamp() FROM resource_control.schedule_state)"
    ));
    assert_eq!(look(&REPORT, &pool), RunDue::Paused);
    assert!(wait(make_tick_due(&REPORT, &pool, 3 * HOUR)).unwrap());
    assert_eq!(look(&REPORT, &pool), RunDue::Paused);
    // A schedule with another key is not paused.
    assert_matches!(look(&REPORT.key(7), &pool), RunDue::Later(_));
    assert!(wait(REPORT.resume(&pool)).unwrap());
    assert!(!wait(REPORT.resume(&pool)).unwrap());
    assert_eq!(look(&REPORT, &pool), RunDue::Ran);
    assert!(truth(
        admin,
        "(SELECT bool_and(paused_at IS NULL) FROM resource_control.schedule_state)"
    ));
    assert_matches!(wait(Schedule::named("").pause(&pool)), Err(Error::Input(_)));
}

#[test]
fn a_run_that_has_begun_ends_though_its_schedule_is_paused() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    due(&REPORT, &pool, 1);
    // The run is renewed during the pause.
    let schedule = REPORT.clone().after_crash(LEASE, 3);
    let expiry = "(SELECT date_part('epoch', expires_at) * 1000000 FROM resource_control.schedule)";
    let ran = wait(schedule.run_due(
        &pool,
        hourly,
        work!(|tick| {
            assert!(reply!(REPORT.pause(&pool))?);
            let before = number(admin, expiry);
            eventually("the run was renewed", || number(admin, expiry) > before);
            assert!(!tick.is_lost());
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!(ran.unwrap(), RunDue::Ran);
    assert!(truth(
        admin,
        "(SELECT state = 'done' AND paused_at < ended_at FROM resource_control.schedule_state)"
    ));
    assert_eq!(look(&schedule, &pool), RunDue::Paused);
}

#[test]
fn a_paused_schedule_does_not_take_the_tick_of_a_crashed_run() {
    let database = installed();
    let admin = &mut database.connect();
    {
        let pool = pool(&database, 2);
        due(&REPORT, &pool, 1);
        crash(&REPORT, &pool, admin);
        assert!(wait(REPORT.pause(&pool)).unwrap());
        assert_eq!(look(&REPORT, &pool), RunDue::Paused);
    }
    // An instance that starts later takes no tick, too.
    let (later, pool) = (REPORT.clone(), pool(&database, 2));
    assert_eq!(look(&later, &pool), RunDue::Paused);
    assert_eq!(text(admin, STATE), "crashed");
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

/// Nothing renews the lease of a run that has panicked.
#[test]
fn a_tick_whose_run_has_panicked_runs_again_when_its_lease_has_ended() {
    let database = installed();
    let (pool, conn) = (pool(&database, 2), &mut database.connect());
    let schedule = REPORT.clone().after_crash(Duration::from_millis(300), 1000);
    due(&REPORT, &pool, 1);
    // On a slow machine the lease may end before the work begins.
    eventually("the work panics", || {
        let ran = || wait(schedule.run_due(&pool, hourly, work!(|_tick| panics())));
        catch_unwind(AssertUnwindSafe(ran)).is_err()
    });
    eventually("the tick runs again", || {
        let again = wait(schedule.run_due(&pool, hourly, work!(|_tick| Ok::<_, Error>(()))));
        matches!(again, Ok(RunDue::Ran))
    });
    assert!(number(conn, "(SELECT attempt FROM resource_control.schedule)") > 1);
}

/// The work locks the table, so that each statement that stores the end of the run fails.
#[test]
fn an_end_that_cannot_be_stored_at_first_is_stored_later() {
    let database = installed();
    let url = database.url_with("options", "-c lock_timeout=20ms");
    let pool = make_pool(&url, 2, Duration::from_secs(20));
    due(&REPORT, &pool, 1);
    let mut observer = Observer::of(&database);
    std::thread::scope(|scope| {
        // A failure drops it, which unlocks the table.
        let other = std::sync::Arc::new(std::sync::Mutex::new(database.connect()));
        let locking = other.clone();
        let (pool, lock) = (&pool, "BEGIN; LOCK TABLE resource_control.schedule");
        let running = scope.spawn(move || {
            wait(REPORT.run_due(
                pool,
                hourly,
                work!(|_tick| {
                    run(&mut locking.lock().unwrap(), lock);
                    Ok::<_, Error>(())
                }),
            ))
        });
        eventually("the end waits for the lock", || observer.all_waiting() == 1);
        eventually("the end has failed", || observer.all_waiting() == 0);
        run(&mut other.lock().unwrap(), "ROLLBACK");
        assert_matches!(running.join().unwrap(), Ok(RunDue::Ran));
    });
    assert_eq!(text(observer.conn(), STATE), "done");
}

/// Looks at a schedule of which a tick is due, with work that must not run. Changes the row between
/// the look and the claim.
fn claim_after(change: &str, pool: &PgPool, database: &Database) -> Result<RunDue> {
    due(&REPORT, pool, 1);
    let other = std::sync::Mutex::new(database.connect());
    let next = |after| {
        let change = format!("UPDATE resource_control.schedule SET {change}");
        run(&mut other.lock().unwrap(), &change);
        hourly(after)
    };
    wait(REPORT.run_due(pool, next, work!(|_tick| panics())))
}

#[test]
fn a_claim_of_a_schedule_that_was_paused_meanwhile_takes_nothing() {
    let database = installed();
    let pool = pool(&database, 3);
    let pause = "paused_at = COALESCE(paused_at, clock_timestamp())";
    assert_matches!(claim_after(pause, &pool, &database), Ok(RunDue::Later(_)));
    assert_eq!(look(&REPORT, &pool), RunDue::Paused);
}

/// A version with another expression has put the tick off.
#[test]
fn a_claim_of_a_tick_that_was_put_off_meanwhile_takes_nothing() {
    let database = installed();
    let pool = pool(&database, 3);
    let put_off = "next_at = counted_from + interval '1 day'";
    assert_matches!(claim_after(put_off, &pool, &database), Ok(RunDue::Later(_)));
    let is_put_off =
        "(SELECT tick IS NULL AND next_at > clock_timestamp() FROM resource_control.schedule)";
    assert!(truth(&mut database.connect(), is_put_off));
}

#[test]
fn ticks_missed_in_a_pause_are_caught_up_with_as_the_schedule_says() {
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
        assert_eq!(look(&schedule, &pool), RunDue::Paused);
        assert!(wait(schedule.resume(&pool)).unwrap());
        let missed = std::sync::Mutex::new(Vec::new());
        let mut admin = RunDue::Ran;
        while admin == RunDue::Ran {
            admin = wait(schedule.run_due(
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
fn a_loop_that_has_found_its_schedule_paused_runs_it_after_a_resume() {
    let database = installed();
    let pool = pool(&database, 2);
    let (has_looked, has_run) = (AtomicU64::new(0), AtomicU64::new(0));
    let next = |after| {
        has_looked.store(1, Ordering::SeqCst);
        Some(after + TimeDelta::milliseconds(1))
    };
    let work = |_attempt| {
        has_run.store(1, Ordering::SeqCst);
        false
    };
    assert!(wait(REPORT.pause(&pool)).unwrap());
    while_it_runs(&REPORT, &pool, &next, &work, || {
        // The look has read the row before.
        eventually("the loop has looked", || {
            has_looked.load(Ordering::SeqCst) > 0
        });
        assert!(wait(REPORT.resume(&pool)).unwrap());
        eventually("a tick has run", || has_run.load(Ordering::SeqCst) > 0);
    });
}

#[test]
fn the_model_of_the_view_has_the_time_since_when_a_schedule_is_paused() {
    use crate::half::monitor::ScheduleState;
    let database = installed();
    let pool = pool(&database, 2);
    let conn = &mut database.connect();
    wait(REPORT.pause(&pool)).unwrap();
    let [state] = &ScheduleState::all().load(conn).unwrap()[..] else {
        panic!("not one schedule")
    };
    assert!(state.paused_at.is_some());
    wait(REPORT.resume(&pool)).unwrap();
    let [state] = &ScheduleState::all().load(conn).unwrap()[..] else {
        panic!("not one schedule")
    };
    assert!(state.paused_at.is_none());
}

/// The columns of the only row.
fn row(conn: &mut PgConnection, columns: &str) -> String {
    text(
        conn,
        &format!("(SELECT concat_ws(' ', {columns}) FROM resource_control.schedule)"),
    )
}

const PLAN: &str = "counted_from, next_at";

/// Ticks so many minutes after those of `hourly`.
fn shifted(minutes: i64) -> impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Copy + Send + Sync {
    let apart = TimeDelta::minutes(minutes);
    move |after| Some(hourly(after - apart)? + apart)
}

/// Ticks once a day, so many hours after a tick of `hourly`.
fn daily(hours: i64) -> impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Copy + Send + Sync {
    let first = hourly(Utc::now()).unwrap() + TimeDelta::hours(hours - 1);
    move |after| {
        let days = (after - first).num_seconds().div_euclid(86400);
        Some(first + TimeDelta::days(days + 1))
    }
}

/// Looks once with another expression for the ticks, and runs a due tick.
#[track_caller]
fn look_with(
    schedule: &Schedule,
    pool: &PgPool,
    next: impl Fn(DateTime<Utc>) -> Option<DateTime<Utc>> + Send + Sync,
) -> RunDue {
    wait(schedule.run_due(pool, next, work!(|_tick| Ok::<_, Error>(())))).unwrap()
}

#[test]
fn registrations_and_claims_store_the_next_tick_and_the_end_of_a_run_does_not() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    let next = hourly(Utc::now()).unwrap();
    let is_next = |conn: &mut PgConnection, from: &str, hours: i64| {
        let next = (next + TimeDelta::hours(hours)).to_rfc3339();
        truth(
            conn,
            &format!(
                "(SELECT counted_from {from} AND next_at = '{next}' FROM resource_control.schedule)"
            ),
        )
    };
    let RunDue::Later(rest) = look(&REPORT, &pool) else {
        panic!("nothing is due")
    };
    // The time until the next tick, not cut to the longest pause of a loop.
    assert!(rest > Duration::from_secs(60), "{rest:?}");
    assert!(is_next(admin, "<= clock_timestamp()", 0));
    assert!(wait(make_tick_due(&REPORT, &pool, HOUR)).unwrap());
    assert!(is_next(admin, "<= clock_timestamp() - interval '1 h'", -1));
    let ran = wait(REPORT.run_due(
        &pool,
        hourly,
        work!(|_tick| {
            assert!(is_next(admin, "= tick", 0));
            run(
                admin,
                "UPDATE resource_control.schedule SET next_at = next_at + interval '1 h'",
            );
            Err::<(), _>("no luck")
        }),
    ));
    assert_eq!(ran.unwrap(), RunDue::Ran);
    assert!(is_next(admin, "= tick", 1));
}

/// A new release moves the daily time to some hours ago, or to later today.
#[test]
fn a_time_before_the_release_that_set_it_does_not_run_and_the_next_does() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    for (index, catch_up) in [CatchUp::Latest, CatchUp::Skip(48 * HOUR), CatchUp::All(100)]
        .into_iter()
        .enumerate()
    {
        for (hours, earlier) in [(5, -8), (5, 9)] {
            let schedule = REPORT.key(index).key(earlier).catch_up(catch_up);
            run(admin, "DELETE FROM resource_control.schedule");
            assert_matches!(look_with(&schedule, &pool, daily(hours)), RunDue::Later(_));
            assert!(wait(make_tick_due(&schedule, &pool, 24 * HOUR)).unwrap());
            assert_eq!(look_with(&schedule, &pool, daily(hours)), RunDue::Ran);
            let before = row(admin, "counted_from");
            // The time moves in both directions.
            for edited in [earlier, hours, earlier] {
                assert_matches!(look_with(&schedule, &pool, daily(edited)), RunDue::Later(_));
                let next = daily(edited)(Utc::now()).unwrap().to_rfc3339();
                let stored = format!("(SELECT next_at = '{next}' FROM resource_control.schedule)");
                assert!(truth(admin, &stored), "{catch_up:?}, {edited}");
            }
            assert_eq!(row(admin, "counted_from"), before);
            let far = Duration::from_secs(86400);
            assert!(wait(make_tick_due(&schedule, &pool, far)).unwrap());
            assert_eq!(look_with(&schedule, &pool, daily(earlier)), RunDue::Ran);
        }
    }
}

/// No instance was up for four hours, and then one starts with another expression.
#[test]
fn a_due_tick_of_another_expression_runs_alone() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    for (index, catch_up) in [CatchUp::Latest, CatchUp::All(100)].into_iter().enumerate() {
        let schedule = REPORT.key(index).catch_up(catch_up);
        run(admin, "DELETE FROM resource_control.schedule");
        due(&schedule, &pool, 5);
        let edited = shifted(10);
        let expected = hourly(Utc::now() - 5 * HOUR).unwrap();
        let ran = wait(schedule.run_due(
            &pool,
            edited,
            work!(|tick| {
                assert_eq!((tick.at(), tick.missed()), (expected, 0));
                Ok::<_, Error>(())
            }),
        ));
        assert_eq!(ran.unwrap(), RunDue::Ran, "{catch_up:?}");
        assert_matches!(look_with(&schedule, &pool, edited), RunDue::Later(_));
        assert!(truth(
            admin,
            "(SELECT counted_from = tick AND next_at > clock_timestamp() FROM resource_control.schedule)"
        ));
    }
}

#[test]
fn a_tick_that_is_too_old_is_skipped_and_the_row_stores_the_next_one() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    let schedule = REPORT
        .clone()
        .catch_up(CatchUp::Skip(Duration::from_micros(1)));
    due(&schedule, &pool, 5);
    assert_matches!(look(&schedule, &pool), RunDue::Later(_));
    assert!(truth(
        admin,
        "(SELECT next_at - counted_from = interval '1 h' AND next_at > clock_timestamp() AND tick IS NULL FROM resource_control.schedule)"
    ));
}

/// A pause has already registered the schedule when the first look comes.
#[test]
fn a_schedule_that_a_pause_has_registered_counts_from_its_first_look() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    assert!(wait(REPORT.pause(&pool)).unwrap());
    assert!(truth(
        admin,
        "(SELECT next_at IS NULL FROM resource_control.schedule)"
    ));
    // As if the schedule had been paused five hours ago.
    run(
        admin,
        "UPDATE resource_control.schedule SET counted_from = counted_from - interval '5 h'",
    );
    assert!(wait(REPORT.resume(&pool)).unwrap());
    assert_matches!(look(&REPORT, &pool), RunDue::Later(_));
    let no_more = |_: DateTime<Utc>| None;
    assert_eq!(look_with(&REPORT, &pool, no_more), RunDue::Never);
    assert!(truth(
        admin,
        "(SELECT next_at = 'infinity' FROM resource_control.schedule)"
    ));
    assert!(truth(
        admin,
        "(SELECT next_at IS NULL FROM resource_control.schedule_state)"
    ));
    // The expression has ticks again.
    assert_matches!(look(&REPORT, &pool), RunDue::Later(_));
}

/// Runs the due tick as this attempt, and lets the work fail.
#[track_caller]
fn failed(schedule: &Schedule, pool: &PgPool, attempt: i32) {
    let ran = wait(schedule.run_due(
        pool,
        hourly,
        work!(|tick| {
            assert_eq!(tick.attempt(), attempt);
            Err::<(), _>("no luck")
        }),
    ));
    assert_eq!(ran.unwrap(), RunDue::Ran);
}

#[test]
fn a_failed_tick_is_retried_after_a_pause_that_doubles_and_so_many_times() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    let schedule = REPORT.clone().retry(3, 10 * HOUR);
    due(&schedule, &pool, 1);
    for (attempt, pause) in [(1, 10), (2, 20), (3, 24)] {
        failed(&schedule, &pool, attempt);
        let stored = format!(
            "(SELECT retry_at - ended_at BETWEEN interval '{pause} h -1 min' AND interval '{pause} h 1 min' AND state = 'failed' AND error = 'no luck' AND expires_at IS NULL FROM resource_control.schedule_state)"
        );
        assert!(truth(admin, &stored), "{attempt}");
        assert_matches!(look(&schedule, &pool), RunDue::Later(_));
        run(admin, EXPIRE);
        // A handle without `retry` does not retry, and a pause holds the retry.
        assert_matches!(look(&REPORT, &pool), RunDue::Later(_));
        assert!(wait(schedule.pause(&pool)).unwrap());
        assert_eq!(look(&schedule, &pool), RunDue::Paused);
        assert!(wait(schedule.resume(&pool)).unwrap());
    }
    failed(&schedule, &pool, 4);
    assert!(truth(
        admin,
        "(SELECT retry_at IS NULL AND state = 'failed' FROM resource_control.schedule_state)"
    ));
    assert_matches!(look(&schedule, &pool), RunDue::Later(_));
    // The next tick counts its attempts from one.
    assert!(wait(make_tick_due(&schedule, &pool, HOUR)).unwrap());
    assert_eq!(look(&schedule, &pool), RunDue::Ran);
}

#[test]
fn a_newer_tick_replaces_a_retry_except_under_all() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    for catch_up in [CatchUp::Latest, CatchUp::Skip(48 * HOUR), CatchUp::All(100)] {
        run(admin, "DELETE FROM resource_control.schedule");
        let schedule = REPORT.clone().catch_up(catch_up).retry(1, HOUR);
        due(&schedule, &pool, 1);
        failed(&schedule, &pool, 1);
        assert!(wait(make_tick_due(&schedule, &pool, HOUR)).unwrap());
        if matches!(catch_up, CatchUp::All(_)) {
            // A triggered run waits for the retries, too.
            assert!(wait(schedule.trigger(&pool)).unwrap());
            assert_matches!(look(&schedule, &pool), RunDue::Later(rest) if *rest <= HOUR);
            run(admin, EXPIRE);
            failed(&schedule, &pool, 2);
            assert_eq!(look(&schedule, &pool), RunDue::Ran);
        }
        assert_eq!(look(&schedule, &pool), RunDue::Ran);
        assert_matches!(look(&schedule, &pool), RunDue::Later(_));
    }
}

#[test]
fn crashes_and_failures_of_a_tick_are_counted_separately() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    let schedule = REPORT.clone().after_crash(HOUR, 2).retry(1, HOUR);
    let attempt = AtomicU64::new(0);
    let dies = || {
        let died = catch_unwind(AssertUnwindSafe(|| {
            wait(schedule.run_due(
                &pool,
                hourly,
                work!(|tick| {
                    attempt.store(tick.attempt() as u64, Ordering::SeqCst);
                    panics()
                }),
            ))
        }));
        assert!(died.is_err());
    };
    due(&schedule, &pool, 1);
    failed(&schedule, &pool, 1);
    for _ in 0..2 {
        run(admin, EXPIRE);
        dies();
        eventually("the crash is stored", || text(admin, STATE) == "crashed");
    }
    assert_eq!(attempt.into_inner(), 3);
    run(admin, EXPIRE);
    assert_matches!(look(&schedule, &pool), RunDue::Later(_));
}

#[test]
fn a_triggered_run_does_not_change_the_scheduled_ticks() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    due(&REPORT, &pool, 3);
    assert!(wait(REPORT.pause(&pool)).unwrap());
    let before = row(admin, PLAN);
    // A second trigger before the run begins changes nothing.
    assert!(wait(REPORT.trigger(&pool)).unwrap());
    assert!(!wait(REPORT.trigger(&pool)).unwrap());
    let asked = row(admin, "triggered_at");
    // The run takes place although the schedule is paused. It is triggered once more during the
    // run.
    let ran = wait(REPORT.run_due(
        &pool,
        hourly,
        work!(|tick| {
            assert!(tick.at() > Utc::now() - HOUR && tick.missed() == 0);
            assert_eq!(row(admin, "tick"), asked);
            assert!(reply!(REPORT.trigger(&pool))?);
            let others = reply!(REPORT.run_due(&pool, hourly, work!(|_tick| panics())))?;
            assert_matches!(others, RunDue::Later(_));
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!(ran.unwrap(), RunDue::Ran);
    assert_eq!(look(&REPORT, &pool), RunDue::Ran);
    assert_eq!(look(&REPORT, &pool), RunDue::Paused);
    assert_eq!(row(admin, PLAN), before);
    // A triggered run that crashes is repeated, as any other.
    assert!(wait(REPORT.trigger(&pool)).unwrap());
    let died = catch_unwind(AssertUnwindSafe(|| {
        wait(REPORT.run_due(&pool, hourly, work!(|_tick| panics())))
    }));
    assert!(died.is_err());
    eventually("the crash is stored", || text(admin, STATE) == "crashed");
    run(admin, EXPIRE);
    let attempt = AtomicU64::new(0);
    let ran = wait(REPORT.run_due(
        &pool,
        hourly,
        work!(|tick| {
            attempt.store(tick.attempt() as u64, Ordering::SeqCst);
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!((ran.unwrap(), attempt.into_inner()), (RunDue::Ran, 2));
    assert_eq!(look(&REPORT, &pool), RunDue::Paused);
    // The scheduled ticks that were missed are still due.
    assert_eq!(row(admin, PLAN), before);
    assert!(wait(REPORT.resume(&pool)).unwrap());
    let missed = AtomicU64::new(0);
    let ran = wait(REPORT.run_due(
        &pool,
        hourly,
        work!(|tick| {
            missed.store(tick.missed().into(), Ordering::SeqCst);
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!((ran.unwrap(), missed.into_inner()), (RunDue::Ran, 2));
    // A schedule that was never registered can be triggered, too, and has its ticks afterwards.
    let other = REPORT.key("other");
    assert!(wait(other.trigger(&pool)).unwrap());
    assert_eq!(look(&other, &pool), RunDue::Ran);
    assert_matches!(look(&other, &pool), RunDue::Later(_));
}

/// On a slow machine the lease may be lost before the run is too long, so rounds are repeated.
#[test]
fn a_run_that_is_too_long_is_stopped_and_its_tick_is_free_when_the_work_has_stopped() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    let limit = Duration::from_secs(4);
    // A look has as much time as its lease.
    let patient = REPORT.clone().after_crash(HOUR, 1000);
    let schedule = patient.clone().after_crash(limit, 1000).longest(limit);
    due(&patient, &pool, 1);
    eventually("the run was too long, and not lost before", || {
        let ran = wait(schedule.run_due(
            &pool,
            hourly,
            work!(|tick| {
                assert!(reply!(tick.wait_for_loss(Duration::MAX)));
                Ok::<_, Error>(())
            }),
        ));
        matches!(ran, Err(Error::PermitLost(_)))
            && truth(
                admin,
                "(SELECT state = 'crashed' AND error LIKE '%longer than 4s' AND expires_at <= clock_timestamp() FROM resource_control.schedule_state)",
            )
    });
    let again = wait(patient.run_due(
        &pool,
        hourly,
        work!(|tick| {
            assert!(tick.attempt() > 1);
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!(again.unwrap(), RunDue::Ran);
    assert_eq!(text(admin, STATE), "done");
}

#[test]
fn the_longer_a_run_lasts_the_less_often_other_instances_look() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    due(&REPORT, &pool, 1);
    let ran = wait(REPORT.run_due(
        &pool,
        hourly,
        work!(|_tick| {
            let mut rests = Vec::new();
            for minutes in [0, 4, 40] {
                run(
                    admin,
                    &format!("UPDATE resource_control.schedule SET started_at = started_at - interval '{minutes} min'"),
                );
                let others = reply!(REPORT.run_due(&pool, hourly, work!(|_tick| panics())))?;
                let RunDue::Later(rest) = others else {
                    panic!("{others:?}")
                };
                rests.push(rest);
            }
            let [first, second, third] = rests[..] else {
                unreachable!()
            };
            assert!(first >= Duration::from_secs(1) && second >= Duration::from_secs(30));
            assert!(first < second && third == Duration::from_secs(60), "{rests:?}");
            Ok::<_, Error>(())
        }),
    ));
    assert_eq!(ran.unwrap(), RunDue::Ran);
}

#[test]
fn meaningless_limits_and_an_empty_key_are_bad_input() {
    let database = installed();
    let pool = pool(&database, 2);
    for bad in [
        REPORT.key(""),
        REPORT.clone().retry(0, HOUR),
        REPORT.clone().retry(3, Duration::ZERO),
        REPORT.clone().retry(3, Duration::MAX),
        REPORT.clone().longest(HOUR - Duration::from_micros(1)),
        REPORT.clone().catch_up(CatchUp::All(0)),
        REPORT.clone().catch_up(CatchUp::Skip(Duration::ZERO)),
    ] {
        let ran = wait(bad.run_due(&pool, hourly, work!(|_tick| panics())));
        assert_matches!(ran, Err(Error::Input(_)));
        assert_matches!(wait(bad.trigger(&pool)), Err(Error::Input(_)));
    }
    assert_eq!(
        number(
            &mut database.connect(),
            "(SELECT count(*) FROM resource_control.schedule)"
        ),
        0
    );
}
