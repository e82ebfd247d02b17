//! Rebuilds of the cache.

use diesel::prelude::*;
use diesel_interlock::{Decision, Throttle};

use super::App;
use crate::cache::{REFRESH, Rebuild, Resource};
use crate::error::AppError;

/// Starts to rebuild the cache if it is due, and does not wait for the end of it.
///
/// The grant is committed before the work begins, because an attempt outside a transaction is a
/// transaction of its own.
pub fn rebuild(app: &App) -> Result<Rebuild, AppError> {
    let throttle = Throttle::of(Resource::CacheRebuild).details(app.config.instance.clone());
    match throttle.attempt_on(&mut *app.pool.get()?)? {
        Decision::Granted(grant) => {
            let refreshed = app.clone();
            app.spawn_blocking(move || {
                refresh(&refreshed).unwrap_or_else(|error| error.log("the rebuild of the cache"));
            });
            Ok(Rebuild {
                due_again: grant.until,
            })
        }
        Decision::Denied(denial) => Err(AppError::Throttled(denial)),
    }
}

fn refresh(app: &App) -> Result<(), AppError> {
    diesel::sql_query(REFRESH).execute(&mut *app.pool.get()?)?;
    Ok(())
}
