//! Schedules of the asynchronous half: runs whose futures are dropped.
#![cfg(feature = "testing")] // whose leases may be short

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use diesel_interlock::schedule::{RunDue, every};
use diesel_interlock::testing::make_tick_due;
use workbench::{RoundTrips, When, block_on};

use crate::assert_matches;
use crate::half::*;
use crate::support::{eventually, hourly, installed, number, run, text, truth};

const HOUR: Duration = Duration::from_secs(3600);
static REPORT: Schedule = Schedule::named("report").after_crash(Duration::from_secs(600), 3);

/// Lets the lease of the run expire.
const EXPIRE: &str = "UPDATE resource_control.schedule SET expires_at = clock_timestamp() WHERE expires_at IS NOT NULL";

fn due(schedule: &Schedule, pool: &PgPool) {
    block_on(async {
        let _ = schedule
            .run_due(pool, hourly, |_| async { Ok::<_, Error>(()) })
            .await
            .unwrap();
        assert!(make_tick_due(schedule, pool, HOUR).await.unwrap());
    });
}

/// However often the run is dropped, the next run is the first attempt, so that deployments use up
/// no attempts.
#[test]
fn a_dropped_run_gives_its_tick_back_at_once_and_costs_no_attempt() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    due(&REPORT, &pool);
    assert!(block_on(make_tick_due(&REPORT, &pool, 4 * HOUR)).unwrap());
    let attempts = AtomicU64::new(0);
    for _ in 0..5 {
        block_on(async {
            let began = AtomicU64::new(0);
            let runs = REPORT.run(&pool, hourly, |tick| {
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
    let last = block_on(REPORT.run_due(&pool, hourly, |tick| async move {
        assert_eq!(tick.attempt(), 1);
        assert!(tick.fencing_token() > 5);
        Ok::<_, Error>(())
    }));
    // The last dropped run may give the tick back a moment later.
    let mut last = last.unwrap();
    while last != RunDue::Ran {
        let again = REPORT.run_due(&pool, hourly, |tick| async move {
            assert_eq!((tick.attempt(), tick.missed()), (1, 4));
            Ok::<_, Error>(())
        });
        last = block_on(again).unwrap();
    }
    assert_eq!(attempts.into_inner(), 1);
    assert!(truth(
        admin,
        "(SELECT attempt = 1 AND ended_at IS NOT NULL AND expires_at IS NULL FROM resource_control.schedule)"
    ));
}

/// Dropped after any number of polls, and then looked for again: the work of a tick ends once.
#[test]
fn a_tick_whose_run_has_ended_is_never_given_back() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    for polls in 0..12 {
        let schedule = REPORT.key(polls);
        due(&schedule, &pool);
        let ended = AtomicU64::new(0);
        let work = |_: Tick| {
            ended.fetch_add(1, Ordering::SeqCst);
            std::future::ready(Ok::<_, Error>(()))
        };
        block_on(polled(polls, schedule.run_due(&pool, hourly, work)));
        let is_settled = "(SELECT bool_and(expires_at IS NULL OR expires_at <= clock_timestamp()) FROM resource_control.schedule)";
        eventually("no run is in progress", || truth(admin, is_settled));
        while matches!(
            block_on(schedule.run_due(&pool, hourly, work)),
            Ok(RunDue::Ran)
        ) {}
        eventually("the tick has ended", || {
            drop(block_on(schedule.run_due(&pool, hourly, work)));
            number(
                admin,
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
            REPORT.run_due(&pool, hourly, work).await.map(drop)
        })
    };
    assert!(block_on(task).unwrap_err().is_panic());
    let admin = &mut database.connect();
    let crashed =
        "(SELECT state = 'crashed' AND error IS NOT NULL FROM resource_control.schedule_state)";
    eventually("the crash is stored", || truth(admin, crashed));
    run(admin, EXPIRE);
    let again = REPORT.run_due(&pool, hourly, |tick| async move {
        assert_eq!(tick.attempt(), 2);
        Ok::<_, Error>(())
    });
    assert_eq!(block_on(again).unwrap(), RunDue::Ran);
}

fn panics() -> Error {
    panic!("in the work")
}

#[test]
fn the_work_is_dropped_when_its_lease_is_lost() {
    let database = installed();
    let pool = pool(&database, 3);
    // The first renewal, which notices the loss, comes after four seconds.
    let schedule = REPORT.clone().after_crash(Duration::from_secs(12), 3);
    due(&schedule, &pool);
    let admin = &mut database.connect();
    let ran = block_on(schedule.run_due(&pool, hourly, |tick| {
        assert!(!tick.is_lost());
        run(
            admin,
            "UPDATE resource_control.schedule SET expires_at = clock_timestamp()",
        );
        std::future::pending::<Result<()>>()
    }));
    assert_matches!(ran, Err(Error::PermitLost(_)));
}

#[test]
fn each_tick_runs_once_also_in_spawned_tasks() {
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

/// Waits until the schedule has this state.
#[track_caller]
fn wait_for_state(conn: &mut diesel::PgConnection, schedule: &str, state: &str) {
    let sql =
        format!("(SELECT state FROM resource_control.schedule_state WHERE name = '{schedule}')");
    eventually(state, || text(conn, &sql) == state);
}

/// Both runs are futures of one task, which unwinds.
#[test]
fn a_panic_in_one_run_is_no_crash_of_another_run_in_the_same_task() {
    let database = installed();
    let pool = pool(&database, 4);
    let admin = &mut database.connect();
    // The order in which the two runs are polled and dropped makes no difference.
    for is_first in [true, false] {
        let [panicking, other] = ["panicking", "other"].map(|name| REPORT.key(name));
        run(admin, "DELETE FROM resource_control.schedule");
        due(&panicking, &pool);
        due(&other, &pool);
        let task = {
            let pool = pool.clone();
            workbench::runtime().spawn(async move {
                let is_at_work = tokio::sync::Notify::new();
                let panics = panicking.run_due(&pool, hourly, |_| async {
                    is_at_work.notified().await;
                    Err::<(), _>(panics())
                });
                let waits = other.run_due(&pool, hourly, |_| async {
                    is_at_work.notify_one();
                    std::future::pending::<Result<()>>().await
                });
                if is_first {
                    drop(tokio::join!(panics, waits));
                } else {
                    drop(tokio::join!(waits, panics));
                }
            })
        };
        assert!(block_on(task).unwrap_err().is_panic());
        wait_for_state(admin, "report panicking", "crashed");
        wait_for_state(admin, "report other", "given back");
        run(admin, EXPIRE);
        for (schedule, expected) in [("panicking", 2), ("other", 1)] {
            let schedule = REPORT.key(schedule);
            let again = schedule.run_due(&pool, hourly, |tick| async move {
                assert_eq!(tick.attempt(), expected);
                Ok::<_, Error>(())
            });
            assert_eq!(block_on(again).unwrap(), RunDue::Ran);
        }
    }
}

#[test]
fn a_run_that_a_panic_beside_it_drops_is_given_back() {
    let database = installed();
    let pool = pool(&database, 4);
    let admin = &mut database.connect();
    due(&REPORT, &pool);
    let task = {
        let pool = pool.clone();
        workbench::runtime().spawn(async move {
            let is_at_work = tokio::sync::Notify::new();
            let runs = REPORT.run_due(&pool, hourly, |_| async {
                is_at_work.notify_one();
                std::future::pending::<Result<()>>().await
            });
            tokio::select! {
                ended = runs => drop(ended),
                () = is_at_work.notified() => {}
            }
            let mut runs = REPORT.run_due(&pool, hourly, |_| async {
                is_at_work.notify_one();
                std::future::pending::<Result<()>>().await
            });
            // The loop that was stopped may end before its work begins.
            tokio::select! {
                ended = &mut runs => drop(ended),
                () = is_at_work.notified() => {}
            }
            // A panic in the same task drops the run.
            drop(panics());
            drop(runs);
        })
    };
    assert!(block_on(task).unwrap_err().is_panic());
    wait_for_state(admin, "report", "given back");
    assert!(truth(
        admin,
        "(SELECT attempt = 0 AND error IS NULL FROM resource_control.schedule)"
    ));
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
                due(&schedule, &pool);
                let (runs, done) = (AtomicU64::new(0), tokio::sync::Notify::new());
                proxy.sever_at(n, When::BeforeReply);
                block_on(async {
                    let looping = schedule.run(&pool, hourly, |tick| {
                        assert_eq!(tick.attempt(), 1);
                        runs.fetch_add(1, Ordering::SeqCst);
                        done.notify_one();
                        std::future::ready(Ok::<_, Error>(()))
                    });
                    let stored = async {
                        done.notified().await;
                        let conn = &mut database.connect();
                        let sql = format!(
                            "(SELECT count(ended_at) FROM resource_control.schedule WHERE name = 'cut {n}' AND expires_at IS NULL)"
                        );
                        while number(conn, &sql) == 0 {
                            tokio::task::yield_now().await;
                        }
                    };
                    tokio::select! {
                        ended = looping => panic!("{ended:?}"),
                        () = stored => {}
                    }
                });
                assert_eq!(runs.into_inner(), 1);
            });
        }
    });
    let done = "(SELECT bool_and(attempt = 1 AND expires_at IS NULL AND error IS NULL) FROM resource_control.schedule)";
    assert!(truth(&mut database.connect(), done));
}

/// On a slow machine the lease may be lost before the run is too long, so rounds are repeated.
#[test]
fn the_work_of_a_run_that_is_too_long_is_dropped_and_its_tick_is_free_at_once() {
    let database = installed();
    let pool = pool(&database, 3);
    let admin = &mut database.connect();
    let limit = Duration::from_secs(4);
    // A look has as much time as its lease.
    let patient = REPORT.clone().after_crash(HOUR, 1000);
    let schedule = patient.clone().after_crash(limit, 1000).longest(limit);
    due(&patient, &pool);
    eventually("the run was too long, and not lost before", || {
        let hangs = |_: Tick| std::future::pending::<Result<()>>();
        let ran = block_on(schedule.run_due(&pool, hourly, hangs));
        matches!(ran, Err(Error::PermitLost(_)))
            && truth(
                admin,
                "(SELECT state = 'crashed' AND error LIKE '%longer than 4s' AND expires_at <= clock_timestamp() FROM resource_control.schedule_state)",
            )
    });
    let again = patient.run_due(&pool, hourly, |tick| async move {
        assert!(tick.attempt() > 1);
        Ok::<_, Error>(())
    });
    assert_eq!(block_on(again).unwrap(), RunDue::Ran);
}
