//! One module per behaviour, the same over each pool.

mod fences;
mod installing;
mod monitoring;
mod own_migrations;
mod rate_limits;
mod testing_helpers;
mod throttles;
