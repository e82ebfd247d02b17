//! Schedules of the asynchronous half: what a dropped future leaves.
#![cfg(feature = "testing")] // whose leases may be short

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diesel_interlock::schedule::{Look, every};
use diesel_interlock::testing::make_tick_due;
use workbench::block_on;

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, installed, number, run, truth};

const HOUR: Duration = Duration::from_secs(3600);
static REPORT: Schedule = Schedule::named("report").after_crash(Duration::from_secs(600), 3);

fn due(schedule: &Schedule, pool: &PgPool) {
    block_on(async {
        let _ = schedule
            .run_due(pool, every(HOUR), |_| async { Ok::<_, Error>(()) })
            .await
            .unwrap();
        assert!(make_tick_due(pool, schedule, HOUR).await.unwrap());
    });
}

/// However often it is dropped, it is the first attempt, so that a deployment costs none.
#[test]
fn a_dropped_run_gives_its_tick_back_at_once_and_costs_no_attempt() {
    let database = installed();
    let pool = pool(&database, 3);
    let look = &mut database.connect();
    due(&REPORT, &pool);
    assert!(block_on(make_tick_due(&pool, &REPORT, 4 * HOUR)).unwrap());
    let attempts = AtomicU64::new(0);
    for _ in 0..5 {
        block_on(async {
            let began = AtomicU64::new(0);
            let runs = REPORT.run(&pool, every(HOUR), |tick| {
                attempts.fetch_max(tick.attempt() as u64, Ordering::SeqCst);
                assert_eq!(tick.missed(), 4);
                began.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<Result<()>>()
            });
            let begins = async {
                while began.load(Ordering::SeqCst) == 0 {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                ended = runs => panic!("{ended:?}"),
                () = begins => {}
            }
        });
    }
    let last = block_on(REPORT.run_due(&pool, every(HOUR), |tick| async move {
        assert_eq!(tick.attempt(), 1);
        assert!(tick.token() > 5);
        Ok::<_, Error>(())
    }));
    // The row of the last drop may be on its way.
    let mut last = last.unwrap();
    while last != Look::Ran {
        let again = REPORT.run_due(&pool, every(HOUR), |tick| async move {
            assert_eq!((tick.attempt(), tick.missed()), (1, 4));
            Ok::<_, Error>(())
        });
        last = block_on(again).unwrap();
    }
    assert_eq!(attempts.into_inner(), 1);
    assert!(truth(
        look,
        "(SELECT attempt = 1 AND ended_at IS NOT NULL AND expires_at IS NULL FROM resource_control.schedule)"
    ));
}

/// Dropped after any number of polls, the tick has run at most once to its end.
#[test]
fn a_run_that_has_ended_is_never_given_back() {
    let database = installed();
    let pool = pool(&database, 3);
    let look = &mut database.connect();
    for polls in 0..12 {
        let schedule = REPORT.key(polls);
        due(&schedule, &pool);
        let ended = AtomicU64::new(0);
        let work = |_: Tick| {
            ended.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Ok::<_, Error>(()))
        };
        block_on(polled(polls, schedule.run_due(&pool, every(HOUR), work)));
        let is_settled = "(SELECT bool_and(expires_at IS NULL OR expires_at <= clock_timestamp()) FROM resource_control.schedule)";
        eventually("nothing runs", || truth(look, is_settled));
        while matches!(
            block_on(schedule.run_due(&pool, every(HOUR), work)),
            Ok(Look::Ran)
        ) {}
        eventually("the tick has ended", || {
            drop(block_on(schedule.run_due(&pool, every(HOUR), work)));
            number(
                look,
                "(SELECT count(*) FROM resource_control.schedule WHERE ended_at IS NULL OR expires_at IS NOT NULL)",
            ) == 0
        });
        assert_eq!(ended.into_inner(), 1, "after {polls} polls");
    }
}

#[test]
fn a_run_in_a_task_that_panics_counts_as_a_crash() {
    let database = installed();
    let pool = pool(&database, 3);
    due(&REPORT, &pool);
    let task = {
        let pool = pool.clone();
        workbench::runtime().spawn(async move {
            let work = |_: Tick| async { Err::<(), _>(panics()) };
            REPORT.run_due(&pool, every(HOUR), work).await.map(drop)
        })
    };
    assert!(block_on(task).unwrap_err().is_panic());
    let look = &mut database.connect();
    let crashed = "(SELECT expires_at <= clock_timestamp() AND error IS NOT NULL FROM resource_control.schedule)";
    eventually("it is stored", || truth(look, crashed));
    let again = REPORT.run_due(&pool, every(HOUR), |tick| async move {
        assert_eq!(tick.attempt(), 2);
        Ok::<_, Error>(())
    });
    assert_eq!(block_on(again).unwrap(), Look::Ran);
}

fn panics() -> Error {
    panic!("the work")
}

#[test]
fn the_work_is_dropped_when_its_lease_is_lost() {
    let database = installed();
    let pool = pool(&database, 3);
    let schedule = REPORT.clone().after_crash(Duration::from_millis(600), 3);
    due(&schedule, &pool);
    let look = &mut database.connect();
    let ran = block_on(schedule.run_due(&pool, every(HOUR), |tick| {
        run(
            look,
            "UPDATE resource_control.schedule SET expires_at = clock_timestamp()",
        );
        assert!(!tick.is_lost());
        std::future::pending::<Result<()>>()
    }));
    assert_matches!(ran, Err(Error::PermitLost(_)));
}

#[test]
fn ticks_run_in_spawned_tasks_once_each() {
    let database = installed();
    let ran = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let (pool, ran) = (pool(&database, 3), ran.clone());
            workbench::runtime().spawn(async move {
                let work = |tick: Tick| {
                    ran.lock().unwrap().push((tick.at(), tick.attempt()));
                    async { Ok::<_, Error>(()) }
                };
                REPORT
                    .run(&pool, every(Duration::from_millis(100)), work)
                    .await
            })
        })
        .collect();
    eventually("ten ticks have run", || ran.lock().unwrap().len() >= 10);
    for task in tasks {
        assert!(!task.is_finished());
        task.abort();
    }
    let ran = ran.lock().unwrap();
    assert!(ran.windows(2).all(|two| two[0].0 < two[1].0), "{ran:?}");
    assert!(ran.iter().all(|(_, attempt)| *attempt == 1), "{ran:?}");
}
