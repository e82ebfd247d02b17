//! Requests to services: those in flight, those that timed out, and the free slots.

// Diesel's macro writes aliases without documentation.
#![allow(missing_docs)]

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use diesel::dsl::auto_type;
use diesel::helper_types::min;
use diesel::pg::Pg;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;

use crate::error::Result;
use crate::functions::clock_timestamp;
use crate::installed::{self, Needs};
use crate::schema::resource_control::service_request;
use crate::semaphore::checked_service;
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
use crate::time::Timestamp;

/// A row of `resource_control.service_request`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = service_request, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ServiceRequest {
    /// Its id, which is its fencing token too.
    pub id: i64,
    /// The service of the semaphore.
    pub service: String,
    /// Its slot, from 0.
    pub slot: i16,
    /// When it was claimed.
    pub created_at: DateTime<Utc>,
    /// When it expires and no longer counts; [`Infinity`](Timestamp::Infinity) if that was written by hand.
    pub expires_at: Timestamp,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// When it was marked as timed out, which may be long after it expired.
    pub timed_out_at: Option<DateTime<Utc>>,
    /// The details of the claim.
    pub details: String,
}

/// Returns the condition that a request is in flight: it is neither completed nor marked as timed out, and has not expired
/// by `clock_timestamp()`.
///
/// The clock decides, not the mark, because the request of a crashed holder stays unmarked until its slot is claimed.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, ServiceRequest};
/// use diesel_interlock::schema::resource_control::service_request;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let oldest = service_request::table
///     .filter(monitor::of_service("geocoder"))
///     .filter(monitor::in_flight())
///     .order(service_request::created_at)
///     .limit(10)
///     .select(ServiceRequest::as_select())
///     .load(conn)?;
/// # assert!(oldest.is_empty());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn in_flight() -> _ {
    service_request::completed_at
        .is_null()
        .and(service_request::timed_out_at.is_null())
        .and(service_request::expires_at.gt(clock_timestamp()))
}

/// Returns the condition that a request has expired by `clock_timestamp()` and is not marked yet.
#[auto_type]
pub fn overdue() -> _ {
    service_request::completed_at
        .is_null()
        .and(service_request::timed_out_at.is_null())
        .and(service_request::expires_at.le(clock_timestamp()))
}

/// Returns the condition that a request has timed out: it is marked as such, or [`overdue()`].
#[auto_type]
pub fn timed_out() -> _ {
    service_request::timed_out_at.is_not_null().or(overdue())
}

/// Returns the condition that a request is to this service.
#[auto_type]
pub fn of_service<'a>(service: &'a str) -> _ {
    service_request::service.eq(service)
}

/// Selects when the first of the requests expires; `None` if there are none. Of the requests in flight,
/// it is the time at which a slot is free at the latest, unless that request is renewed.
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor::{self, Timestamp};
/// use diesel_interlock::schema::resource_control::service_request;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let next: Option<Timestamp> = service_request::table
///     .filter(monitor::of_service("geocoder").and(monitor::in_flight()))
///     .select(monitor::next_expiry())
///     .get_result(conn)?;
/// # assert_eq!(next, None);
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn next_expiry() -> min<service_request::expires_at> {
    diesel::dsl::min(service_request::expires_at)
}

/// The slots of a service at one moment. [`slots`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slots {
    /// The slots below the given number that no request in flight has, in order.
    pub free: Vec<i16>,
    /// The number of requests in flight, in any slot.
    pub in_flight: usize,
    /// When the first request in flight expires; `None` if there is none.
    pub next_expiry: Option<Timestamp>,
    slots: i16,
}

impl Slots {
    /// Returns the number of claims that would be granted now. It is smaller than the number of free slots if the number of
    /// slots was lowered and requests in the higher ones are still in flight.
    pub fn claimable(&self) -> usize {
        usize::from(self.slots.unsigned_abs())
            .saturating_sub(self.in_flight)
            .min(self.free.len())
    }
}

/// Returns which of the given number of slots of a service are free, and how many requests are in flight. More than 32,767
/// slots count as 32,767.
///
/// One round trip, which reads the requests in flight. They may have ended when it returns.
///
/// # Errors
///
/// - [`Input::EmptyName`](crate::error::Input::EmptyName), [`Input::NulCharacter`](crate::error::Input::NulCharacter) and
///   [`Input::TooLong`](crate::error::Input::TooLong), before anything is sent.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and
///   [`Schema::MissingRights`](crate::error::Schema::MissingRights).
/// - [`Error::Database`](crate::Error::Database).
///
/// # Examples
///
/// ```
/// use diesel_interlock::monitor;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let geocoder = monitor::slots(conn, "geocoder", 4)?;
/// assert_eq!((geocoder.free, geocoder.in_flight), (vec![0, 1, 2, 3], 0));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[cfg(feature = "postgres")]
pub fn slots(conn: &mut PgConnection, service: &str, slots: u32) -> Result<Slots> {
    now(find_slots(&mut Blocking::lent(conn), service, slots))
}

const SLOTS_NEEDS: &Needs = &[("service_request", "SELECT")];

pub(super) async fn find_slots<S: Session>(
    session: &mut S,
    service: &str,
    slots: u32,
) -> Result<Slots> {
    let slots = i16::try_from(slots).unwrap_or(i16::MAX);
    let service = checked_service(service, |name| session.name(name))?;
    let requests = service_request::table
        .filter(of_service(service.as_str()))
        .filter(in_flight())
        .select((service_request::slot, service_request::expires_at));
    let taken = session.all(requests).await;
    let taken: Vec<(i16, Timestamp)> = installed::explained(session, taken, SLOTS_NEEDS).await?;
    let occupied: HashSet<i16> = taken.iter().map(|(slot, _)| *slot).collect();
    Ok(Slots {
        free: (0..slots).filter(|slot| !occupied.contains(slot)).collect(),
        in_flight: taken.len(),
        next_expiry: taken.iter().map(|(_, expires_at)| *expires_at).min(),
        slots,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn condition<C>(condition: C) -> String
    where
        service_request::table: diesel::query_dsl::methods::FilterDsl<C>,
        diesel::dsl::Filter<service_request::table, C>: diesel::query_builder::QueryFragment<Pg>,
    {
        let query =
            diesel::query_dsl::methods::FilterDsl::filter(service_request::table, condition);
        let sql = diesel::debug_query::<Pg, _>(&query).to_string();
        let (_, condition) = sql.split_once(" WHERE ").unwrap();
        condition.replace("\"resource_control\".\"service_request\".", "")
    }

    #[test]
    fn time_decides_and_not_the_mark() {
        let open = "((\"completed_at\" IS NULL) AND (\"timed_out_at\" IS NULL))";
        assert_eq!(
            condition(in_flight()),
            format!("({open} AND (\"expires_at\" > pg_catalog.clock_timestamp())) -- binds: []")
        );
        let overdue_sql = format!("({open} AND (\"expires_at\" <= pg_catalog.clock_timestamp()))");
        assert_eq!(condition(overdue()), format!("{overdue_sql} -- binds: []"));
        assert_eq!(
            condition(timed_out()),
            format!("((\"timed_out_at\" IS NOT NULL) OR {overdue_sql}) -- binds: []")
        );
        assert_eq!(
            condition(of_service("it's")),
            "(\"service\" = $1) -- binds: [\"it's\"]"
        );
    }
}
