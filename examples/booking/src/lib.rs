//! What the web applications among the examples do, whichever framework serves it: see README.md.
//!
//! `axum_app` and `actix_app` add routes, extractors and responses, and the thread on which a handler
//! may block.

// Part of an application, not an interface.
#![allow(missing_docs)]

pub mod app;
pub mod burst;
pub mod cache;
pub mod chaos;
pub mod config;
pub mod database;
pub mod error;
pub mod geocoder;
pub mod pages;
pub mod reports;
pub mod reservations;
pub mod schema;
pub mod startup;
pub mod status;

pub use app::App;
pub use config::Config;
pub use error::AppError;
