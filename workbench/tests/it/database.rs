//! A database of its own.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};
use workbench::{Cluster, Database};

fn exists(database: &str, conn: &mut PgConnection) -> bool {
    diesel::select(
        sql::<Bool>("EXISTS (SELECT FROM pg_database WHERE datname = ")
            .bind::<Text, _>(database)
            .sql(")"),
    )
    .get_result(conn)
    .unwrap()
}

#[test]
fn databases_are_apart() {
    let names: HashSet<_> = (0..3)
        .map(|_| {
            let database = Database::new();
            let mut conn = database.connect();
            conn.batch_execute("CREATE TABLE mine ()").unwrap();
            let name = diesel::select(sql::<Text>("current_database()::text"))
                .get_result::<String>(&mut conn)
                .unwrap();
            assert_eq!(name, database.name());
            name
        })
        .collect();
    assert_eq!(names.len(), 3);
}

#[test]
fn a_dropped_database_is_gone_even_if_a_session_is_connected() {
    let observed = Database::new();
    let mut observer = observed.connect();
    let database = Database::new();
    let name = database.name().to_owned();
    let mut conn = database.connect();
    conn.batch_execute("BEGIN; CREATE TABLE unfinished ()")
        .unwrap();
    assert!(exists(&name, &mut observer));

    drop(database);
    assert!(!exists(&name, &mut observer));
    assert!(conn.batch_execute("SELECT 1").is_err());
}

#[test]
fn a_database_is_dropped_when_the_test_fails() {
    let observed = Database::new();
    let mut observer = observed.connect();
    let mut name = String::new();
    let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let database = Database::new();
        name = database.name().to_owned();
        panic!("as expected");
    }));
    assert!(failed.is_err());
    assert!(!exists(&name, &mut observer));
}

#[test]
fn a_database_may_outlive_its_cluster() {
    let cluster = Cluster::start();
    let database = cluster.database();
    database.connect();
    drop(cluster);
    let started = Instant::now();
    drop(database);
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_pool_opens_connections_as_they_are_needed() {
    let database = Database::new();
    let pool = database.pool(2);
    assert_eq!(pool.state().connections, 0);
    let mut first = pool.get().unwrap();
    let second = pool.get().unwrap();
    assert!(pool.try_get().is_none());
    first.batch_execute("SELECT 1").unwrap();
    drop(second);
    assert!(pool.try_get().is_some());
}
