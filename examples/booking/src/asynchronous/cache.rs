//! Rebuilds of the cache.

use diesel_async::RunQueryDsl;
use diesel_interlock::Decision;
use diesel_interlock::asynchronous::Throttle;

use super::App;
use crate::cache::{REFRESH, Rebuild, Resource};
use crate::error::AppError;

/// Starts to rebuild the cache if it is due, and does not wait for the end of it.
///
/// The grant is committed, and the connection back in the pool, before the work begins. The work is a task
/// of its own, because a client that hangs up drops this future. If it is dropped before the grant arrives,
/// nobody rebuilds the cache in this interval.
pub async fn rebuild(app: &App) -> Result<Rebuild, AppError> {
    let throttle = Throttle::of(Resource::CacheRebuild).details(app.config.instance.clone());
    match throttle.attempt(&app.pool).await? {
        Decision::Granted(grant) => {
            let refreshed = app.clone();
            app.spawn(async move {
                let refreshed = refresh(&refreshed).await;
                refreshed.unwrap_or_else(|error| error.log("the rebuild of the cache"));
            });
            Ok(Rebuild {
                due_again: grant.until,
            })
        }
        Decision::Denied(denial) => Err(AppError::Throttled(denial)),
    }
}

async fn refresh(app: &App) -> Result<(), AppError> {
    diesel::sql_query(REFRESH)
        .execute(&mut app.pool.get().await?)
        .await?;
    Ok(())
}
