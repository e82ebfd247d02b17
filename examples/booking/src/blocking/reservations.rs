//! Reservations of servers.

use std::thread;

use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, Attempt};

use super::App;
use crate::error::AppError;
use crate::reservations::{NewReservation, PATIENCE, Reservation};
use crate::schema::reservations;

/// Reserves the server if it is free in that period.
///
/// "Check, then insert" under the lock of that server. Each check sees all earlier inserts, because the
/// lock ends with the commit.
pub fn reserve(app: &App, wanted: &NewReservation) -> Result<Reservation, AppError> {
    wanted.validate()?;
    let conn = &mut app.pool.get()?;
    let lock = AdvisoryLock::new(wanted.lock());
    let reserved = lock.transaction_timeout(conn, PATIENCE, |conn| {
        if !wanted.server_exists().get_result(conn)? {
            return Err(AppError::UnknownServer);
        }
        if wanted.overlaps_another().get_result(conn)? {
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
