//! What only the asynchronous half has.

mod cancelled;
mod drops;
mod own_migrations;
mod rate_limits;
mod throttles;
