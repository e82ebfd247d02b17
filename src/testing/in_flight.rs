//! Requests to services that have not ended.

use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::patience::assert_none;
use super::prefix::prefixed;
use super::tables::Tables;
use crate::error::Result;
use crate::installed;
use crate::monitor::{self, ServiceRequest};
use crate::schema::resource_control::service_request;
use crate::semaphore::Semaphore;
use crate::text;

/// Lists the requests to services that are in flight in this database, whoever made them; none where
/// the schema `resource_control` is not installed.
///
/// Two round trips: whether there is such a table, and the rows that are
/// [in flight](monitor::in_flight()), in the order of their services and slots.
///
/// # Errors
///
/// [`Schema::MissingRights`](crate::error::Schema::MissingRights),
/// [`Error::Database`](crate::Error::Database).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Semaphore, testing};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// let permit = GEOCODER.clone().details("web-3").try_acquire(&pool)?.admitted();
/// let requests = testing::requests_in_flight(conn)?;
/// assert_eq!(requests.len(), 1);
/// assert_eq!(requests[0].details, "web-3");
/// # drop(permit);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn requests_in_flight(conn: &mut PgConnection) -> Result<Vec<ServiceRequest>> {
    let requests = Tables::of(conn).and_then(|tables| {
        if !tables.service_request {
            return Ok(Vec::new());
        }
        service_request::table
            .filter(monitor::in_flight())
            .order((service_request::service, service_request::slot))
            .select(ServiceRequest::as_select())
            .load(conn)
    });
    requests.map_err(|error| installed::explain_on(conn, error, None))
}

/// Panics if a request to the service is in flight, and says which and by whom.
///
/// Under a [prefix](super::key_prefix) it asks about the service of that prefix. One round trip, again
/// and again for up to two seconds before it panics: where the pool had no idle connection, a dropped
/// permit gives its slot back a moment later.
///
/// # Panics
///
/// If a request is in flight, or the database cannot be asked.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Semaphore, testing};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// drop(GEOCODER.try_acquire(&pool)?);
/// testing::assert_none_in_flight(conn, &GEOCODER);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn assert_none_in_flight(conn: &mut PgConnection, semaphore: &Semaphore) {
    let service = {
        let _names = text::names_on(conn);
        prefixed(semaphore.service())
    };
    let expected = format!("no request to {service:?} is in flight");
    assert_none(&expected, || {
        service_request::table
            .filter(monitor::of_service(&service))
            .filter(monitor::in_flight())
            .order(service_request::slot)
            .select(ServiceRequest::as_select())
            .load(conn)
            .map_err(|error| installed::explain_on(conn, error, None))
    });
}
