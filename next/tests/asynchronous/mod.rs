//! What only the asynchronous half has.

mod own_migrations;
mod throttles;
