//! Pools borrowed from a wrapper, connections that are reborrowed, and test transactions of Diesel.

use std::ops::Deref;
use std::sync::Arc;

use diesel::connection::{
    AnsiTransactionManager, Instrumentation, InstrumentationEvent, TransactionManager,
};
use diesel::prelude::*;
use workbench::Database;

use crate::assert_matches;
use crate::half::{AdvisoryLock, Done, Error, Once, PgPool, pool, unchecked_pool};
use crate::support::{Observer, assert_pool_whole, installed, run};

static LOCK: AdvisoryLock = AdvisoryLock::named("borrowing");

/// A wrapper, like the shared state of a web framework.
struct State<T>(T);

impl<T> Deref for State<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

#[test]
fn a_pool_is_borrowed_out_of_a_wrapper() {
    let database = Database::new();
    let pool = Arc::new(pool(&database, 1));
    LOCK.acquire(&pool).unwrap().release().unwrap();
    let state = State(Arc::clone(&pool));
    LOCK.acquire(&state).unwrap().release().unwrap();
    diesel_interlock::migrations::install::<PgPool>(&state).unwrap();
}

#[test]
fn a_connection_is_reborrowed() {
    let database = Database::new();
    let pool = pool(&database, 1);
    let conn = &mut pool.get().unwrap();
    for _ in 0..2 {
        LOCK.transaction(conn, |conn| diesel::sql_query("SELECT 1").execute(conn))
            .unwrap();
        LOCK.with_on(conn, |conn| diesel::sql_query("SELECT 1").execute(conn))
            .unwrap();
        let booked: QueryResult<usize> = conn.transaction(|conn| {
            LOCK.acquire_xact(conn)?;
            diesel::sql_query("SELECT 1").execute(conn)
        });
        booked.unwrap();
    }
}

#[test]
fn an_error_of_the_crate_passes_through_diesels() {
    let database = Database::new();
    let conn = &mut database.connect();
    let refused: QueryResult<()> = LOCK.acquire_xact(conn).map_err(diesel::result::Error::from);
    let error = Error::from(refused.unwrap_err());
    assert!(matches!(error, Error::OutsideTransaction));
    assert!(!error.is_unavailable());
}

/// Panics after each statement.
struct Panics;

impl Instrumentation for Panics {
    fn on_connection_event(&mut self, event: InstrumentationEvent<'_>) {
        if let InstrumentationEvent::FinishQuery { .. } = event {
            panic!("in the instrumentation");
        }
    }
}

#[test]
fn a_panic_between_a_statement_and_its_reply_leaves_nothing() {
    let database = Database::new();
    let pool = unchecked_pool(&database, 1);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut conn = pool.get().unwrap();
        conn.set_instrumentation(Panics);
        drop(conn);
        let _ = LOCK.try_acquire(&pool);
    }));
    assert!(panicked.is_err());
    Observer::of(&database).assert_free(LOCK.lock_key());
    assert_pool_whole(&pool, &database);
}

#[test]
fn in_a_test_transaction_work_is_done_once_and_undone_with_it() {
    let database = installed();
    let conn = &mut database.connect();
    let once = Once::named("charge");
    conn.begin_test_transaction().unwrap();
    let failed: Result<Done, Error> = once.run(conn, |conn| {
        Ok(diesel::sql_query("SELECT 1/0")
            .execute(conn)
            .map(|_| "failed")?)
    });
    assert!(failed.is_err());
    for is_first in [true, false] {
        let done: Result<Done, Error> = once.run(conn, |_conn| Ok("done"));
        assert_eq!(done.unwrap().is_first(), is_first);
    }
    *conn = database.connect();
    let done: Result<Done, Error> = once.run(conn, |_conn| Ok("done"));
    assert!(done.unwrap().is_first());
}

#[test]
fn a_test_transaction_does_not_count_as_a_transaction() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.begin_test_transaction().unwrap();
    LOCK.with_on(conn, |conn| diesel::sql_query("SELECT 1").execute(conn))
        .unwrap();
    LOCK.transaction(conn, |conn| diesel::sql_query("SELECT 1").execute(conn))
        .unwrap();
    assert_eq!(
        Observer::of(&database).holders(LOCK.lock_key()),
        1,
        "the lock stays until the test transaction ends"
    );
}

#[test]
fn a_transaction_of_diesel_that_was_left_open_in_the_scope_is_reported() {
    let database = Database::new();
    let conn = &mut database.connect();
    let left = LOCK.with_on(conn, |conn| {
        Ok::<_, Error>(AnsiTransactionManager::begin_transaction(conn)?)
    });
    assert_matches!(left, Err(Error::TransactionLeftOpen(_)));
    Observer::of(&database).assert_free(LOCK.lock_key());
}

/// The caller's session goes on, and so does the transaction that plain SQL has opened on it.
#[test]
fn a_refusal_ends_no_session_of_the_callers() {
    let database = Database::new();
    let conn = &mut database.connect();
    run(conn, "BEGIN; CREATE TABLE kept ()");
    let refused = LOCK.try_with_on(conn, |_| Ok::<_, Error>(()));
    assert_matches!(refused, Err(Error::InsideTransaction));
    Observer::of(&database).assert_free(LOCK.lock_key());
    run(conn, "COMMIT; SELECT FROM kept");
}
