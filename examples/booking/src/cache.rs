//! A cache that is rebuilt at most once every 15 seconds, whoever asks, on whichever instance.

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::prelude::*;
use diesel_interlock::{Decision, Throttle, throttled_resources};
use serde::Serialize;

use crate::app::App;
use crate::error::AppError;

throttled_resources! {
    /// What this application does at most once per interval.
    pub enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(15),
    }
}

/// A rebuild that has begun.
#[derive(Debug, Serialize)]
pub struct Rebuild {
    due_again: DateTime<Utc>,
}

/// Starts to rebuild the cache if it is due, and does not wait for the end of it.
///
/// The grant is committed before the work begins, because an attempt outside a transaction is a
/// transaction of its own.
pub fn rebuild(app: &App) -> Result<Rebuild, AppError> {
    let throttle = Throttle::of(Resource::CacheRebuild);
    let decision = throttle
        .clone()
        .details(app.config.instance.clone())
        .attempt_on(&mut *app.pool.get()?)?;
    match decision {
        Decision::Granted(grant) => {
            app.in_background("the rebuild of the cache", refresh);
            Ok(Rebuild {
                due_again: grant.until,
            })
        }
        Decision::Denied(denial) => Err(AppError::Throttled(denial)),
    }
}

fn refresh(app: &App) -> Result<(), AppError> {
    diesel::sql_query("REFRESH MATERIALIZED VIEW occupancy").execute(&mut *app.pool.get()?)?;
    Ok(())
}
