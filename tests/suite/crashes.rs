//! The locks of a process that dies are freed, even while one of its statements runs.

use std::env;
use std::time::Duration;

use workbench::Database;

use crate::half::{
    AdvisoryLock, Error, LockKey, Once, PgPool, execute, make_pool, on_one, pool, wait,
};
use crate::support::{Observer, Process, eventually, installed, run};

static LOCK: AdvisoryLock = AdvisoryLock::named("crashes");
static ONCE: Once = Once::named("crashes");

const URL: &str = "INTERLOCK_TEST_CRASH";
/// A statement that runs much longer than a test waits.
const WORK: &str = "SELECT pg_sleep(600)";

/// Runs the same test in a child process, where it takes the given number of locks and runs a
/// statement, and kills that process during the statement.
fn crash(test: &str, locks: i64, take_and_work: impl FnOnce(&PgPool)) {
    if let Ok(url) = env::var(URL) {
        return take_and_work(&make_pool(&url, 1, Duration::from_secs(20)));
    }
    let database = installed();
    let mut observer = Observer::of(&database);
    let process = Process::start(&format!("suite::crashes::{test}"), URL, &database.url());
    eventually("the child process works under its locks", || {
        observer.sleeping() == 1 && observer.all_held() == locks
    });
    process.kill();
    eventually("the locks of the child process are free", || {
        observer.all_held() == 0
    });
}

#[test]
fn a_crash_frees_a_session_lock_in_the_middle_of_a_statement() {
    let test = "a_crash_frees_a_session_lock_in_the_middle_of_a_statement";
    crash(test, 1, |pool| {
        let mut guard = wait(LOCK.acquire(pool)).unwrap();
        let _ = wait(execute(guard.conn(), WORK));
    });
}

#[test]
fn a_crash_frees_several_locks_in_the_middle_of_a_statement() {
    let test = "a_crash_frees_several_locks_in_the_middle_of_a_statement";
    crash(test, 3, |pool| {
        let (shared, pair) = (LOCK.key(1).shared(), AdvisoryLock::new(LockKey::pair(1, 2)));
        let all = AdvisoryLock::all([&LOCK, &shared, &pair]);
        let mut guard = wait(all.try_acquire(pool)).unwrap().acquired().unwrap();
        let _ = wait(execute(guard.conn(), WORK));
    });
}

#[test]
fn a_crash_frees_a_lock_on_a_lent_connection_in_the_middle_of_a_statement() {
    let test = "a_crash_frees_a_lock_on_a_lent_connection_in_the_middle_of_a_statement";
    crash(test, 1, |pool| {
        on_one(pool, |conn| {
            let _: Result<(), Error> =
                wait(LOCK.with_on(conn, work!(|conn| Ok(reply!(execute(conn, WORK))?))));
        });
    });
}

#[test]
fn a_crash_frees_a_transaction_lock_in_the_middle_of_a_statement() {
    let test = "a_crash_frees_a_transaction_lock_in_the_middle_of_a_statement";
    crash(test, 1, |pool| {
        on_one(pool, |conn| {
            let _: Result<(), Error> =
                wait(LOCK.transaction(conn, work!(|conn| Ok(reply!(execute(conn, WORK))?))));
        });
    });
}

#[test]
fn a_crash_frees_several_transaction_locks_in_the_middle_of_a_statement() {
    let test = "a_crash_frees_several_transaction_locks_in_the_middle_of_a_statement";
    crash(test, 2, |pool| {
        on_one(pool, |conn| {
            let all = AdvisoryLock::all([&LOCK, &LOCK.key(1)]);
            let _: Result<(), Error> =
                wait(all.transaction(conn, work!(|conn| Ok(reply!(execute(conn, WORK))?))));
        });
    });
}

#[test]
fn a_crash_frees_the_lock_of_once_in_the_middle_of_a_statement() {
    let test = "a_crash_frees_the_lock_of_once_in_the_middle_of_a_statement";
    crash(test, 1, |pool| {
        on_one(pool, |conn| {
            let _: Result<_, Error> = wait(ONCE.run(
                conn,
                work!(|conn| {
                    reply!(execute(conn, WORK))?;
                    Ok("never")
                }),
            ));
        });
    });
}

/// SQL that fails unless the server checks at this interval, in this session, whether the client is
/// still connected.
fn asserts_interval(interval: &str) -> String {
    format!(
        "DO $$ BEGIN ASSERT current_setting('client_connection_check_interval') = '{interval}', \
         current_setting('client_connection_check_interval'); END $$"
    )
}

/// Asserts that a transaction lock sets the interval for its transaction, and a session lock for
/// the rest of the session.
fn assert_interval(database: &Database, before: &str, under: &str) {
    let (before, under) = (asserts_interval(before), asserts_interval(under));
    let pool = pool(database, 1);
    on_one(&pool, |conn| {
        wait(execute(conn, &before)).unwrap();
        let locked: Result<(), Error> =
            wait(LOCK.transaction(conn, work!(|conn| Ok(reply!(execute(conn, &under))?))));
        locked.unwrap();
        wait(execute(conn, &before)).unwrap();
        let done: Result<_, Error> = wait(ONCE.run(
            conn,
            work!(|conn| {
                reply!(execute(conn, &under))?;
                Ok("done")
            }),
        ));
        assert!(done.unwrap().is_first());
        wait(execute(conn, &before)).unwrap();
    });
    let mut guard = wait(LOCK.acquire(&pool)).unwrap();
    wait(execute(guard.conn(), &under)).unwrap();
    wait(guard.release()).unwrap();
    on_one(&pool, |conn| {
        wait(execute(conn, &under)).unwrap();
        // Poolers and applications reset a session between two uses.
        wait(execute(conn, "RESET ALL")).unwrap();
        wait(execute(conn, &before)).unwrap();
    });
    let mut guard = wait(LOCK.try_acquire(&pool)).unwrap().acquired().unwrap();
    wait(execute(guard.conn(), &under)).unwrap();
}

#[test]
fn a_lock_makes_the_server_check_whether_its_client_is_still_connected() {
    assert_interval(&installed(), "0", "1s");
}

#[test]
fn an_interval_that_an_operator_has_set_stays() {
    for whose in ["DATABASE", "ROLE CURRENT_USER IN DATABASE"] {
        let database = installed();
        let name = database.name();
        let alter = format!("ALTER {whose} {name} SET client_connection_check_interval = '250ms'");
        run(&mut database.connect(), &alter);
        assert_interval(&database, "250ms", "250ms");
    }
}
