//! What the crate promises, tried on a real PostgreSQL: one module per behaviour.
//!
//! Every test has a database of its own, since advisory locks are per database. Whether a lock is
//! held is looked up in `pg_locks`, from another connection.

mod adoption;
mod architecture;
mod borrowed_connections;
mod copied_files;
mod copies;
mod crowds;
mod documents;
mod errors;
#[cfg(all(feature = "tracing", feature = "r2d2"))]
mod events;
mod fences;
mod functions;
mod half;
mod handlers_under_test;
mod installation;
mod joins;
mod keys;
mod migrations;
mod monitor;
mod monitored_rate_limits;
mod monitored_tables;
mod moved_sessions;
mod nested_guards;
mod other_languages;
mod permits;
mod pooled_connections;
mod prepared_names;
mod primitives;
mod processes;
mod properties;
mod rate_limit_crashes;
mod rate_limit_waits;
mod rate_limits;
mod releases;
mod roles;
mod round_trips;
mod semaphore_claims;
mod semaphore_contention;
mod semaphore_faults;
mod semaphore_input;
mod semaphore_log;
mod semaphore_permits;
mod semaphore_settings;
mod semaphore_waiting;
mod semaphores;
mod server_settings;
mod session_locks;
mod standby;
mod support;
#[cfg(feature = "testing")]
mod testing;
mod throttle_contention;
mod throttled_keys;
mod throttled_resources;
mod throttles;
mod transaction_locks;
mod uninstallation;
mod unused_outcomes;
mod waiting;
mod watches;
mod ways_out;
