//! Session locks behind a pooler are found out, and transaction locks work.

use diesel_interlock::{AdvisoryLock, Error, check_exclusion};
use workbench::{Database, PgBouncer, PoolMode};

use crate::{connect, number, pool, turn_sessions};

static LOCK: AdvisoryLock = AdvisoryLock::named("behind a pooler");

const HELD: &str = "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";

#[test]
fn in_transaction_mode_session_locks_exclude_nobody() {
    let database = Database::new();
    for sessions in [1, 2] {
        let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, sessions);
        let pool = pool(&pooler, 2);
        assert!(matches!(
            check_exclusion(&pool),
            Err(Error::NotExclusive(_))
        ));
    }
}

#[test]
fn in_session_mode_they_do() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Session, 4);
    let pool = pool(&pooler, 2);
    check_exclusion(&pool).unwrap();
    let guard = LOCK.acquire(&pool).unwrap();
    assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    guard.release().unwrap();
}

#[test]
fn a_release_on_another_session_frees_what_it_left_behind() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    let pool = pool(&pooler, 1);
    let observer = &mut database.connect();
    let several = AdvisoryLock::all([&LOCK, &LOCK.key(1), &LOCK.key(2).shared()]);
    for lock in [&LOCK, &several] {
        let guard = lock.acquire(&pool).unwrap();
        let pid = guard.backend_pid();
        turn_sessions(&pooler);
        match guard.release() {
            Err(Error::SessionMoved {
                pid: moved,
                is_freed,
                ..
            }) => {
                assert_eq!(moved, pid);
                assert!(is_freed, "the session was idle");
            }
            other => panic!("{other:?}"),
        }
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while number(observer, HELD) > 0 {
            assert!(std::time::Instant::now() < end, "it is still held");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[test]
fn transaction_locks_work() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    let conn = &mut connect(&pooler);
    for _ in 0..3 {
        let locked: Result<(), Error> = LOCK.transaction(conn, |_| {
            assert_eq!(number(&mut database.connect(), HELD), 1);
            Ok(())
        });
        locked.unwrap();
    }
    assert_eq!(number(&mut database.connect(), HELD), 0);
}

#[test]
fn in_statement_mode_session_locks_are_found_out_too_and_transactions_are_refused() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Statement, 2);
    assert!(matches!(
        check_exclusion(&pool(&pooler, 2)),
        Err(Error::NotExclusive(_))
    ));
    let refused = LOCK.transaction(&mut connect(&pooler), |_| Ok::<_, Error>(()));
    assert!(refused.is_err());
    assert_eq!(number(&mut database.connect(), HELD), 0);
}
