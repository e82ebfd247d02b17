//! Reservations of servers: no two of one server overlap.

use std::time::Duration;

use chrono::{DateTime, Datelike, TimeDelta, Utc};
use diesel::dsl::{auto_type, exists, select};
use diesel::prelude::*;
use diesel_interlock::LockKey;
use serde::{Deserialize, Serialize};

use crate::error::AppError;
use crate::schema::{reservations, servers};

/// How long a request waits for its turn.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

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
    pub(crate) id: i64,
}

/// The lock on a server, in whatever its reservations are about.
pub fn lock(datacenter_id: i32, server_id: i32) -> LockKey {
    LockKey::parts(["server", &datacenter_id.to_string(), &server_id.to_string()])
}

impl NewReservation {
    /// The lock on its server.
    pub(crate) fn lock(&self) -> LockKey {
        lock(self.datacenter_id, self.server_id)
    }

    pub(crate) fn validate(&self) -> Result<(), AppError> {
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

    /// Whether there is such a server.
    pub(crate) fn server_exists(&self) -> exists_server {
        exists_server(self.datacenter_id, self.server_id)
    }

    /// Whether another reservation of the server overlaps this one.
    pub(crate) fn overlaps_another(&self) -> exists_reservation {
        exists_reservation(
            self.datacenter_id,
            self.server_id,
            self.start_date,
            self.end_date,
        )
    }
}

#[auto_type]
fn exists_server(datacenter_id: i32, server_id: i32) -> _ {
    select(exists(servers::table.find((datacenter_id, server_id))))
}

#[auto_type]
fn exists_reservation(
    datacenter_id: i32,
    server_id: i32,
    from: DateTime<Utc>,
    until: DateTime<Utc>,
) -> _ {
    let others = reservations::table
        .filter(reservations::datacenter_id.eq(datacenter_id))
        .filter(reservations::server_id.eq(server_id))
        .filter(reservations::start_date.le(until))
        .filter(reservations::end_date.ge(from));
    select(exists(others))
}
