//! Over TLS, too, a crash of the process or the drop of a guard frees the lock, even while a
//! statement runs.

use std::env;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_async::SimpleAsyncConnection;
use diesel_interlock::{AdvisoryLock, bb8, deadpool};
use workbench::{Endpoint, block_on};

use crate::{database, is};

const URL: &str = "INTERLOCK_TEST_CRASH";
const NAME: &str = "crashes";
const WORK: &str = "SELECT pg_sleep(60)";
const WORKS: &str = "EXISTS (SELECT FROM pg_stat_activity JOIN pg_stat_ssl USING (pid)
    JOIN pg_locks USING (pid) WHERE datname = current_database() AND wait_event = 'PgSleep' AND ssl
    AND locktype = 'advisory' AND granted)";
const IS_FREE: &str =
    "NOT EXISTS (SELECT FROM pg_locks JOIN pg_database ON database = pg_database.oid
    WHERE locktype = 'advisory' AND datname = current_database())";

/// Waits until the condition is true, for much less time than the work takes.
#[track_caller]
fn wait_until(observer: &mut PgConnection, condition: &str) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is(observer, condition) {
        assert!(Instant::now() < end, "not yet: {condition}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs the same test in a child process, which takes a lock and works, and kills that process
/// during its work.
fn crash(test: &str, take_and_work: impl FnOnce(&Endpoint)) {
    if let Ok(url) = env::var(URL) {
        return take_and_work(&Endpoint::new(&url));
    }
    let database = database();
    let observer = &mut database.connect();
    let mut process = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("crashes::{test}")])
        .env(URL, database.tls().url())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until(observer, WORKS);
    process.kill().unwrap();
    process.wait().unwrap();
    wait_until(observer, IS_FREE);
}

#[test]
fn a_crash_frees_the_lock_over_r2d2() {
    crash("a_crash_frees_the_lock_over_r2d2", |server| {
        let pool = server.pool(1);
        let mut guard = AdvisoryLock::named(NAME).acquire(&pool).unwrap();
        let _ = guard.conn().batch_execute(WORK);
    });
}

#[test]
fn a_crash_frees_the_lock_over_deadpool() {
    crash("a_crash_frees_the_lock_over_deadpool", |server| {
        block_on(async {
            let (lock, pool) = (deadpool::AdvisoryLock::named(NAME), server.deadpool(1));
            let mut guard = lock.acquire(&pool).await.unwrap();
            let _ = guard.conn().batch_execute(WORK).await;
        });
    });
}

#[test]
fn a_crash_frees_a_transaction_lock_over_bb8() {
    crash("a_crash_frees_a_transaction_lock_over_bb8", |server| {
        block_on(async {
            let (lock, pool) = (bb8::AdvisoryLock::named(NAME), server.bb8(1));
            let mut conn = pool.get().await.unwrap();
            let work = async |conn: &mut diesel_async::AsyncPgConnection| {
                Ok::<_, diesel_interlock::Error>(conn.batch_execute(WORK).await?)
            };
            let _ = lock.transaction(&mut conn, work).await;
        });
    });
}

#[test]
fn a_guard_that_is_dropped_behind_a_running_statement_frees_the_lock_soon() {
    let database = database();
    let observer = &mut database.connect();
    macro_rules! dropped {
        ($half:ident) => {
            block_on(async {
                let (lock, pool) = ($half::AdvisoryLock::named(NAME), database.tls().$half(1));
                let mut guard = lock.acquire(&pool).await.unwrap();
                let asleep = async {
                    while !is(observer, WORKS) {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                tokio::select! {
                    _ = guard.conn().batch_execute(WORK) => panic!("the work has ended"),
                    () = asleep => {}
                }
                drop(guard);
                wait_until(observer, IS_FREE);
            });
        };
    }
    dropped!(deadpool);
    dropped!(bb8);
}
