//! The nightly report.

use chrono::NaiveDate;
use diesel::prelude::*;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use diesel_interlock::asynchronous::{AdvisoryLock, PooledGuard};
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::monitor;
use tokio::time::sleep;

use super::{App, PgPool};
use crate::error::AppError;
use crate::reports::{LOCK, Report, Run, Running, reserved, running};
use crate::schema::{report_nights, report_runs};

/// The lock of the report.
pub static NIGHTLY: AdvisoryLock = AdvisoryLock::new(LOCK);

/// Writes the report on the connection whose session has the lock, until the application is to end.
///
/// If the client hangs up or the request times out, the future is dropped, and the guard with it.
/// A transaction that is open then is rolled back.
pub async fn write(app: &App, guard: &mut PooledGuard<PgPool>) -> Result<Report, AppError> {
    let backend_pid = guard.backend_pid();
    let conn = guard.conn();
    let run: Run = diesel::insert_into(report_runs::table)
        .values((
            report_runs::host.eq(&app.config.host),
            report_runs::backend_pid.eq(backend_pid),
        ))
        .returning(Run::as_returning())
        .get_result(conn)
        .await?;

    for night in run.nights() {
        let diagrams = sleep(app.config.report_pause); // it takes a while to draw them
        if app.stop.run_until_cancelled(diagrams).await.is_none() {
            return Err(AppError::Stopped);
        }
        write_night(conn, &run, night).await?;
    }

    diesel::update(report_runs::table.find(run.id))
        .set(report_runs::finished_at.eq(clock_timestamp().nullable()))
        .execute(conn)
        .await?;
    Ok(run.written())
}

/// One night of it, in a transaction of its own.
async fn write_night(conn: &mut AsyncPgConnection, run: &Run, night: NaiveDate) -> QueryResult<()> {
    conn.transaction(async |conn| {
        let reserved = reserved(night).get_result(conn).await?;
        diesel::insert_into(report_nights::table)
            .values(run.night(night, reserved))
            .execute(conn)
            .await?;
        Ok(())
    })
    .await
}

/// The refusal while somebody else has the lock: who, and since when by the row that they wrote.
pub async fn already_running(app: &App) -> AppError {
    match holder(app).await {
        Ok(holder) => AppError::ReportRunning(holder),
        Err(error) => error,
    }
}

async fn holder(app: &App) -> Result<Running, AppError> {
    let holder = running().filter(monitor::of_key(&LOCK)?);
    let holder = holder.first(&mut app.pool.get().await?).await.optional()?;
    Ok(holder.unwrap_or_default())
}
