//! What the database shows.

use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;

use super::App;
use crate::error::AppError;
use crate::schema::servers;
use crate::status::{self, Seen, Status};

/// Reads what there is, over one connection.
pub fn status(app: &App) -> Result<Status, AppError> {
    let seen = look(&mut *app.pool.get()?)?;
    Status::of(&app.config.instance, seen)
}

fn look(conn: &mut PgConnection) -> QueryResult<Seen> {
    Ok(Seen {
        now: diesel::select(clock_timestamp()).get_result(conn)?,
        holders: status::holders().load(conn)?,
        waiters: status::waiters().load(conn)?,
        in_flight: status::in_flight().load(conn)?,
        timed_out: status::timed_out().load(conn)?,
        resources: status::resources().load(conn)?,
        servers: servers::table.load(conn)?,
    })
}
