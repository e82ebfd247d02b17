//! What is measured on: one throwaway PostgreSQL that keeps what it commits, over its Unix socket.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::r2d2::Pool;
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

#[derive(Debug)]
pub(crate) struct Server(Cluster);

impl Server {
    pub(crate) fn start() -> Self {
        let mut builder = Cluster::builder();
        for (name, value) in SETTINGS {
            builder = builder.setting(name, value);
        }
        Self(builder.start())
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
        .build(database.manager())
        .expect("the settings of the pool are complete")
}

pub(crate) fn run(database: &Database, sql: &str) {
    database
        .connect()
        .batch_execute(sql)
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}
