//! Tests of behaviour that only the blocking half has.

mod borrowing;
mod copies;
#[cfg(feature = "tracing")]
mod events;
mod keys;
mod leaders;
#[cfg(feature = "metrics")]
mod metrics;
mod own_migrations;
mod rate_limits;
mod round_trips;
mod schedules;
#[cfg(feature = "serde")]
mod serialized;
mod service_requests;
mod silence;
