//! What only the blocking half has.

mod copies;
#[cfg(feature = "tracing")]
mod events;
mod keys;
mod leaders;
mod lenders;
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
