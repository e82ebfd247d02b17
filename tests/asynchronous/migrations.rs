//! Migrations: this crate's over a pool and on a connection, and the application's own in both kinds of runtime.

use std::future::Future;
use std::time::Duration;

use diesel::migration::{Migration, MigrationName, MigrationSource, MigrationVersion};
use diesel::pg::Pg;
use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use diesel_interlock::Error;
use diesel_interlock::asynchronous::{Pool, migrations};
use diesel_interlock::error::Misplaced;
use workbench::Database;

use crate::dropping::poll_times;
use crate::run;
use crate::transactions::{count, freed};

const HOLDERS: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted \
     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// Migrations of an application, which are made of a name and of what they send.
#[derive(Clone, Copy)]
struct Application(&'static [(&'static str, &'static str)]);

struct Step {
    version: Name,
    up: &'static str,
    metadata: Metadata,
}

struct Name(&'static str);

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

impl MigrationName for Name {
    fn version(&self) -> MigrationVersion<'_> {
        MigrationVersion::from(self.0)
    }
}

/// Whether the migration is run in a transaction.
struct Metadata(bool);

impl diesel::migration::MigrationMetadata for Metadata {
    fn run_in_transaction(&self) -> bool {
        self.0
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

impl Migration<Pg> for Step {
    fn run(&self, conn: &mut dyn diesel::connection::BoxableConnection<Pg>) -> Result<(), Failure> {
        assert_ne!(self.up, "panic", "in the migration");
        Ok(conn.batch_execute(self.up)?)
    }

    fn revert(&self, _: &mut dyn diesel::connection::BoxableConnection<Pg>) -> Result<(), Failure> {
        Ok(())
    }

    fn metadata(&self) -> &dyn diesel::migration::MigrationMetadata {
        &self.metadata
    }

    fn name(&self) -> &dyn MigrationName {
        &self.version
    }
}

impl MigrationSource<Pg> for Application {
    fn migrations(&self) -> Result<Vec<Box<dyn Migration<Pg>>>, Failure> {
        let step = |(version, up): &(&'static str, &'static str)| {
            let step = Step {
                version: Name(version),
                up,
                metadata: Metadata(!up.contains("CONCURRENTLY")),
            };
            Box::new(step) as Box<dyn Migration<Pg>>
        };
        Ok(self.0.iter().map(step).collect())
    }
}

const TWO: Application = Application(&[
    ("20260101", "CREATE TABLE users (id int)"),
    (
        "20260102",
        "INSERT INTO users VALUES (1); SELECT pg_sleep(0.05)",
    ),
]);
const INDEXES: Application = Application(&[
    (
        "20260101",
        "CREATE TABLE users (id int); SET lock_timeout = '100ms'; SELECT pg_sleep(0.3)",
    ),
    (
        "20260105",
        "CREATE INDEX CONCURRENTLY users_id ON users (id)",
    ),
]);
const FAILS: Application = Application(&[
    ("20260101", "CREATE TABLE users (id int)"),
    ("20260103", "SELECT 1 / 0"),
]);
const FAILS_AT_COMMIT: Application = Application(&[
    ("20260101", "CREATE TABLE users (id int)"),
    (
        "20260106",
        "CREATE TABLE customers (id int PRIMARY KEY); \
         CREATE TABLE jobs (customer int REFERENCES customers DEFERRABLE INITIALLY DEFERRED); \
         INSERT INTO jobs VALUES (1)",
    ),
]);
const PANICS: Application = Application(&[
    ("20260101", "CREATE TABLE users (id int)"),
    ("20260104", "panic"),
]);

/// Runs a future on a runtime of one thread.
fn run_on_one_thread<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

async fn installs<P: Pool>(database: Database, pool: P) {
    let observer = &mut database.connect();
    let instances: Vec<_> = (0..8)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move { migrations::install(&pool).await.unwrap().len() })
        })
        .collect();
    let mut ran = 0;
    for instance in instances {
        ran += instance.await.unwrap();
    }
    let versions = "SELECT count(*) FROM resource_control.installed_migration";
    assert_eq!(i64::try_from(ran).unwrap(), count(observer, versions));
    assert_eq!(count(observer, HOLDERS), 0);
    assert!(migrations::install(&pool).await.unwrap().is_empty());
    assert!(migrations::take_over(&pool).await.unwrap().is_empty());
    assert_eq!(migrations::uninstall(&pool).await.unwrap().len(), ran);
    assert!(migrations::uninstall(&pool).await.unwrap().is_empty());

    let conn = &mut *pool.check_out().await.unwrap();
    assert_eq!(migrations::install_on(conn).await.unwrap().len(), ran);
    assert!(migrations::take_over_on(conn).await.unwrap().is_empty());
    assert_eq!(migrations::uninstall_on(conn).await.unwrap().len(), ran);
    assert_eq!(count(observer, HOLDERS), 0);
    conn.begin_test_transaction().await.unwrap();
    for refused in [
        migrations::install_on(conn).await,
        migrations::uninstall_on(conn).await,
        migrations::take_over_on(conn).await,
    ] {
        assert!(matches!(
            refused,
            Err(Error::Misplaced(Misplaced::CommitsInTransaction))
        ));
    }
}

#[test]
fn eight_instances_install_once() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(4);
        installs(database, pool).await;
        let database = Database::new();
        let pool = database.bb8(4);
        installs(database, pool).await;
    });
}

/// Every second future is dropped on its way. What was installed until then stays.
#[test]
fn a_dropped_installation_holds_nothing_and_can_be_repeated() {
    run(async {
        let database = Database::new();
        let observer = &mut database.connect();
        let pool = database.deadpool(2);
        let mut polls = 0;
        loop {
            let installed = poll_times(migrations::install(&pool), polls).await;
            freed(observer).await;
            if let Some(installed) = installed {
                installed.unwrap();
                break;
            }
            polls += 3;
        }
        assert!(polls >= 6, "{polls}");
        assert!(migrations::install(&pool).await.unwrap().is_empty());
        polls = 0;
        loop {
            let conn = &mut *pool.check_out().await.unwrap();
            let removed = poll_times(migrations::uninstall_on(conn), polls).await;
            freed(observer).await;
            if let Some(removed) = removed {
                removed.unwrap();
                break;
            }
            polls += 3;
        }
        let left = "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'";
        assert_eq!(count(observer, left), 0);
    });
}

#[test]
fn a_transaction_that_was_left_open_in_the_pool_ends_with_the_installation_that_found_it() {
    run(async {
        let database = Database::new();
        let observer = &mut database.connect();
        let pool = database.deadpool(2);
        let mut conns = [
            pool.check_out().await.unwrap(),
            pool.check_out().await.unwrap(),
        ];
        for conn in &mut conns {
            let left = "BEGIN; SELECT pg_advisory_xact_lock_shared(1)";
            conn.batch_execute(left).await.unwrap();
        }
        drop(conns);
        assert_eq!(count(observer, HOLDERS), 2);
        let removed = migrations::uninstall(&pool).await;
        assert!(
            matches!(removed, Err(Error::TransactionInPool)),
            "{removed:?}"
        );
        // The other connection was not used.
        let mut looks = 0;
        while count(observer, HOLDERS) != 1 {
            looks += 1;
            assert!(looks < 2000, "{} left", count(observer, HOLDERS));
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
}

/// Returns how many migrations each of the instances ran, in ascending order.
async fn run_by_instances<P: Pool>(number: usize, pool: &P, source: Application) -> Vec<usize> {
    let instances: Vec<_> = (0..number)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move { migrations::run_pending(&pool, source).await.unwrap().len() })
        })
        .collect();
    let mut ran = Vec::new();
    for instance in instances {
        ran.push(instance.await.unwrap());
    }
    ran.sort();
    ran
}

async fn runs<P: Pool>(database: Database, pool: P) {
    let observer = &mut database.connect();
    assert_eq!(run_by_instances(4, &pool, TWO).await, [0, 0, 0, 2]);
    assert_eq!(count(observer, "SELECT count(*) FROM users"), 1);
    assert_eq!(count(observer, HOLDERS), 0);
    assert!(
        migrations::run_pending(&pool, TWO)
            .await
            .unwrap()
            .is_empty()
    );

    for (migrations, failing) in [(FAILS, "20260103"), (FAILS_AT_COMMIT, "20260106")] {
        let failed = migrations::run_pending(&pool, migrations).await;
        assert!(matches!(failed, Err(Error::Migration(_))), "{failed:?}");
        let message = failed.unwrap_err().to_string();
        assert!(message.contains(failing), "{message}");
        assert_eq!(count(observer, HOLDERS), 0, "the lock was released");
    }

    let panicking = tokio::spawn({
        let pool = pool.clone();
        async move { migrations::run_pending(&pool, PANICS).await }
    });
    assert!(panicking.await.unwrap_err().is_panic());
    freed(observer).await;

    // The pool has its full strength, and no connection is in a transaction.
    let mut all = Vec::new();
    for _ in 0..pool.size() {
        let mut conn = pool.check_out().await.unwrap();
        conn.transaction(async |_| Ok::<_, Error>(()))
            .await
            .unwrap();
        all.push(conn);
    }
}

#[test]
fn an_applications_migrations_run_once_in_a_runtime_of_several_threads() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(3);
        runs(database, pool).await;
        let database = Database::new();
        let pool = database.bb8(3);
        runs(database, pool).await;
    });
}

#[test]
fn an_applications_migrations_run_once_in_a_runtime_of_one_thread() {
    run_on_one_thread(async {
        let database = Database::new();
        let pool = database.deadpool(3);
        runs(database, pool).await;
        let database = Database::new();
        let pool = database.bb8(3);
        runs(database, pool).await;
    });
}

/// The index waits for snapshots, at most for the `lock_timeout`. A waiter that waited on the server would have one for longer.
#[test]
fn an_instance_indexes_concurrently_while_seven_wait() {
    run(async {
        let database = Database::new();
        let ran = run_by_instances(8, &database.deadpool(8), INDEXES).await;
        assert_eq!(ran, [0, 0, 0, 0, 0, 0, 0, 2]);
        assert_eq!(count(&mut database.connect(), HOLDERS), 0);
    });
}

#[test]
fn migrations_that_have_begun_go_on_if_the_future_is_dropped() {
    run(async {
        let database = Database::new();
        let observer = &mut database.connect();
        let pool = database.deadpool(2);
        let mut running = Box::pin(migrations::run_pending(&pool, TWO));
        let is_begun = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(0.05)' \
             AND datname = current_database()";
        loop {
            let poll = tokio::time::timeout(Duration::from_millis(1), &mut running).await;
            assert!(poll.is_err(), "it was not seen");
            if count(observer, is_begun) > 0 {
                break;
            }
        }
        drop(running);
        freed(observer).await;
        assert_eq!(count(observer, "SELECT count(*) FROM users"), 1);
        assert!(
            migrations::run_pending(&pool, TWO)
                .await
                .unwrap()
                .is_empty()
        );
    });
}
