//! The nightly report: written by one instance at a time, over many transactions.

use chrono::{DateTime, NaiveDate, TimeDelta, Utc};
use diesel::dsl::{auto_type, count_star};
use diesel::prelude::*;
use diesel_interlock::{LockKey, monitor};
use serde::Serialize;

use crate::schema::{report_nights, report_runs, reservations};

/// The key of its lock.
pub const LOCK: LockKey = LockKey::named("nightly report");

/// How many nights a report is about.
const NIGHTS: i64 = 30;

/// A report that was written.
#[derive(Debug, Serialize)]
pub struct Report {
    run: i64,
    nights: i64,
}

/// A report that is being written.
#[derive(Debug, Queryable, Selectable)]
#[diesel(table_name = report_runs)]
pub(crate) struct Run {
    pub(crate) id: i64,
    started_at: DateTime<Utc>,
}

/// One night of a report.
#[derive(Debug, Insertable)]
#[diesel(table_name = report_nights)]
pub(crate) struct Night {
    run_id: i64,
    night: NaiveDate,
    reserved: i64,
}

/// Who writes the report right now, as far as the database knows; nothing if it has just ended.
#[derive(Debug, Default, Queryable, Serialize)]
pub struct Running {
    application_name: Option<String>,
    backend_pid: Option<i32>,
    client_addr: Option<String>,
    host: Option<String>,
    since: Option<DateTime<Utc>>,
}

impl Run {
    /// The nights before its start.
    pub(crate) fn nights(&self) -> impl Iterator<Item = NaiveDate> + Send + use<> {
        let today = self.started_at.date_naive();
        (1..=NIGHTS).map(move |ago| today - TimeDelta::days(ago))
    }

    pub(crate) fn night(&self, night: NaiveDate, reserved: i64) -> Night {
        Night {
            run_id: self.id,
            night,
            reserved,
        }
    }

    pub(crate) fn written(self) -> Report {
        Report {
            run: self.id,
            nights: NIGHTS,
        }
    }
}

/// How many servers are reserved in that night.
pub(crate) fn reserved(night: NaiveDate) -> reserved_between {
    let midnight = night.and_time(Default::default()).and_utc();
    reserved_between(midnight, midnight + TimeDelta::days(1))
}

#[auto_type]
fn reserved_between(from: DateTime<Utc>, until: DateTime<Utc>) -> _ {
    reservations::table
        .filter(reservations::start_date.lt(until))
        .filter(reservations::end_date.ge(from))
        .select(count_star())
}

/// Who has a lock, with the report that the session writes, if it does. Loads as [`Running`].
#[auto_type]
pub(crate) fn running() -> _ {
    monitor::holders()
        .left_join(report_runs::table.on(of_this_session()))
        .select((
            monitor::application_name,
            monitor::pid,
            monitor::client_addr,
            report_runs::host.nullable(),
            report_runs::started_at.nullable(),
        ))
        .order(report_runs::started_at.desc())
}

/// The unfinished run of the session that holds a lock. A process id that was used before has an older
/// row.
#[auto_type]
pub fn of_this_session() -> _ {
    monitor::pid
        .eq(report_runs::backend_pid.nullable())
        .and(report_runs::finished_at.is_null())
        .and(monitor::backend_start.le(report_runs::started_at.nullable()))
}
