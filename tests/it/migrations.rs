//! Many instances start at once; each migration runs once.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_interlock::error::Misplaced;
use diesel_interlock::{Error, migrations};
use diesel_migrations::FileBasedMigrations;
use workbench::Database;

use crate::support::{Observer, assert_matches};

/// A migration directory of a test's own, removed with the value.
pub(crate) struct Directory(PathBuf);

/// Writes a migration directory: names, each with its `up.sql`.
pub(crate) fn directory(test: &str, migrations: &[(&str, &str)]) -> Directory {
    let path = std::env::temp_dir().join(format!("interlock-{test}-{}", std::process::id()));
    let directory = Directory(path);
    fs::create_dir_all(&directory.0).unwrap();
    for (name, up) in migrations {
        let one = directory.0.join(name);
        fs::create_dir_all(&one).unwrap();
        fs::write(one.join("up.sql"), up).unwrap();
        fs::write(one.join("down.sql"), "SELECT 1").unwrap();
        if up.contains("CONCURRENTLY") {
            fs::write(one.join("metadata.toml"), "run_in_transaction = false").unwrap();
        }
    }
    directory
}

impl Directory {
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn migrations(&self) -> FileBasedMigrations {
        FileBasedMigrations::from_path(&self.0).unwrap()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn twenty_instances_run_each_migration_once_one_of_them_concurrently_indexing() {
    const INSTANCES: usize = 20;
    let database = Database::new();
    let source = directory(
        "twenty",
        &[
            (
                "2026-01-01-000000_users",
                "CREATE TABLE users AS SELECT generate_series(1, 1000) AS id",
            ),
            (
                "2026-01-02-000000_index",
                "CREATE INDEX CONCURRENTLY users_id ON users (id)",
            ),
            ("2026-01-03-000000_more", "INSERT INTO users VALUES (0)"),
        ],
    );
    // Shorter than a waiter's snapshot would last if it waited on the server.
    let settings = "SET lock_timeout = '50ms'";
    let start = Barrier::new(INSTANCES);
    let ran: Vec<usize> = std::thread::scope(|scope| {
        let instances: Vec<_> = (0..INSTANCES)
            .map(|_| {
                scope.spawn(|| {
                    let conn = &mut database.connect();
                    conn.batch_execute(settings).unwrap();
                    start.wait();
                    migrations::run_pending(conn, source.migrations())
                        .unwrap()
                        .len()
                })
            })
            .collect();
        instances
            .into_iter()
            .map(|instance| instance.join().unwrap())
            .collect()
    });
    assert_eq!(ran.iter().sum::<usize>(), 3, "{ran:?}");
    assert_eq!(ran.iter().max(), Some(&3), "{ran:?}");

    diesel::table! { users (id) { id -> Integer, } }
    let conn = &mut database.connect();
    assert_eq!(users::table.count().get_result(conn), Ok(1001));
    assert_eq!(Observer::of(&database).all_held(), 0);
}

#[test]
fn a_failing_migration_is_an_error_and_frees_the_lock() {
    let database = Database::new();
    let conn = &mut database.connect();
    let source = directory(
        "failing",
        &[
            ("2026-01-01-000000_good", "CREATE TABLE good (id int)"),
            ("2026-01-02-000000_bad", "SELECT 1/0"),
        ],
    );
    let failed = migrations::run_pending(conn, source.migrations());
    assert_matches!(failed, Err(Error::Migration(_)));
    assert_eq!(Observer::of(&database).all_held(), 0);
    diesel::sql_query("SELECT * FROM good")
        .execute(conn)
        .unwrap();
}

#[test]
fn inside_a_transaction_they_are_refused() {
    let database = Database::new();
    let conn = &mut database.connect();
    let source = directory("in_transaction", &[]);
    conn.transaction(|conn| {
        let refused = migrations::run_pending(conn, source.migrations());
        assert_matches!(
            refused,
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        );
        QueryResult::Ok(())
    })
    .unwrap();
}
