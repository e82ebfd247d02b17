//! One module per behaviour, the same over each pool.

mod fences;
mod installing;
mod own_migrations;
mod rate_limits;
mod throttle_model;
mod throttled_resources;
mod throttles;
mod throttles_in_transactions;
