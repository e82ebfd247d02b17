//! The workbench at work, on servers of its own.

mod child;
mod cluster;
mod database;
mod database_url;
mod installation;
mod left_behind;
mod poll;
mod round_trips;
