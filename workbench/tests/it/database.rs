//! A database of its own.

use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};

use diesel::connection::SimpleConnection;
use diesel_async::SimpleAsyncConnection;
use workbench::{Database, block_on, runtime};

use crate::{is, text};

#[test]
fn databases_are_apart() {
    let databases = [Database::new(), Database::with_encoding("LATIN1")];
    for (database, encoding) in databases.iter().zip(["UTF8", "LATIN1"]) {
        let mut conn = database.connect();
        conn.batch_execute("CREATE TABLE mine ()").unwrap();
        assert_eq!(text(&mut conn, "current_database()"), database.name());
        assert_eq!(text(&mut conn, "getdatabaseencoding()"), encoding);
    }
}

#[test]
fn a_database_is_dropped_when_its_test_fails_even_if_a_session_is_connected() {
    let mut session = None;
    let failed = catch_unwind(AssertUnwindSafe(|| {
        let database = Database::new();
        session = Some(database.connect());
        panic_any(database.name().to_owned());
    }));
    let name = failed.unwrap_err().downcast::<String>().unwrap();
    let found = format!("EXISTS (SELECT FROM pg_database WHERE datname = '{name}')");
    assert!(!is(&mut Database::new().connect(), &found));
    let ended = SimpleConnection::batch_execute(&mut session.unwrap(), "");
    assert!(ended.is_err());
}

#[test]
fn pools_have_the_size_that_is_asked_for_and_serve_any_thread() {
    let database = Database::new();
    let (pool, deadpool, bb8) = (database.pool(1), database.deadpool(1), database.bb8(1));
    let _only = pool.get().unwrap();
    assert!(pool.try_get().is_none());
    block_on(async {
        let mut conn = deadpool.get().await.unwrap();
        conn.batch_execute("SELECT 1").await.unwrap();
        let other = runtime().spawn(async move {
            let mut conn = bb8.get().await.unwrap();
            conn.batch_execute("SELECT 1").await
        });
        other.await.unwrap().unwrap();
    });
}
