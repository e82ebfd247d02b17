//! The nightly report: written by one instance at a time, over many transactions.

use std::thread;
use std::time::Duration;

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use diesel::prelude::*;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::{AdvisoryLock, Attempt, monitor};
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

/// Writes the report, unless somebody is at it.
///
/// All of it runs on the connection whose session has the lock. The guard is released on every way
/// out, and `release` tells if the lock was lost on the way.
pub fn write(app: &App, stop: &CancellationToken) -> Result<Report, AppError> {
    let Attempt::Acquired(mut guard) = NIGHTLY.try_acquire(&app.pool)? else {
        return Err(AppError::ReportRunning(running(&mut *app.pool.get()?)?));
    };
    let backend_pid = guard.backend_pid();
    let conn = guard.conn();
    let (run, started_at): (i64, DateTime<Utc>) = diesel::insert_into(report_runs::table)
        .values((
            report_runs::host.eq(&app.config.host),
            report_runs::backend_pid.eq(backend_pid),
        ))
        .returning((report_runs::id, report_runs::started_at))
        .get_result(conn)?;

    for night in (1..=NIGHTS).map(|ago| started_at.date_naive() - TimeDelta::days(ago)) {
        if stop.is_cancelled() {
            return Err(AppError::Stopped);
        }
        write_night(guard.conn(), run, night, app.config.report_pause)?;
    }

    diesel::update(report_runs::table.find(run))
        .set(report_runs::finished_at.eq(clock_timestamp().nullable()))
        .execute(guard.conn())?;
    guard.release()?;
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

/// Asks who has the lock, and since when by the row that they wrote.
fn running(conn: &mut PgConnection) -> Result<Running, AppError> {
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
