//! A cache that is rebuilt at most once every 15 seconds, whoever asks, on whichever instance.

use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::{Decision, Grant, Throttle, throttled_resources};

use crate::app::App;
use crate::error::AppError;

throttled_resources! {
    /// What this application does at most once per interval.
    pub enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(15),
    }
}

/// Starts to rebuild the cache if it is due, and does not wait for the end of it.
///
/// The grant is committed before the work begins: outside a transaction, an attempt is one of its own.
pub fn rebuild(app: &App) -> Result<Grant, AppError> {
    let throttle = Throttle::of(Resource::CacheRebuild);
    let decision = throttle.attempt(&mut *app.pool.get()?, &app.config.instance)?;
    match decision {
        Decision::Granted(grant) => {
            app.in_background("the rebuild of the cache", refresh);
            Ok(grant)
        }
        Decision::Denied(denial) => Err(AppError::Throttled(denial)),
    }
}

fn refresh(app: &App) -> Result<(), AppError> {
    diesel::sql_query("REFRESH MATERIALIZED VIEW occupancy").execute(&mut *app.pool.get()?)?;
    Ok(())
}
