//! The nightly report.

use std::thread;
use std::time::Duration;

use chrono::NaiveDate;
use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::{AdvisoryLock, PooledGuard, monitor};
use tokio_util::sync::CancellationToken;

use super::App;
use crate::error::AppError;
use crate::reports::{LOCK, Report, Run, Running, reserved, running};
use crate::schema::{report_nights, report_runs};

/// The lock of the report.
pub static NIGHTLY: AdvisoryLock = AdvisoryLock::new(LOCK);

/// Writes the report on the connection whose session has the lock, until it is told to stop.
pub fn write(
    app: &App,
    guard: &mut PooledGuard,
    stop: &CancellationToken,
) -> Result<Report, AppError> {
    let backend_pid = guard.backend_pid();
    let conn = guard.conn();
    let run: Run = diesel::insert_into(report_runs::table)
        .values((
            report_runs::host.eq(&app.config.host),
            report_runs::backend_pid.eq(backend_pid),
        ))
        .returning(Run::as_returning())
        .get_result(conn)?;

    for night in run.nights() {
        if stop.is_cancelled() {
            return Err(AppError::Stopped);
        }
        write_night(conn, &run, night, app.config.report_pause)?;
    }

    diesel::update(report_runs::table.find(run.id))
        .set(report_runs::finished_at.eq(clock_timestamp().nullable()))
        .execute(conn)?;
    Ok(run.written())
}

/// One night of it, in a transaction of its own.
fn write_night(
    conn: &mut PgConnection,
    run: &Run,
    night: NaiveDate,
    pause: Duration,
) -> QueryResult<()> {
    thread::sleep(pause); // it takes a while to draw the diagrams
    conn.transaction(|conn| {
        let reserved = reserved(night).get_result(conn)?;
        diesel::insert_into(report_nights::table)
            .values(run.night(night, reserved))
            .execute(conn)?;
        Ok(())
    })
}

/// The refusal while somebody else has the lock: who, and since when by the row that they wrote.
pub fn already_running(app: &App) -> AppError {
    holder(app).map_or_else(|error| error, AppError::ReportRunning)
}

fn holder(app: &App) -> Result<Running, AppError> {
    let holder = running().filter(monitor::of_key(&LOCK)?);
    let holder = holder.first(&mut *app.pool.get()?).optional()?;
    Ok(holder.unwrap_or_default())
}
