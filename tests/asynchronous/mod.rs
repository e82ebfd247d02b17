//! Tests of behaviour that only the asynchronous half has.

mod auto_traits;
mod cancelled;
mod drops;
mod filling;
mod leaders;
#[cfg(feature = "metrics")]
mod metrics;
mod own_migrations;
mod rate_limits;
mod runtimes;
mod schedules;
mod silence;
mod throttles;
mod waiting;
