//! Reservations of servers: no two of one server overlap.

use std::thread;
use std::time::Duration;

use chrono::{DateTime, Datelike, TimeDelta, Utc};
use diesel::dsl::exists;
use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, Attempt, LockKey};
use serde::{Deserialize, Serialize};

use crate::app::App;
use crate::error::AppError;
use crate::schema::{reservations, servers};

/// How long a request waits for its turn.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a client asks for.
#[derive(Debug, Deserialize, Insertable)]
#[diesel(table_name = reservations)]
#[serde(deny_unknown_fields)]
pub struct NewReservation {
    datacenter_id: i32,
    server_id: i32,
    user_id: i32,
    start_date: DateTime<Utc>,
    end_date: DateTime<Utc>,
}

/// A reservation that was made.
#[derive(Debug, Serialize)]
pub struct Reservation {
    id: i64,
}

/// The lock on a server, in whatever its reservations are about.
pub fn lock(datacenter_id: i32, server_id: i32) -> LockKey {
    LockKey::parts(["server", &datacenter_id.to_string(), &server_id.to_string()])
}

/// Reserves the server if it is free in that period.
///
/// "Check, then insert" under the lock of that server. Each check sees all earlier inserts, because the
/// lock ends with the commit.
pub fn reserve(app: &App, wanted: &NewReservation) -> Result<Reservation, AppError> {
    wanted.validate()?;
    let conn = &mut app.pool.get()?;
    let lock = AdvisoryLock::new(lock(wanted.datacenter_id, wanted.server_id));
    let reserved = lock.transaction_timeout(conn, PATIENCE, |conn| {
        if !wanted.server_exists(conn)? {
            return Err(AppError::UnknownServer);
        }
        if wanted.overlaps_another(conn)? {
            return Err(AppError::Reserved);
        }
        thread::sleep(app.config.reservation_pause); // it takes a while to work out the price
        let id = diesel::insert_into(reservations::table)
            .values(wanted)
            .returning(reservations::id)
            .get_result(conn)?;
        Ok(Reservation { id })
    })?;
    match reserved {
        Attempt::Acquired(reservation) => Ok(reservation),
        Attempt::Busy => Err(AppError::Busy),
    }
}

impl NewReservation {
    fn validate(&self) -> Result<(), AppError> {
        let invalid = |message: &str| Err(AppError::Invalid(message.to_owned()));
        if self.start_date >= self.end_date {
            return invalid("end_date must be after start_date");
        }
        if !(2000..2200).contains(&self.start_date.year()) {
            return invalid("start_date must be between the years 2000 and 2200");
        }
        if self.end_date - self.start_date > TimeDelta::days(366) {
            return invalid("a reservation may last 366 days at most");
        }
        Ok(())
    }

    fn server_exists(&self, conn: &mut PgConnection) -> QueryResult<bool> {
        let server = servers::table.find((self.datacenter_id, self.server_id));
        diesel::select(exists(server)).get_result(conn)
    }

    fn overlaps_another(&self, conn: &mut PgConnection) -> QueryResult<bool> {
        let others = reservations::table
            .filter(reservations::datacenter_id.eq(self.datacenter_id))
            .filter(reservations::server_id.eq(self.server_id))
            .filter(reservations::start_date.le(self.end_date))
            .filter(reservations::end_date.ge(self.start_date));
        diesel::select(exists(others)).get_result(conn)
    }
}
