//! One module per behaviour, the same over each pool.
mod installing;
mod own_migrations;
