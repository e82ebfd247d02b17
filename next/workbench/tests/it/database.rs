//! A database of its own.

use std::panic::catch_unwind;

use diesel::connection::SimpleConnection;
use diesel_async::SimpleAsyncConnection;
use workbench::{Cluster, Database, block_on, runtime};

use crate::{is, text};

fn exists(database: &str, observer: &Database) -> bool {
    let found = format!("EXISTS (SELECT FROM pg_database WHERE datname = '{database}')");
    is(&mut observer.connect(), &found)
}

#[test]
fn databases_are_apart() {
    let databases = [Database::new(), Database::new()];
    for database in &databases {
        let mut conn = database.connect();
        conn.batch_execute("CREATE TABLE mine ()").unwrap();
        assert_eq!(text(&mut conn, "current_database()"), database.name());
    }
}

#[test]
fn a_database_has_the_encoding_that_is_asked_for() {
    let database = Database::with_encoding("LATIN1");
    let encoding = text(
        &mut database.connect(),
        "current_setting('server_encoding')",
    );
    assert_eq!(encoding, "LATIN1");
}

#[test]
fn a_dropped_database_is_gone_even_if_a_session_is_connected() {
    let observer = Database::new();
    let database = Database::new();
    let name = database.name().to_owned();
    let mut conn = database.connect();
    conn.batch_execute("BEGIN; CREATE TABLE unfinished ()")
        .unwrap();
    assert!(exists(&name, &observer));

    drop(database);
    assert!(!exists(&name, &observer));
    assert!(conn.batch_execute("SELECT 1").is_err());
}

#[test]
fn a_database_is_dropped_when_the_test_fails() {
    let observer = Database::new();
    let failed = catch_unwind(|| {
        let database = Database::new();
        std::panic::panic_any(database.name().to_owned());
    });
    let name = failed.unwrap_err().downcast::<String>().unwrap();
    assert!(!exists(&name, &observer));
}

#[test]
fn a_database_may_outlive_its_cluster() {
    let cluster = Cluster::start();
    let database = cluster.database();
    database.connect();
    drop(cluster);
    drop(database);
}

#[test]
fn a_pool_opens_connections_as_they_are_needed() {
    let database = Database::new();
    let pool = database.pool(2);
    assert_eq!(pool.state().connections, 0);
    let _first = pool.get().unwrap();
    let second = pool.get().unwrap();
    assert!(pool.try_get().is_none());
    drop(second);
    assert!(pool.try_get().is_some());
}

#[test]
fn asynchronous_pools_are_used_from_any_thread() {
    let database = Database::new();
    let (deadpool, bb8) = (database.deadpool(1), database.bb8(1));
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
