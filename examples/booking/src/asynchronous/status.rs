//! What the database shows.

use diesel::prelude::*;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use diesel_interlock::functions::clock_timestamp;

use super::App;
use crate::error::AppError;
use crate::schema::servers;
use crate::status::{self, Seen, Status};

/// Reads what there is, over one connection.
pub async fn status(app: &App) -> Result<Status, AppError> {
    let seen = look(&mut *app.pool.get().await?).await?;
    Status::of(&app.config.instance, seen)
}

async fn look(conn: &mut AsyncPgConnection) -> QueryResult<Seen> {
    Ok(Seen {
        now: diesel::select(clock_timestamp()).get_result(conn).await?,
        holders: status::holders().load(conn).await?,
        waiters: status::waiters().load(conn).await?,
        in_flight: status::in_flight().load(conn).await?,
        timed_out: status::timed_out().load(conn).await?,
        resources: status::resources().load(conn).await?,
        servers: servers::table.load(conn).await?,
    })
}
