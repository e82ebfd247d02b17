//! What the web applications among the examples do, whichever framework serves it: see README.md.
//!
//! `axum_app` and `actix_app` add routes, extractors and responses to the module `blocking`, and the thread
//! on which a handler may block. `axum_async_app` adds its routes to the module `asynchronous`. All that
//! needs no connection is shared.

// Part of an application, not an interface.
#![allow(missing_docs)]

pub mod app;
#[cfg(feature = "asynchronous")]
pub mod asynchronous;
#[cfg(feature = "axum")]
pub mod axum;
#[cfg(feature = "blocking")]
pub mod blocking;
pub mod burst;
pub mod cache;
pub mod config;
pub mod database;
pub mod error;
pub mod geocoder;
pub mod limits;
pub mod pages;
pub mod quotas;
pub mod reports;
pub mod reservations;
pub mod schema;
pub mod startup;
pub mod status;

pub use config::Config;
pub use error::AppError;
