//! Reservations of servers.

use diesel_async::RunQueryDsl;
use diesel_interlock::Attempt;
use diesel_interlock::asynchronous::AdvisoryLock;
use tokio::time::sleep;

use super::App;
use crate::error::AppError;
use crate::reservations::{NewReservation, PATIENCE, Reservation};
use crate::schema::reservations;

/// Reserves the server if it is free in that period.
///
/// "Check, then insert" under the lock of that server. Each check sees all earlier inserts, because the
/// lock ends with the commit. If the future is dropped, the transaction is rolled back.
pub async fn reserve(app: &App, wanted: &NewReservation) -> Result<Reservation, AppError> {
    wanted.validate()?;
    let conn = &mut app.pool.get().await?;
    let lock = AdvisoryLock::new(wanted.lock());
    let reserve = lock.transaction_timeout(conn, PATIENCE, async |conn| {
        if !wanted.server_exists().get_result(conn).await? {
            return Err(AppError::UnknownServer);
        }
        if wanted.overlaps_another().get_result(conn).await? {
            return Err(AppError::Reserved);
        }
        sleep(app.config.reservation_pause).await; // it takes a while to work out the price
        let id = diesel::insert_into(reservations::table)
            .values(wanted)
            .returning(reservations::id)
            .get_result(conn)
            .await?;
        Ok(Reservation { id })
    });
    match reserve.await? {
        Attempt::Acquired(reservation) => Ok(reservation),
        Attempt::Busy => Err(AppError::Busy),
    }
}
