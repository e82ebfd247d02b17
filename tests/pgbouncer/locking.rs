//! Behind PgBouncer: `check_exclusion`, session locks that are refused or reported as moved, and
//! transaction locks.

use diesel::connection::SimpleConnection;
use diesel::pg::PgConnection;
use diesel_interlock::{AdvisoryLock, Error, check_exclusion};
use workbench::{Database, PgBouncer, PoolMode};

use crate::{connect, free, is_held_by, number, pool};

static LOCK: AdvisoryLock = AdvisoryLock::named("behind a pooler");

const HELD: &str = "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))";

#[test]
fn in_transaction_mode_check_exclusion_finds_the_pooler() {
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
fn in_session_mode_session_locks_exclude() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Session, 4);
    let pool = pool(&pooler, 2);
    check_exclusion(&pool).unwrap();
    let guard = LOCK.acquire(&pool).unwrap();
    assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    guard.release().unwrap();
}

#[test]
fn a_release_on_another_session_names_the_session_that_holds_the_lock_and_ends_nothing() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    let pool = pool(&pooler, 1);
    let observer = &mut database.connect();
    let several = AdvisoryLock::all([&LOCK, &LOCK.key(1), &LOCK.key(2).shared()]);
    for lock in [&LOCK, &several] {
        let guard = lock.acquire(&pool).unwrap();
        let pid = guard.backend_pid();
        // Another client uses the session of the guard meanwhile.
        let mut others = [(); 2].map(|()| connect(&pooler));
        for other in &mut others {
            other.batch_execute("BEGIN").unwrap();
        }
        let [mut first, mut second] = others;
        let is_first = number(&mut first, "pg_backend_pid()::bigint") == pid.into();
        let (other, idle) = if is_first {
            (&mut first, &mut second)
        } else {
            (&mut second, &mut first)
        };
        idle.batch_execute("COMMIT").unwrap();
        assert_moved(&guard.release(), pid, observer);
        other.batch_execute("SELECT 1").unwrap();
        other.batch_execute("COMMIT").unwrap();
        assert!(is_held_by(observer, pid));
        free(observer, pid);
    }
}

/// Asserts that the error names the session that holds all the locks.
#[track_caller]
fn assert_moved(released: &Result<(), Error>, pid: i32, observer: &mut PgConnection) {
    match released {
        Err(Error::SessionMoved { pid: moved, .. }) => assert_eq!(*moved, pid),
        other => panic!("{other:?}"),
    }
    assert!(is_held_by(observer, pid));
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
fn in_statement_mode_check_exclusion_finds_the_pooler_and_transactions_are_refused() {
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
