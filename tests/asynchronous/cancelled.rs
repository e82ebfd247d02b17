//! Statements that the server cancels at their end, when they have locked or unlocked: PostgreSQL takes back what they wrote, and
//! no session lock.

use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_async::SimpleAsyncConnection;
use diesel_interlock::asynchronous::AdvisoryLock;
use diesel_interlock::{Error, LockKey};
use tokio::task::block_in_place;
use tokio::time::timeout;
use workbench::Database;

use crate::dropping::{KEY, NOBODY, ONE_HOLDER, Observer, assert_full_strength};
use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::bigint(KEY));

const LONG: Duration = Duration::from_secs(60);
/// How many statements are to fail, and of how many at most.
const FAILURES: usize = 8;
const TURNS: u64 = 10_000;

/// Cancels what the session runs after a moment, which is another one at each turn.
fn cancel_soon(database: &Database, pid: i32, turn: u64) -> JoinHandle<()> {
    let mut conn = database.connect();
    conn.batch_execute("SELECT 1").unwrap();
    let (ready, is_ready) = std::sync::mpsc::channel();
    let thread = thread::spawn(move || {
        ready.send(()).unwrap();
        let (began, pause) = (Instant::now(), Duration::from_micros(turn * 7 % 500));
        while began.elapsed() < pause {}
        conn.batch_execute(&format!("SELECT pg_cancel_backend({pid})"))
            .unwrap();
    });
    is_ready.recv().unwrap();
    thread
}

#[test]
fn a_try_on_a_lent_connection_leaves_no_lock() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let mut conn = database.connect_async().await;
        let guard = LOCK.acquire_on(&mut conn).await.unwrap();
        let mut pid = guard.backend_pid();
        guard.release().await.unwrap();
        let mut failures = 0;
        for turn in 0..TURNS {
            let cancel = block_in_place(|| cancel_soon(&database, pid, turn));
            {
                let tried = LOCK.try_acquire_on(&mut conn).await;
                block_in_place(|| cancel.join()).unwrap();
                match tried {
                    Ok(attempt) => attempt.acquired().unwrap().release().await.unwrap(),
                    Err(error) => {
                        assert!(matches!(error, Error::Database(_)), "{error:?}");
                        failures += 1;
                    }
                }
            }
            block_in_place(|| observer.until(NOBODY, LONG));
            if conn.batch_execute("SELECT 1").await.is_err() {
                conn = database.connect_async().await;
                let guard = LOCK.acquire_on(&mut conn).await.unwrap();
                pid = guard.backend_pid();
                guard.release().await.unwrap();
            }
            if failures == FAILURES {
                return;
            }
        }
        panic!("{failures} statements were cancelled");
    });
}

#[test]
fn a_release_of_a_nested_guard_leaves_the_outer_one_its_hold() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let pool = database.deadpool(1);
        let mut outer = LOCK.acquire(&pool).await.unwrap();
        let mut failures = 0;
        for turn in 0..TURNS {
            let pid = outer.backend_pid();
            let inner = LOCK.try_acquire_on(outer.conn()).await.unwrap();
            let inner = inner.acquired().unwrap();
            let cancel = block_in_place(|| cancel_soon(&database, pid, turn));
            let released = inner.release().await;
            block_in_place(|| cancel.join()).unwrap();
            block_in_place(|| observer.until(ONE_HOLDER, LONG));
            if let Err(error) = released {
                let is_reported = matches!(error, Error::ReleaseFailed { .. });
                assert!(is_reported, "{error:?}");
                failures += 1;
                // The inner hold may be left, so the session is not used again.
                outer.release().await.unwrap();
                block_in_place(|| observer.until(NOBODY, LONG));
                assert_full_strength(&pool, 1).await;
                outer = LOCK.acquire(&pool).await.unwrap();
                assert_ne!(outer.backend_pid(), pid);
            }
            if failures == FAILURES {
                return;
            }
        }
        panic!("{failures} statements were cancelled");
    });
}

#[test]
fn a_statement_that_the_work_dropped_does_not_delay_its_error() {
    run(async {
        let database = Database::new();
        let observer = &mut Observer::of(&database);
        let pool = database.deadpool(1);
        let work = LOCK.with(&pool, async |conn| {
            let query = conn.batch_execute("SELECT pg_sleep(600)");
            let in_time = timeout(Duration::from_millis(50), query).await;
            in_time.map_err(|_| Error::Standby)?.map_err(Error::from)
        });
        let worked = timeout(LONG, work).await.expect("it returns");
        assert!(matches!(worked, Err(Error::Standby)), "{worked:?}");
        block_in_place(|| observer.until(NOBODY, LONG));
        assert_full_strength(&pool, 1).await;
    });
}
