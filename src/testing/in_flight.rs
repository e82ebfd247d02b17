//! Requests to services that are in flight.

use diesel::dsl::sql;
use diesel::pg::Pg;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::Bool;

#[cfg(feature = "postgres")]
use super::polling::assert_none;
use crate::error::Result;
use crate::installed::{self, Needs};
use crate::monitor::{self, ServiceRequest};
use crate::schema::resource_control::service_request;
use crate::semaphore::{Semaphore, checked_service};
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};

/// The tables that exist. A query of a missing table would abort a test transaction.
pub(super) struct Tables {
    pub(super) service_request: bool,
    pub(super) throttled_key: bool,
}

impl Tables {
    /// Looks the tables up in one round trip.
    pub(super) async fn of<S: Session>(session: &mut S) -> QueryResult<Self> {
        let query = diesel::select((
            sql::<Bool>("pg_catalog.to_regclass('resource_control.service_request') IS NOT NULL"),
            sql::<Bool>("pg_catalog.to_regclass('resource_control.throttled_key') IS NOT NULL"),
        ));
        let (service_request, throttled_key) = session.one(query).await?;
        Ok(Self {
            service_request,
            throttled_key,
        })
    }
}

/// Lists the requests to services that are in flight in this database, of every process. The list is empty if the schema
/// `resource_control` is not installed.
///
/// Two round trips: one finds out whether the table exists, and one reads the rows that are
/// [in flight](monitor::in_flight()), ordered by service and slot.
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
/// let permit = GEOCODER.details("web-3").try_acquire(&pool)?.admitted();
/// let requests = testing::requests_in_flight(conn)?;
/// assert_eq!(requests.len(), 1);
/// assert_eq!(requests[0].details, "web-3");
/// # drop(permit);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "postgres")]
pub fn requests_in_flight(conn: &mut PgConnection) -> Result<Vec<ServiceRequest>> {
    now(find_in_flight(&mut Blocking::lent(conn)))
}

const NEEDS: &Needs = &[("service_request", "SELECT")];

pub(super) async fn find_in_flight<S: Session>(session: &mut S) -> Result<Vec<ServiceRequest>> {
    let requests = match Tables::of(session).await {
        Ok(tables) if !tables.service_request => return Ok(Vec::new()),
        Ok(_) => {
            let requests = service_request::table
                .filter(monitor::in_flight())
                .order((service_request::service, service_request::slot))
                .select(<ServiceRequest as SelectableHelper<Pg>>::as_select());
            session.all(requests).await
        }
        Err(error) => Err(error),
    };
    installed::explained(session, requests, NEEDS).await
}

/// Panics if a request to the service is in flight. The message names each request with its details.
///
/// Under a [prefix](super::key_prefix) the service is that of the prefix. It polls for up to two seconds before it panics,
/// one round trip each time, because a dropped permit gives its slot back a moment later if the pool had no idle
/// connection.
///
/// # Panics
///
/// If a request is in flight, the service is refused, or the query fails.
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
#[cfg(feature = "postgres")]
pub fn assert_none_in_flight(conn: &mut PgConnection, semaphore: &Semaphore) {
    let session = &mut Blocking::lent(conn);
    let expected = none_in_flight_to(session, semaphore);
    assert_none(&expected, || now(find_in_flight_to(session, semaphore)));
}

/// Returns the expectation that no request to the service is in flight.
pub(super) fn none_in_flight_to<S: Session>(session: &mut S, semaphore: &Semaphore) -> String {
    let service = session.name(semaphore.service());
    format!("no request to {:?} is in flight", service.as_str())
}

pub(super) async fn find_in_flight_to<S: Session>(
    session: &mut S,
    semaphore: &Semaphore,
) -> Result<Vec<ServiceRequest>> {
    let service = checked_service(semaphore.service(), |name| session.name(name))?;
    let requests = service_request::table
        .filter(monitor::of_service(service.as_str()))
        .filter(monitor::in_flight())
        .order(service_request::slot)
        .select(<ServiceRequest as SelectableHelper<Pg>>::as_select());
    let requests = session.all(requests).await;
    installed::explained(session, requests, NEEDS).await
}
