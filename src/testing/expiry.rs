//! Intervals and timeouts that end when a test says so.

#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool, Text};

use crate::error::{Error, Result, Schema};
use crate::installed::{self, Needs};
use crate::semaphore::{Semaphore, checked_service};
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
use crate::session::{Session, all_at_read_committed};
use crate::throttle::{Throttle, ThrottledResource};

/// Compares the label as text, because a label that the type does not have would be an error and abort a test transaction.
const RESOURCE_DUE: &str = "
    WITH resource AS (
        SELECT r.resource_id,
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) resource_control.elapsed(r.throttle_interval) AS due
        FROM resource_control.throttled_resource AS r WHERE r.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) $1
    ), made_due AS (
        UPDATE resource_control.throttled_resource AS r SET last_locked = resource.due
        FROM resource
        WHERE r.resource_id OPERATOR(pg_catalog.=) resource.resource_id
            AND r.last_locked OPERATOR(pg_catalog.>) resource.due
    )
    SELECT EXISTS (SELECT FROM resource) AS is_known";

const RESOURCE_DUE_NEEDS: &Needs = &[
    ("elapsed", "EXECUTE"),
    ("throttled_resource", "SELECT, UPDATE"),
];

const KEY_DUE: &str = "
    WITH resource AS (
        SELECT r.resource_id,
            pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) resource_control.elapsed(r.throttle_interval) AS due
        FROM resource_control.throttled_resource AS r WHERE r.resource_id::pg_catalog.text OPERATOR(pg_catalog.=) $1
    ), made_due AS (
        UPDATE resource_control.throttled_key AS k SET last_locked = resource.due
        FROM resource
        WHERE k.resource_id OPERATOR(pg_catalog.=) resource.resource_id AND k.key OPERATOR(pg_catalog.=) $2
            AND k.last_locked OPERATOR(pg_catalog.>) resource.due
    )
    SELECT EXISTS (SELECT FROM resource) AS is_known";

const KEY_DUE_NEEDS: &Needs = &[
    ("elapsed", "EXECUTE"),
    ("throttled_resource", "SELECT"),
    ("throttled_key", "SELECT, UPDATE"),
];

/// Diesel does not qualify its operators, and somebody's own may be ahead of PostgreSQL's in the search path.
const EXPIRE: &str = "
    UPDATE resource_control.service_request AS r SET expires_at = pg_catalog.clock_timestamp()
    WHERE r.service OPERATOR(pg_catalog.=) $1 AND r.completed_at IS NULL AND r.timed_out_at IS NULL
        AND r.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
    RETURNING r.id";

const EXPIRE_NEEDS: &Needs = &[("service_request", "SELECT, UPDATE")];

#[derive(QueryableByName)]
struct Resource {
    #[diesel(sql_type = Bool)]
    is_known: bool,
}

#[derive(QueryableByName)]
struct Expired {
    #[diesel(sql_type = BigInt)]
    #[allow(dead_code)] // Only the rows are counted.
    id: i64,
}

/// Makes a throttle due, as if its interval had just passed. The next attempt is granted.
///
/// One round trip, which sets `last_locked` of the resource, or of the throttle's key alone, to an interval ago. A throttle
/// that is due already, or was never taken, stays as it is. A throttle that was closed by hand is opened. The details of
/// the last grant are kept.
///
/// # Blocking
///
/// Waits for a transaction that has taken the resource and has not committed yet. The first grant of a key is not visible
/// before its commit, and stays.
///
/// # Errors
///
/// - [`Schema::UnknownResource`](crate::error::Schema::UnknownResource) if the resource has no row: run [`sync`](crate::sync).
/// - [`Input::EmptyKey`](crate::error::Input::EmptyKey), [`Input::NulCharacter`](crate::error::Input::NulCharacter) and
///   [`Input::TooLong`](crate::error::Input::TooLong), before anything is sent.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled) and
///   [`Schema::MissingRights`](crate::error::Schema::MissingRights).
/// - [`Error::ReadOnly`] and [`Error::Database`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Throttle, sync, testing, throttled_resources};
///
/// throttled_resources! {
///     enum Resource {
///         TenantImport = "tenant import" every Duration::from_secs(3600),
///     }
/// }
///
/// # let database = workbench::Database::new();
/// # let conn = &mut database.connect();
/// # diesel_interlock::migrations::install(conn)?;
/// # let _ = sync::<Resource>(conn)?;
/// let import = Throttle::of(Resource::TenantImport).key(7);
/// assert!(import.details("this test").attempt_on(conn)?.granted().is_some());
/// assert!(import.details("this test").attempt_on(conn)?.denied().is_some());
///
/// testing::make_due(conn, &import)?; // an hour later
/// assert!(import.details("this test").attempt_on(conn)?.granted().is_some());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[cfg(feature = "postgres")]
pub fn make_due<R: ThrottledResource>(
    conn: &mut PgConnection,
    throttle: &Throttle<R>,
) -> Result<()> {
    now(send_make_due(&mut Blocking::lent(conn), throttle))
}

pub(super) async fn send_make_due<S, R>(session: &mut S, throttle: &Throttle<R>) -> Result<()>
where
    S: Session,
    R: ThrottledResource,
{
    let checked = throttle.checked(|key| session.name(key))?;
    let label = checked.label;
    let (reply, needs): (QueryResult<Vec<Resource>>, _) = match &checked.key {
        None => {
            let query = diesel::sql_query(RESOURCE_DUE).bind::<Text, _>(label);
            let reply = all_at_read_committed(session, query).await;
            (reply, RESOURCE_DUE_NEEDS)
        }
        Some(key) => {
            let query = diesel::sql_query(KEY_DUE)
                .bind::<Text, _>(label)
                .bind::<Text, _>(key.as_str());
            let reply = all_at_read_committed(session, query).await;
            (reply, KEY_DUE_NEEDS)
        }
    };
    match reply {
        Ok(found) if found.iter().any(|resource| resource.is_known) => Ok(()),
        Ok(_) => Err(Error::Schema(Schema::UnknownResource {
            label: label.to_owned(),
        })),
        Err(error) => Err(installed::explain(session, error, needs, Some(label)).await),
    }
}

/// Lets every request in flight to the service time out now, as if its holder had been too slow or had crashed. Returns the
/// number of these requests.
///
/// One round trip: `UPDATE resource_control.service_request SET expires_at = clock_timestamp() WHERE … RETURNING id`, for the
/// requests to the service that are [in flight](crate::monitor::in_flight()). Under a [prefix](super::key_prefix) the service is
/// that of the prefix. Nothing else changes. The next claim that finds no other slot free marks the requests and takes their
/// slots, and their own releases and renewals return [`Error::TimedOut`]. [`Permit::remaining`](crate::Permit::remaining)
/// follows the holder's clock, so it does not change.
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
#[cfg(feature = "postgres")]
pub fn expire(conn: &mut PgConnection, semaphore: &Semaphore) -> Result<usize> {
    now(send_expire(&mut Blocking::lent(conn), semaphore))
}

pub(super) async fn send_expire<S: Session>(
    session: &mut S,
    semaphore: &Semaphore,
) -> Result<usize> {
    let service = checked_service(semaphore.service(), |name| session.name(name))?;
    let query = diesel::sql_query(EXPIRE).bind::<Text, _>(service.as_str());
    let expired: QueryResult<Vec<Expired>> = all_at_read_committed(session, query).await;
    let expired = installed::explained(session, expired, EXPIRE_NEEDS).await?;
    Ok(expired.len())
}
