//! The schema can be installed through any pooler; an application's own migrations need a session.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use diesel::connection::BoxableConnection;
use diesel::migration::{
    Migration, MigrationMetadata, MigrationName, MigrationSource, MigrationVersion, Result,
};
use diesel::pg::Pg;
use diesel_interlock::{Error, migrations};
use workbench::{Cluster, Database, Endpoint, PgBouncer, PoolMode};

use crate::{connect, free, is_held_by, number, pool, turn_sessions};

const LOCKS: &str = "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = \
     (SELECT oid FROM pg_database WHERE datname = current_database()))";

#[test]
fn twenty_instances_install_through_a_pooler_in_transaction_mode() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 4);
    let start = Barrier::new(20);
    std::thread::scope(|scope| {
        for _ in 0..20 {
            scope.spawn(|| {
                let pool = pool(&pooler, 1);
                start.wait();
                migrations::install(&pool).unwrap();
            });
        }
    });
    let conn = &mut database.connect();
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations"));
    let recorded = number(
        conn,
        "(SELECT count(*) FROM resource_control.installed_migration)",
    );
    let directories = files
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().path().is_dir());
    assert_eq!(recorded, directories.count() as i64);
    assert_eq!(number(conn, LOCKS), 0);
}

/// Counts the warnings that are logged on this thread.
struct Warnings(Arc<AtomicUsize>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        if *event.metadata().level() == tracing::Level::WARN {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn install_warns_of_a_pool_on_which_session_locks_do_not_exclude() {
    use tracing::subscriber::{NoSubscriber, set_global_default, with_default};
    use tracing_subscriber::layer::SubscriberExt;

    // As long as there is only one subscriber, tracing asks only the thread that reaches a call site
    // first, and caches for all threads that nobody listens:
    // <https://github.com/tokio-rs/tracing/issues/3611>.
    set_global_default(NoSubscriber::new()).unwrap();
    for (mode, expected) in [(PoolMode::Transaction, 1), (PoolMode::Session, 0)] {
        let database = Database::new();
        let pooler = PgBouncer::in_front_of(&database, mode, 4);
        let pool = pool(&pooler, 2);
        drop([(); 2].map(|()| pool.get().unwrap()));
        let warnings = Arc::new(AtomicUsize::new(0));
        let subscriber = tracing_subscriber::registry().with(Warnings(warnings.clone()));
        let installed = with_default(subscriber, || migrations::install(&pool));
        assert_eq!(
            (installed.unwrap(), warnings.load(Ordering::SeqCst)),
            ((), expected)
        );
    }
}

/// A migration outside a transaction, during which the pooler changes the session.
struct Turning(Endpoint);

impl MigrationSource<Pg> for Turning {
    fn migrations(&self) -> Result<Vec<Box<dyn Migration<Pg>>>> {
        Ok(vec![Box::new(Self(self.0.clone()))])
    }
}

impl Migration<Pg> for Turning {
    fn run(&self, _: &mut dyn BoxableConnection<Pg>) -> Result<()> {
        turn_sessions(&self.0);
        Ok(())
    }

    fn revert(&self, _: &mut dyn BoxableConnection<Pg>) -> Result<()> {
        Ok(())
    }

    fn metadata(&self) -> &dyn MigrationMetadata {
        self
    }

    fn name(&self) -> &dyn MigrationName {
        self
    }
}

impl MigrationMetadata for Turning {
    fn run_in_transaction(&self) -> bool {
        false
    }
}

impl MigrationName for Turning {
    fn version(&self) -> MigrationVersion<'_> {
        "1".into()
    }
}

impl fmt::Display for Turning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("1_turning")
    }
}

#[test]
fn migrations_that_moved_to_another_session_are_an_error_that_names_the_session_with_the_lock() {
    let cluster = Cluster::start();
    let database = cluster.database();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    turn_sessions(&pooler);
    let moved = migrations::run_pending(&mut connect(&pooler), Turning(pooler.clone()));
    assert_moved(&moved, &mut database.connect());
}

#[cfg(feature = "deadpool")]
#[test]
fn asynchronous_migrations_that_moved_are_an_error_that_names_the_session_with_the_lock() {
    if !crate::follows_prepared_statements() {
        return;
    }
    let cluster = Cluster::start();
    let database = cluster.database();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    turn_sessions(&pooler);
    let moved = workbench::block_on(async {
        let conn = pooler.connect_async().await;
        migrations::run_pending(conn, Turning(pooler.clone())).await
    });
    assert_moved(&moved, &mut database.connect());
}

/// Asserts that the error names the session that holds the lock, and terminates it, as the error
/// advises.
#[track_caller]
fn assert_moved<T: fmt::Debug>(
    moved: &std::result::Result<T, Error>,
    observer: &mut diesel::PgConnection,
) {
    let Err(Error::SessionMoved { pid, .. }) = moved else {
        panic!("{moved:?}");
    };
    assert!(is_held_by(observer, *pid));
    free(observer, *pid);
}

#[test]
fn migrations_run_through_a_pooler_in_session_mode() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Session, 4);
    let ran = migrations::run_pending(&mut connect(&pooler), Turning(pooler.clone()));
    assert_eq!(ran.unwrap(), ["1"]);
    assert_eq!(number(&mut database.connect(), LOCKS), 0);
}
