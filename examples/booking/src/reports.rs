//! The nightly report: written by one instance at a time, over many transactions.

use std::thread;
use std::time::Duration;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::{AdvisoryLock, PooledGuard, monitor};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::app::App;
use crate::error::AppError;
use crate::schema::{report_nights, report_runs, reservations};

/// The lock of the report.
pub static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");

/// How many nights a report is about.
const NIGHTS: i64 = 30;

/// A report that was written.
#[derive(Debug, Serialize)]
pub struct Report {
    run: i64,
    nights: i64,
}

/// Who writes the report right now, as far as the database knows; nothing if it has just ended.
#[derive(Debug, Serialize)]
pub struct Running {
    application_name: Option<String>,
    backend_pid: Option<i32>,
    client_addr: Option<String>,
    host: Option<String>,
    since: Option<DateTime<Utc>>,
}

/// Writes the report on the connection whose session has the lock, until it is told to stop.
pub fn write(
    app: &App,
    guard: &mut PooledGuard,
    stop: &CancellationToken,
) -> Result<Report, AppError> {
    let backend_pid = guard.backend_pid();
    let (run, started_at): (i64, DateTime<Utc>) = diesel::insert_into(report_runs::table)
        .values((
            report_runs::host.eq(&app.config.host),
            report_runs::backend_pid.eq(backend_pid),
        ))
        .returning((report_runs::id, report_runs::started_at))
        .get_result(guard.conn())?;

    for night in (1..=NIGHTS).map(|ago| started_at.date_naive() - TimeDelta::days(ago)) {
        if stop.is_cancelled() {
            return Err(AppError::Stopped);
        }
        write_night(guard.conn(), run, night, app.config.report_pause)?;
    }

    diesel::update(report_runs::table.find(run))
        .set(report_runs::finished_at.eq(clock_timestamp().nullable()))
        .execute(guard.conn())?;
    Ok(Report {
        run,
        nights: NIGHTS,
    })
}

/// One night of it, in a transaction of its own.
fn write_night(
    conn: &mut PgConnection,
    run: i64,
    night: NaiveDate,
    pause: Duration,
) -> QueryResult<()> {
    thread::sleep(pause); // it takes a while to draw the diagrams
    conn.transaction(|conn| {
        let midnight = night.and_time(Default::default()).and_utc();
        let reserved: i64 = reservations::table
            .filter(reservations::start_date.lt(midnight + TimeDelta::days(1)))
            .filter(reservations::end_date.ge(midnight))
            .count()
            .get_result(conn)?;
        diesel::insert_into(report_nights::table)
            .values((
                report_nights::run_id.eq(run),
                report_nights::night.eq(night),
                report_nights::reserved.eq(reserved),
            ))
            .execute(conn)?;
        Ok(())
    })
}

/// The refusal while somebody else has the lock: who, and since when by the row that they wrote.
pub fn already_running(app: &App) -> AppError {
    match app.pool.get() {
        Ok(mut conn) => running(&mut conn).map_or_else(AppError::from, AppError::ReportRunning),
        Err(error) => error.into(),
    }
}

fn running(conn: &mut PgConnection) -> Result<Running, diesel_interlock::Error> {
    let holder = monitor::holders()
        .filter(monitor::of_key(NIGHTLY.key())?)
        .left_join(report_runs::table.on(of_this_session()))
        .select((
            monitor::application_name,
            monitor::pid,
            monitor::client_addr,
            report_runs::host.nullable(),
            report_runs::started_at.nullable(),
        ))
        .order(report_runs::started_at.desc())
        .first(conn)
        .optional()?;
    let (application_name, backend_pid, client_addr, host, since) = holder.unwrap_or_default();
    Ok(Running {
        application_name,
        backend_pid,
        client_addr,
        host,
        since,
    })
}

/// The unfinished run of the session that holds a lock. A process id that was used before has an older
/// row.
#[diesel::dsl::auto_type]
pub fn of_this_session() -> _ {
    monitor::pid
        .eq(report_runs::backend_pid.nullable())
        .and(report_runs::finished_at.is_null())
        .and(monitor::backend_start.le(report_runs::started_at.nullable()))
}
