//! After a future is dropped or a runtime ends: statements that still run, waits on the server, and
//! locks.

use std::time::Duration;

use diesel_interlock::Pool;
use diesel_interlock::schedule::every;
use tokio::runtime::Builder;
use tokio::time::timeout;
use workbench::Database;

use crate::assert_matches;
use crate::half::{
    AdvisoryLock, Conn, Done, Error, Once, PgPool, Quota, RateLimit, Result, Schedule, Semaphore,
    begin, drain, execute, make_pool, on_all, wait,
};
use crate::support::{
    IN_FLIGHT, Observer, alone, assert_pool_whole, eventually, foreign_holder, installed, number,
    run,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("cancelled");
const HOUR: Duration = Duration::from_secs(3600);
const SLOT: Semaphore = Semaphore::named("cancelled", 1, HOUR);
static ONCE: Once = Once::named("cancelled");

/// A statement that runs much longer than a test waits.
const WORK: &str = "SELECT pg_sleep(600)";
const END_WORK: &str = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event = 'PgSleep'";

/// deadpool lends a connection on which the statement of a dropped future still runs, so the try
/// waits for that statement.
#[test]
fn a_timeout_is_kept_although_the_connection_is_busy() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 1, Duration::from_secs(20));
    let mut observer = Observer::of(&database);
    workbench::block_on(async {
        let mut conn = pool.check_out(None).await.unwrap();
        dropped_asleep(&mut observer, execute(&mut conn, WORK)).await;
        drop(conn);
        let soon = Duration::from_millis(200);
        let acquired = LOCK.acquire_timeout(&pool, soon).await;
        assert_eq!(
            observer.sleeping(),
            1,
            "the statement still runs at the deadline"
        );
        // bb8 has closed that connection and opened another, so there the lock is acquired.
        if let Err(error) = acquired {
            assert_matches!(error, Error::TimedOut);
        }
    });
    // The server reads the try only after the end of the statement.
    run(observer.conn(), END_WORK);
    eventually("the statement has ended", || observer.sleeping() == 0);
    observer.assert_free(LOCK.lock_key());
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_guard_that_is_dropped_behind_a_running_statement_frees_the_lock_soon() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
    let mut observer = Observer::of(&database);
    workbench::block_on(async {
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        dropped_asleep(&mut observer, execute(guard.conn(), WORK)).await;
    });
    observer.assert_free(LOCK.lock_key());
    assert_pool_whole(&pool, &database);
}

/// Drops the work while a `pg_sleep` of it runs.
async fn dropped_asleep<T>(observer: &mut Observer, work: impl Future<Output = T>) {
    let asleep = async {
        while observer.sleeping() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        _ = work => panic!("the work has ended"),
        () = asleep => {}
    }
}

/// bb8 closes the connection at once, and deadpool at its next check-out.
#[test]
fn a_dropped_transaction_and_a_dropped_once_end_in_the_middle_of_a_statement() {
    let database = installed();
    let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
    let mut observer = Observer::of(&database);
    for is_once in [false, true] {
        workbench::block_on(async {
            let mut conn = pool.check_out(None).await.unwrap();
            if is_once {
                let work = async |conn: &mut Conn| {
                    execute(conn, WORK).await?;
                    Ok::<_, Error>("never")
                };
                dropped_asleep(&mut observer, ONCE.run(&mut conn, work)).await;
            } else {
                let work = async |conn: &mut Conn| Ok::<_, Error>(execute(conn, WORK).await?);
                dropped_asleep(&mut observer, LOCK.transaction(&mut conn, work)).await;
            }
            drop(conn);
            on_all(&pool, "SELECT 1").await.unwrap();
        });
        eventually("the lock is free", || observer.all_held() == 0);
        eventually("the statement has ended", || observer.sleeping() == 0);
    }
    assert_pool_whole(&pool, &database);
}

#[test]
fn several_locks_that_are_dropped_behind_a_running_statement_are_drained_once_they_are_free() {
    let test =
        "several_locks_that_are_dropped_behind_a_running_statement_are_drained_once_they_are_free";
    alone(&format!("asynchronous::cancelled::{test}"), || {
        let database = Database::new();
        let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
        let mut observer = Observer::of(&database);
        let both = AdvisoryLock::all([&LOCK, &LOCK.key("another").shared()]);
        for lock in [&LOCK, &both] {
            // On a slow machine the locks may be free before the test sees them held.
            let is_proved = (0..20).any(|_| {
                workbench::block_on(async {
                    let mut guard = lock.acquire(&pool).await.unwrap();
                    dropped_asleep(&mut observer, execute(guard.conn(), WORK)).await;
                });
                let is_held = observer.all_held() > 0;
                let is_early = !wait(drain(Duration::from_millis(100)));
                assert!(!is_early || wait(drain(Duration::from_secs(60))));
                assert_eq!(observer.all_held(), 0);
                is_held && is_early
            });
            assert!(is_proved);
        }
        assert_pool_whole(&pool, &database);
    });
}

/// The release goes on in the background until the row is free.
#[test]
fn a_release_whose_future_is_dropped_is_drained_once_the_slot_is_free() {
    let test = "a_release_whose_future_is_dropped_is_drained_once_the_slot_is_free";
    alone(&format!("asynchronous::cancelled::{test}"), || {
        let database = installed();
        let pool = make_pool(&database.url(), 1, Duration::from_secs(20));
        let slot = Semaphore::named("drained", 1, Duration::from_secs(3600));
        let (mut observer, admin) = (Observer::of(&database), &mut database.connect());
        workbench::block_on(async {
            let permit = slot.acquire(&pool).await.unwrap();
            run(
                admin,
                "BEGIN; SELECT FROM resource_control.service_request FOR UPDATE",
            );
            let is_waiting = async {
                while observer.all_waiting() == 0 {
                    tokio::task::yield_now().await;
                }
            };
            // On a slow machine the release may have given up, and then goes on in the same way.
            tokio::select! {
                released = permit.release() => assert_matches!(released, Err(_)),
                () = is_waiting => {}
            }
        });
        assert!(!wait(drain(Duration::from_millis(20))));
        run(admin, "ROLLBACK");
        assert!(wait(drain(Duration::from_secs(60))));
        assert_eq!(number(admin, IN_FLIGHT), 0);
    });
}

#[test]
fn dropped_waits_for_a_transaction_lock_end_on_the_server() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
    let lock = LOCK.key("xact");
    let _holder = foreign_holder(&database, lock.lock_key());
    let mut observer = Observer::of(&database);
    workbench::block_on(async {
        for _ in 0..40 {
            let wait = async {
                let mut conn = pool.check_out(None).await?;
                lock.transaction(&mut conn, async |_conn| Ok::<_, Error>(()))
                    .await
            };
            assert!(timeout(Duration::from_millis(20), wait).await.is_err());
        }
    });
    // The server notices within a second that a client has gone.
    eventually(
        "no more sessions wait than the pool has connections",
        || observer.waiters(lock.lock_key()) <= 2,
    );
}

#[test]
fn dropped_calls_of_once_leave_neither_locks_nor_waits() {
    let database = installed();
    let pool = make_pool(&database.url(), 3, Duration::from_secs(20));
    let mut observer = Observer::of(&database);
    let run = |pool: PgPool| async move {
        let mut conn = pool.check_out(None).await?;
        let endless = async |conn: &mut Conn| {
            execute(conn, "CREATE TABLE written ()").await?;
            std::future::pending::<()>().await;
            Ok("never")
        };
        ONCE.run(&mut conn, endless).await
    };
    workbench::block_on(async {
        let first: tokio::task::JoinHandle<Result<Done, Error>> = {
            let pool = pool.clone();
            tokio::task::spawn(async move { run(pool).await })
        };
        while observer.in_transaction() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for _ in 0..20 {
            let waiting = timeout(Duration::from_millis(20), run(pool.clone()));
            assert!(waiting.await.is_err());
        }
        first.abort();
        assert!(first.await.is_err());
        let mut conn = pool.check_out(None).await.unwrap();
        let second: Result<Done, Error> = ONCE.run(&mut conn, async |_conn| Ok("second")).await;
        assert!(second.unwrap().is_first());
    });
    assert_pool_whole(&pool, &database);
    eventually("nobody waits", || observer.all_waiting() == 0);
    assert_eq!(
        number(
            observer.conn(),
            "(SELECT count(*) FROM pg_class WHERE relname = 'written')"
        ),
        0
    );
}

#[test]
fn aborted_tasks_leave_neither_locks_nor_permits() {
    let database = installed();
    let pool = make_pool(&database.url(), 3, Duration::from_secs(20));
    let slot = Semaphore::named("aborted", 2, Duration::from_secs(3600));
    workbench::block_on(async {
        for round in 0..60_u64 {
            let mut tasks = Vec::new();
            for task in 0..6_u64 {
                let (pool, slot) = (pool.clone(), slot.clone());
                tasks.push(tokio::spawn(async move {
                    if task % 2 == 0 {
                        let mut guard = LOCK.acquire(&pool).await?;
                        execute(guard.conn(), "SELECT pg_sleep(0.001)").await?;
                        guard.release().await
                    } else if task == 1 {
                        let both = AdvisoryLock::all([&LOCK, &LOCK.key("another")]);
                        let mut guard = both.acquire(&pool).await?;
                        execute(guard.conn(), "SELECT pg_sleep(0.001)").await?;
                        guard.release().await
                    } else {
                        let permit = slot.acquire(&pool).await?;
                        tokio::time::sleep(Duration::from_millis(1)).await;
                        permit.release().await
                    }
                }));
            }
            tokio::time::sleep(Duration::from_micros(150 * round)).await;
            for task in &tasks {
                task.abort();
            }
            for task in tasks {
                if let Ok(ended) = task.await {
                    ended.unwrap();
                }
            }
        }
    });
    assert_pool_whole(&pool, &database);
    let mut observer = Observer::of(&database);
    eventually("no permit is in flight", || {
        number(observer.conn(), IN_FLIGHT) == 0
    });
}

#[test]
fn outside_a_runtime_an_operation_is_an_error() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 1, Duration::from_secs(20));
    fn assert_refused<T>(operation: impl Future<Output = Result<T>>) {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(operation).poll(&mut context) {
            std::task::Poll::Ready(refused) => {
                assert_matches!(refused.map(drop), Err(Error::NoRuntime));
            }
            std::task::Poll::Pending => panic!("the operation waits"),
        }
    }
    let limit = RateLimit::named("limit", Quota::per_minute(1));
    let schedule = Schedule::named("schedule");
    let nothing = async |_| Ok::<_, Error>(());
    assert_refused(LOCK.try_acquire(&pool));
    assert_refused(LOCK.acquire(&pool));
    assert_refused(LOCK.acquire_timeout(&pool, HOUR));
    assert_refused(SLOT.try_acquire(&pool));
    assert_refused(SLOT.acquire_timeout(&pool, HOUR));
    assert_refused(limit.check(&pool));
    assert_refused(limit.acquire_timeout(&pool, HOUR));
    assert_refused(schedule.run_due(&pool, every(HOUR), nothing));
}

#[test]
fn a_runtime_that_ends_frees_its_locks() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    for keeps in [true, false] {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let guard = runtime.block_on(async {
            let pool = crate::pool::make(&database.url(), 2, Duration::from_secs(20));
            LOCK.acquire(&pool).await.unwrap()
        });
        if keeps {
            drop(runtime);
            drop(guard);
        } else {
            // Nobody polls the tasks of the runtime, so the release runs when the runtime ends.
            drop(guard);
            drop(runtime);
        }
        observer.assert_free(LOCK.lock_key());
    }
}

#[test]
fn a_dropped_transaction_of_the_caller_does_not_keep_the_lock() {
    let database = Database::new();
    let pool = make_pool(&database.url(), 2, Duration::from_secs(20));
    let mut guard = wait(LOCK.acquire(&pool)).unwrap();
    begin(guard.conn());
    drop(guard);
    Observer::of(&database).assert_free(LOCK.lock_key());
    assert_pool_whole(&pool, &database);
}

/// One of two connections runs a statement that takes longer than the lease of the permit.
#[test]
fn a_renewal_on_a_busy_connection_costs_no_permit() {
    let database = installed();
    let mut observer = Observer::of(&database);
    workbench::block_on(async {
        // On a slow machine a permit may be lost, so each round has a longer lease.
        for round in 0..7 {
            let lease = Duration::from_secs(3 << round);
            let kept = Semaphore::named("kept", 1, lease).keep_alive();
            let pool = crate::pool::unchecked(&database, 2);
            let admission = kept.key(round).acquire_timeout(&pool, HOUR).await;
            let permit = admission.unwrap().admitted().unwrap();
            let mut conn = pool.check_out(None).await.unwrap();
            dropped_asleep(&mut observer, execute(&mut conn, WORK)).await;
            drop(conn);
            let is_lost = permit.wait_for_loss(lease * 7 / 3).await;
            let released = permit.release().await;
            if !is_lost && released.is_ok() {
                return;
            }
            run(observer.conn(), END_WORK);
        }
        panic!("the permit of each round was lost");
    });
}
