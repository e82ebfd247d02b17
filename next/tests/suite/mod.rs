//! One module per behaviour, the same over each pool.

mod fences;
mod installing;
mod local_rate_limits;
mod monitoring;
mod own_migrations;
mod rate_limit_promise;
mod rate_limits;
mod testing_helpers;
mod throttles;
