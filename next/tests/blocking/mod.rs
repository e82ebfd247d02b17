//! What only the blocking half has.

mod leaders;
mod own_migrations;
mod rate_limits;
mod schedules;
