//! Each tick runs once, and again only if its run crashed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use diesel::prelude::*;
use diesel_interlock::monitor::ScheduleState;
use diesel_interlock::schedule::{CatchUp, Look, Tick, every};
use workbench::Database;

use crate::assert_matches;
use crate::half::{Error, PgPool, Schedule, Stop, pool};
use crate::support::{eventually, installed, run};

const LEASE: Duration = Duration::from_millis(600);
const HOUR: Duration = Duration::from_secs(3600);

fn schedule() -> Schedule {
    Schedule::named("hourly")
        .after_crash(LEASE, 3)
        .details("web-1")
}

/// As if so much time had passed.
fn rewind(database: &Database, seconds: u32) {
    run(
        &mut database.connect(),
        &format!(
            "UPDATE resource_control.schedule SET tick = tick - interval '{seconds} s', expires_at = expires_at - interval '{seconds} s'"
        ),
    );
}

fn state(database: &Database) -> ScheduleState {
    ScheduleState::all().first(&mut database.connect()).unwrap()
}

fn look(pool: &PgPool, work: impl FnOnce(&Tick<PgPool>) -> Result<(), Error>) -> Look {
    schedule().run_due(pool, every(HOUR), work).unwrap()
}

/// The schedule was seen, and its next tick is due.
fn due() -> (Database, PgPool) {
    let database = installed();
    let pool = pool(&database, 3);
    assert_matches!(
        look(&pool, |_| panic!("nothing of the past runs")),
        Look::Later(_)
    );
    assert_eq!(state(&database).state, "new");
    rewind(&database, 3600);
    (database, pool)
}

#[test]
fn a_tick_runs_once() {
    let (database, pool) = due();
    let mut at = None;
    let ran = look(&pool, |tick| {
        at = Some(tick.at());
        assert_eq!((tick.attempt(), tick.missed()), (1, 0));
        assert!(!tick.is_lost());
        let state = state(&database);
        assert_eq!(
            (state.state.as_str(), state.runner.as_str()),
            ("running", "web-1")
        );
        assert_matches!(look(&pool, |_| panic!("it runs already")), Look::Later(_));
        Ok(())
    });
    assert_eq!(ran, Look::Ran);
    assert_eq!(at.unwrap().timestamp() % 3600, 0);
    assert_matches!(look(&pool, |_| panic!("it has run")), Look::Later(_));
    let state = state(&database);
    assert_eq!(
        (state.state.as_str(), state.tick, state.attempt),
        ("done", at, 1)
    );
}

#[test]
fn an_error_is_stored_and_not_tried_again() {
    let (database, pool) = due();
    assert_eq!(look(&pool, |_| Err(Error::TimedOut)), Look::Ran);
    let state = state(&database);
    assert_eq!(state.state, "failed");
    assert_eq!(state.error, Some(Error::TimedOut.to_string()));
    assert_matches!(look(&pool, |_| panic!("it has failed")), Look::Later(_));
}

#[test]
fn a_panic_is_a_crash_and_a_tick_runs_three_times_at_most() {
    let (database, pool) = due();
    let mut token = 0;
    for attempt in 1..=3 {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            look(&pool, |tick| {
                assert_eq!(tick.attempt(), attempt);
                assert!(tick.token() > token);
                token = tick.token();
                panic!("out of paper")
            })
        }));
        assert!(panicked.is_err());
        eventually("it has crashed", || state(&database).state == "crashed");
    }
    assert_matches!(
        look(&pool, |_| panic!("it has run three times")),
        Look::Later(_)
    );
    rewind(&database, 3600);
    assert_eq!(
        look(&pool, |tick| {
            assert_eq!(tick.attempt(), 1);
            Ok(())
        }),
        Look::Ran
    );
}

#[test]
fn the_tick_of_a_process_that_died_runs_again_after_its_lease() {
    let (database, pool) = due();
    // What a process leaves that is killed.
    run(
        &mut database.connect(),
        "UPDATE resource_control.schedule SET tick = date_trunc('hour', clock_timestamp()), attempt = 1, token = 1,
            started_at = clock_timestamp(), expires_at = clock_timestamp() + '600 ms'",
    );
    assert_matches!(look(&pool, |_| panic!("it is held")), Look::Later(_));
    eventually("it runs again", || {
        look(&pool, |tick| {
            assert_eq!(tick.attempt(), 2);
            Ok(())
        }) == Look::Ran
    });
}

#[test]
fn missed_ticks_are_caught_up_as_wanted() {
    let (database, pool) = due();
    let look_by = |catch_up| {
        let ticks = Mutex::new(Vec::new());
        loop {
            let look = schedule()
                .catch_up(catch_up)
                .run_due(&pool, every(HOUR), |tick| {
                    ticks.lock().unwrap().push(tick.missed());
                    Ok::<_, Error>(())
                });
            if look.unwrap() != Look::Ran {
                return ticks.into_inner().unwrap();
            }
        }
    };
    rewind(&database, 3 * 3600);
    assert_eq!(look_by(CatchUp::Latest), [3]);
    rewind(&database, 4 * 3600);
    assert_eq!(look_by(CatchUp::All(3)), [1, 0, 0]);
    rewind(&database, 4 * 3600);
    assert_eq!(look_by(CatchUp::Skip(Duration::ZERO)), [] as [u32; 0]);
    assert_eq!(look_by(CatchUp::Skip(2 * HOUR)).len(), 1);
}

#[test]
fn several_instances_run_each_tick_once() {
    let database = installed();
    let ticks = Mutex::new(Vec::new());
    let schedule = schedule().catch_up(CatchUp::All(1000));
    thread::scope(|scope| {
        let stop = Stop::new();
        for _ in 0..4 {
            let (stop, database, ticks, schedule) = (stop.clone(), &database, &ticks, &schedule);
            scope.spawn(move || {
                let pool = pool(database, 2);
                let ran = schedule.run(&pool, &stop, every(Duration::from_millis(20)), |tick| {
                    ticks.lock().unwrap().push((tick.at(), tick.attempt()));
                    Ok::<_, Error>(())
                });
                ran.unwrap();
            });
        }
        eventually("fifty ticks have run", || ticks.lock().unwrap().len() >= 50);
        stop.stop();
    });
    let ticks = ticks.into_inner().unwrap();
    for pair in ticks.windows(2) {
        assert_eq!(
            pair[1].0 - pair[0].0,
            TimeDelta::milliseconds(20),
            "in order, none twice, none missing"
        );
    }
    assert!(ticks.iter().all(|(_, attempt)| *attempt == 1));
}

#[test]
fn a_schedule_may_end() {
    let (database, pool) = due();
    let never = |_: DateTime<Utc>| None;
    let look = schedule().run_due(&pool, never, |_| Ok::<_, Error>(()));
    assert_eq!(look.unwrap(), Look::Never);
    schedule()
        .run(&pool, &Stop::new(), never, |_| Ok::<_, Error>(()))
        .unwrap();
    drop(database);
}

#[test]
fn bad_input_is_refused() {
    let database = installed();
    let pool = pool(&database, 1);
    for schedule in [
        Schedule::named(""),
        schedule().key("nul \0"),
        schedule().after_crash(Duration::from_millis(1), 1),
    ] {
        assert_matches!(
            schedule.run_due(&pool, every(HOUR), |_| Ok::<_, Error>(())),
            Err(Error::Input(_))
        );
    }
    let _ = schedule().run_due(&pool, every(HOUR), |_| Ok::<_, Error>(()));
    let stuck = |after: DateTime<Utc>| Some(after);
    assert_matches!(
        schedule().run_due(&pool, stuck, |_| Ok::<_, Error>(())),
        Err(Error::Input(_))
    );
}
