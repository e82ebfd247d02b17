//! Requests to services that time out when a test says so.

use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::prefix::prefixed;
use crate::error::Result;
use crate::functions::clock_timestamp;
use crate::installed;
use crate::monitor;
use crate::schema::resource_control::service_request;
use crate::semaphore::Semaphore;
use crate::session::repeat_at_read_committed;
use crate::text;

/// Lets every request in flight to the service time out now, as if its holder had been too slow or had
/// crashed, and answers how many there were.
///
/// One round trip: `UPDATE resource_control.service_request SET expires_at = clock_timestamp() WHERE …`,
/// of the requests that are [in flight](monitor::in_flight()) to the service, under a
/// [prefix](super::key_prefix) to that of the prefix. Nothing else changes: the next claim that finds no other slot free marks them
/// and takes their slots, and their own releases and renewals are told that they come too late.
/// [`Permit::remaining`](crate::Permit::remaining) counts on the holder's clock and does not hear of it.
///
/// # Errors
///
/// [`Schema::NotInstalled`](crate::error::Schema::NotInstalled),
/// [`Schema::MissingRights`](crate::error::Schema::MissingRights),
/// [`Error::Database`](crate::Error::Database).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Error, Semaphore, testing};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// let slow = GEOCODER.try_acquire(&pool)?.admitted().expect("nobody else is here");
/// assert!(GEOCODER.try_acquire(&pool)?.is_full());
///
/// assert_eq!(testing::expire(conn, &GEOCODER)?, 1);
/// let next = GEOCODER.try_acquire(&pool)?.admitted().expect("the slot is free again");
/// assert!(matches!(slow.release(), Err(Error::TimedOut { .. })));
/// next.release()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn expire(conn: &mut PgConnection, semaphore: &Semaphore) -> Result<usize> {
    let service = {
        let _names = text::names_on(conn);
        prefixed(semaphore.service())
    };
    repeat_at_read_committed(conn, |conn| {
        let requests = service_request::table
            .filter(monitor::of_service(&service))
            .filter(monitor::in_flight());
        diesel::update(requests)
            .set(service_request::expires_at.eq(clock_timestamp()))
            .execute(conn)
    })
    .map_err(|error| installed::explain_on(conn, error, None))
}
