//! Service requests: which are in flight, which overran, and which slots are free.

// Diesel's macro writes aliases that carry no documentation of their own.
#![allow(missing_docs)]

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use diesel::dsl::auto_type;
use diesel::helper_types::min;
use diesel::pg::{Pg, PgConnection};
use diesel::prelude::*;

use crate::error::Result;
use crate::functions::clock_timestamp;
use crate::installed;
use crate::schema::resource_control::service_request;
use crate::session::{Blocking, Session, now};
use crate::time::Timestamp;

/// A row of `resource_control.service_request`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable, Identifiable)]
#[diesel(table_name = service_request, check_for_backend(Pg))]
#[non_exhaustive]
pub struct ServiceRequest {
    /// Its number, which is its fencing token too.
    pub id: i64,
    /// Which semaphore.
    pub service: String,
    /// Its slot, from 0.
    pub slot: i16,
    /// When it was claimed.
    pub created_at: DateTime<Utc>,
    /// From when on it no longer counts; [`Infinity`](Timestamp::Infinity) if somebody wrote that by
    /// hand.
    pub expires_at: Timestamp,
    /// When it was completed.
    pub completed_at: Option<DateTime<Utc>>,
    /// When it was marked as timed out, which may be long after it had.
    pub timed_out_at: Option<DateTime<Utc>>,
    /// Who claimed it, in their own words.
    pub details: String,
}

/// The condition that a request is in flight: neither completed nor marked as timed out, and not yet
/// expired by `clock_timestamp()`.
///
/// Time decides, not the mark: a crashed holder's request stays unmarked until somebody claims its
/// slot.
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

/// The condition that a request has expired by `clock_timestamp()` and nobody has marked it yet.
#[auto_type]
pub fn overdue() -> _ {
    service_request::completed_at
        .is_null()
        .and(service_request::timed_out_at.is_null())
        .and(service_request::expires_at.le(clock_timestamp()))
}

/// The condition that a request has timed out: marked as such, or [`overdue()`].
#[auto_type]
pub fn timed_out() -> _ {
    service_request::timed_out_at.is_not_null().or(overdue())
}

/// The condition that a request is to this service.
#[auto_type]
pub fn of_service<'a>(service: &'a str) -> _ {
    service_request::service.eq(service)
}

/// When the first of the requests expires; nothing where there are none. Select it of those in flight
/// to learn when a slot comes free at the latest.
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

/// The slots of a service at one moment. Made by [`slots`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Slots {
    /// The slots below the number asked for that no request in flight has, in their order.
    pub free: Vec<i16>,
    /// How many requests are in flight, whatever their slots.
    pub in_flight: usize,
    /// When the first request in flight expires; `None` if there is none.
    pub next_expiry: Option<Timestamp>,
    slots: i16,
}

impl Slots {
    /// How many claims would be granted now. Fewer than there are free slots where the number of slots
    /// was lowered and requests on the higher ones are still in flight.
    pub fn claimable(&self) -> usize {
        usize::from(self.slots.unsigned_abs())
            .saturating_sub(self.in_flight)
            .min(self.free.len())
    }
}

/// Answers which slots of a service are free, if it has that many, and how many requests are in
/// flight. More than 32,767 slots are 32,767.
///
/// One round trip, which reads the requests in flight; they may have ended when it answers.
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
/// use diesel_interlock::monitor;
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// let geocoder = monitor::slots(conn, "geocoder", 4)?;
/// assert_eq!((geocoder.free, geocoder.in_flight), (vec![0, 1, 2, 3], 0));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn slots(conn: &mut PgConnection, service: &str, slots: u32) -> Result<Slots> {
    now(find_slots(&mut Blocking::lent(conn), service, slots))
}

async fn find_slots<S: Session>(session: &mut S, service: &str, slots: u32) -> Result<Slots> {
    let slots = i16::try_from(slots).unwrap_or(i16::MAX);
    let requests = service_request::table
        .filter(of_service(service))
        .filter(in_flight())
        .select((service_request::slot, service_request::expires_at));
    let taken: Vec<(i16, Timestamp)> = match session.all(requests).await {
        Ok(taken) => taken,
        Err(error) => return Err(installed::explain(session, error, None).await),
    };
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
