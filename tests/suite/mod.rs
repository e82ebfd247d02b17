//! Tests that run over every pool, one module per behaviour.
#![allow(clippy::unit_arg)] // what `wait` is given may be nothing in the blocking half

mod auto_traits;
mod begun;
mod copies;
mod crashes;
mod draining;
mod failover;
mod fences;
mod installing;
mod kept_permits;
mod leaders;
mod local_rate_limits;
#[cfg(feature = "tracing")]
mod long_waits;
#[cfg(feature = "metrics")]
mod losses;
mod lost_replies;
#[cfg(feature = "metrics")]
mod metrics;
mod monitoring;
mod once;
mod operators;
#[cfg(feature = "tracing")]
mod outages;
mod own_migrations;
mod permits;
mod prepared_statements;
mod queues;
mod rate_limit_promise;
mod rate_limits;
mod returned;
mod schedules;
mod scopes;
mod semaphore_contention;
mod semaphore_waiting;
mod semaphores;
mod session_locks;
mod several_locks;
mod shadowed;
mod statements;
mod testing_helpers;
mod throttle_model;
mod throttled_resources;
mod throttles;
mod throttles_in_transactions;
mod transaction_locks;
mod waiting;
mod ways_out;
