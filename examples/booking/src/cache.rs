//! A cache that is rebuilt at most once every 15 seconds, on any number of instances.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel_interlock::throttled_resources;
use serde::Serialize;

throttled_resources! {
    /// What this application does at most once per interval.
    pub enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(15),
    }
}

/// A rebuild that has begun.
#[derive(Debug, Serialize)]
pub struct Rebuild {
    pub(crate) due_again: DateTime<Utc>,
}

/// The statement of a rebuild.
pub(crate) const REFRESH: &str = "REFRESH MATERIALIZED VIEW occupancy";
