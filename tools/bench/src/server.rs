//! What is measured on: one throwaway PostgreSQL that keeps what it commits, over its Unix socket.

use std::process::Command;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::{PgPool, migrations};
use workbench::{Cluster, Database};

/// What every tuning guide changes, and nothing that weakens a commit.
pub(crate) const SETTINGS: [(&str, &str); 9] = [
    ("fsync", "on"),
    ("full_page_writes", "on"),
    ("synchronous_commit", "on"),
    ("shared_buffers", "1GB"),
    ("max_wal_size", "8GB"),
    ("checkpoint_timeout", "30min"),
    ("wal_keep_size", "0"),
    ("maintenance_work_mem", "256MB"),
    ("jit", "off"),
];

/// An ordinary role, with the rights that `grants.sql` gives: a superuser is spared the look at the rights of each function.
pub(crate) const ROLE: &str = "bench";

#[derive(Debug)]
pub(crate) struct Server(Cluster);

impl Server {
    pub(crate) fn start() -> Self {
        let mut builder = Cluster::builder();
        for (name, value) in SETTINGS {
            builder = builder.setting(name, value);
        }
        let cluster = builder.start();
        let created = format!("CREATE ROLE {ROLE} LOGIN");
        let mut owner = cluster.endpoint("postgres").connect();
        owner.batch_execute(&created).expect("the role is new");
        Self(cluster)
    }

    pub(crate) fn cluster(&self) -> &Cluster {
        &self.0
    }

    /// The version, as the server tells it.
    pub(crate) fn version(&self) -> String {
        let version = diesel::dsl::sql::<diesel::sql_types::Text>(
            "'PostgreSQL ' || current_setting('server_version')",
        );
        diesel::select(version)
            .get_result(&mut self.0.endpoint("postgres").connect())
            .expect("the server tells its version")
    }

    /// A database with the schema.
    pub(crate) fn database(&self) -> Database {
        let database = self.0.database();
        migrations::install(&database.pool(1)).expect("the schema can be installed");
        let grants = concat!(env!("CARGO_MANIFEST_DIR"), "/../../migrations/grants.sql");
        let granted = Command::new(self.0.binaries().join("psql"))
            .args([
                "-qX",
                "--output=/dev/null",
                "--set=role=bench",
                "--file",
                grants,
            ])
            .arg(database.url())
            .status();
        assert!(
            granted.is_ok_and(|status| status.success()),
            "psql grants the rights"
        );
        database
    }
}

/// A pool that does not test its connections, as long as all are in use.
pub(crate) fn pool(database: &Database, size: usize) -> PgPool {
    Pool::builder()
        .max_size(size as u32)
        .min_idle(Some(0))
        .test_on_check_out(false)
        .connection_timeout(Duration::from_secs(30))
        .build(ConnectionManager::new(url(database)))
        .expect("the settings of the pool are complete")
}

/// The URL of a session of the ordinary role.
pub(crate) fn url(database: &Database) -> String {
    database.url_with("options", &format!("-c role={ROLE}"))
}

pub(crate) fn run(database: &Database, sql: &str) {
    database
        .connect()
        .batch_execute(sql)
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}
