//! Throwaway PostgreSQL servers for the tests, doctests, examples and benchmarks of `diesel_interlock`.
//!
//! | Type | What it is |
//! |---|---|
//! | [`Database`] | an empty database for one test, dropped with the value |
//! | [`Cluster`] | a PostgreSQL server of its own, which can be stopped, killed and followed by a standby |
//! | [`Patroni`] | three servers whose primary Patroni chooses, and a proxy that follows it |
//! | [`PgBouncer`] | a pooler in front of a database |
//! | [`Pgpool`] | a pooler in front of a primary and a standby, which sends reads to the standby |
//! | [`RoundTrips`] | a proxy in front of a database or a pooler, which counts round trips and can slow down, cut or break the network |
//! | [`Endpoint`] | what these have in common: URL, connections and pools |
//!
//! # Panics
//!
//! This is test support: what goes wrong is a panic that says what to do about it, and every wait has a deadline.
//!
//! # The server
//!
//! [`Database::new`] uses the server of the environment variable `DATABASE_URL` if that is set. Otherwise it starts one
//! server for the whole process, from the PostgreSQL installation that it finds or that `PGBINDIR` names.
//!
//! # Nothing is left behind
//!
//! A server and its directory go away with the process that started it, however that ends: at the end of `main`, after
//! a panic, `abort`, Ctrl-C or `kill -9`, and also while the server is still being set up. A shell sees to that, which
//! outlives the process by a fraction of a second. Databases that a killed process left on the server of `DATABASE_URL`
//! are dropped by the first run that starts an hour later.

#[cfg(feature = "async")]
mod asynchronous;
mod cluster;
mod database;
mod endpoint;
mod patroni;
mod pgbouncer;
mod pgpool;
mod program;
mod round_trips;
mod watcher;

#[cfg(feature = "async")]
pub use asynchronous::{block_on, runtime};
pub use cluster::{Cluster, ClusterBuilder, StopMode};
pub use database::Database;
pub use endpoint::Endpoint;
pub use patroni::Patroni;
pub use pgbouncer::{PgBouncer, PoolMode};
pub use pgpool::Pgpool;
pub use round_trips::{Exchange, Fault, RoundTrips, When};
