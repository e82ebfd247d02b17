//! Statements that cannot be prepared, because the session has prepared statements of their names.
//!
//! Diesel numbers the statements of a connection, and tokio-postgres those of the process, so the next names are known on a
//! blocking connection only.

use diesel::connection::{SimpleConnection, TransactionManager};
use diesel::result::Error as DieselError;

use crate::half::prelude::*;
use crate::half::{AdvisoryLock, AnsiTransactionManager, Database, Error, is_broken};
use crate::support::{Expect, Observer, assert_matches, backend_pid};

static LOCK: AdvisoryLock = AdvisoryLock::named("prepared names");

/// Takes the names under which Diesel is going to prepare its next statements.
fn take_the_names_of_prepared_statements(conn: &mut PgConnection) {
    for number in 0..20 {
        let _ = conn.batch_execute(&format!("PREPARE __diesel_stmt_{number} AS SELECT 1"));
    }
}

#[test]
fn a_release_that_cannot_be_prepared_is_sent_unprepared() {
    let database = Database::new();
    let mut conn = database.connect();
    for by_drop in [false, true] {
        let mut guard = LOCK.acquire_on(&mut conn).unwrap();
        take_the_names_of_prepared_statements(guard.conn());
        if by_drop {
            drop(guard);
        } else {
            guard.release().unwrap();
        }
        assert_eq!(Observer::of(&database).all_held(), 0);
        assert!(!AnsiTransactionManager::is_broken_transaction_manager(
            &mut conn
        ));
    }
}

#[test]
fn a_release_that_cannot_be_prepared_releases_one_hold_of_several() {
    let database = Database::new();
    let mut conn = database.connect();
    let mut observer = Observer::of(&database);
    let mut outer = LOCK.acquire_on(&mut conn).unwrap();
    let mut inner = LOCK.acquire_on(outer.conn()).unwrap();
    take_the_names_of_prepared_statements(inner.conn());
    inner.release().unwrap();
    assert_eq!(observer.all_held(), 1);
    outer.release().unwrap();
    assert_eq!(observer.all_held(), 0);
}

#[test]
fn a_release_that_cannot_be_prepared_in_a_raw_transaction_says_that_it_was_left_open() {
    let database = Database::new();
    let mut conn = database.connect();
    let mut guard = LOCK.acquire_on(&mut conn).unwrap();
    take_the_names_of_prepared_statements(guard.conn());
    guard.conn().batch_execute("BEGIN").unwrap();
    let released = guard.release();
    assert_matches!(released, Err(Error::TransactionLeftOpen { .. }));
    assert_eq!(Observer::of(&database).all_held(), 0);
    conn.transaction(|_| QueryResult::Ok(())).unwrap();
}

#[test]
fn an_attempt_that_cannot_be_prepared_leaves_the_connection_usable() {
    let database = Database::new();
    let mut conn = database.connect();
    let pid = backend_pid(&mut conn);
    take_the_names_of_prepared_statements(&mut conn);
    let failed = LOCK.try_acquire_on(&mut conn).map(drop);
    assert_matches!(failed, Err(Error::Database(_)));
    assert!(!AnsiTransactionManager::is_broken_transaction_manager(
        &mut conn
    ));
    conn.transaction(|_| QueryResult::Ok(())).unwrap();
    assert_eq!(backend_pid(&mut conn), pid);
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn a_try_that_cannot_be_prepared_leaves_a_borrowed_connection_unmarked() {
    let database = Database::new();
    let mut conn = database.connect();
    take_the_names_of_prepared_statements(&mut conn);
    for _ in 0..2 {
        let failed = LOCK.try_acquire_on(&mut conn).map(drop);
        match failed {
            Err(Error::Database(DieselError::DatabaseError(..))) => {}
            other => panic!("{other:?}"),
        }
        assert!(!is_broken(&mut conn));
    }
    conn.batch_execute("DEALLOCATE ALL").unwrap();
    let guard = LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired();
    guard.release().unwrap();
    assert_eq!(Observer::of(&database).all_held(), 0);
}
