//! What only the blocking half has.

mod own_migrations;
mod rate_limits;
