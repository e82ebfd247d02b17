//! Throwaway PostgreSQL servers for the tests, doctests, examples and benches of
//! `diesel_interlock`.
//!
//! | Type | What it is |
//! |---|---|
//! | [`Database`] | an empty database for one test, dropped with the value |
//! | [`Cluster`] | a PostgreSQL server of its own, which may be stopped, restarted and followed by a standby |
//! | [`PgBouncer`] | a pooler in front of a cluster |
//! | [`RoundTrips`] | a proxy in front of a database that counts round trips and can swallow the network |
//!
//! ```
//! use diesel::prelude::*;
//! use workbench::{Database, RoundTrips};
//!
//! let database = Database::new();
//! let proxy = RoundTrips::in_front_of(&database);
//! let mut conn = PgConnection::establish(&proxy.url()).unwrap();
//!
//! let trips = proxy.count(|| {
//!     diesel::sql_query("SELECT 1").execute(&mut conn).unwrap();
//! });
//! assert!(trips >= 1);
//! ```
//!
//! This is test support: whatever goes wrong is a panic that says what to do about it, and whatever
//! waits has a deadline.
//!
//! # Which server
//!
//! [`Database::new`] uses the server of the environment variable `DATABASE_URL` if that is set.
//! Otherwise it starts one server for the whole process from the PostgreSQL installation that it
//! finds; `PGBINDIR` names another one. PostgreSQL 13 or newer is needed.
//!
//! # Nothing is left behind
//!
//! A server and its directory go away with the process that started it, however that ends: see
//! [`Cluster`].

mod cluster;
mod database;
mod pgbouncer;
mod round_trips;

pub use cluster::{Cluster, ClusterBuilder, StopMode};
pub use database::{Database, block_on};
pub use pgbouncer::{PgBouncer, PoolMode};
pub use round_trips::RoundTrips;

/// The runtime that all asynchronous tests of a process share.
pub fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: std::sync::OnceLock<tokio::runtime::Runtime> = std::sync::OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build()
            .expect("threads can be started")
    })
}
