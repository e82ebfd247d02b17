//! Throttles that are due when a test says so.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};

use crate::error::{Error, Result};
use crate::installed;
use crate::read_committed;
use crate::text;
use crate::throttle::{Throttle, ThrottledResource};

/// The label is compared as a text: one that the enumerated type does not have is no error, which would
/// abort a test transaction.
const RESOURCE: &str = "
    WITH resource AS (
        SELECT r.resource_id,
            pg_catalog.clock_timestamp() - resource_control.elapsed(r.throttle_interval) AS due
        FROM resource_control.throttled_resource AS r WHERE r.resource_id::pg_catalog.text = $1
    ), made_due AS (
        UPDATE resource_control.throttled_resource AS r SET last_locked = resource.due
        FROM resource
        WHERE r.resource_id = resource.resource_id AND r.last_locked > resource.due
    )
    SELECT EXISTS (SELECT FROM resource) AS is_known";

const KEY: &str = "
    WITH resource AS (
        SELECT r.resource_id,
            pg_catalog.clock_timestamp() - resource_control.elapsed(r.throttle_interval) AS due
        FROM resource_control.throttled_resource AS r WHERE r.resource_id::pg_catalog.text = $1
    ), made_due AS (
        UPDATE resource_control.throttled_key AS k SET last_locked = resource.due
        FROM resource
        WHERE k.resource_id = resource.resource_id AND k.key = $2 AND k.last_locked > resource.due
    )
    SELECT EXISTS (SELECT FROM resource) AS is_known";

#[derive(QueryableByName)]
struct Answer {
    #[diesel(sql_type = Bool)]
    is_known: bool,
}

/// Makes a throttle due, as if its interval had just passed: the next attempt is granted.
///
/// One round trip, which sets `last_locked` of the resource, or of the throttle's key alone, to an
/// interval ago. A throttle that is due already, or was never taken, stays as it is; one that was closed
/// by hand is opened. Who took it last is kept.
///
/// # Blocking
///
/// Waits for a transaction that has taken the resource and not committed yet. The first grant of a key
/// is not seen before its commit, and stays.
///
/// # Errors
///
/// - [`Error::UnknownResource`] if the resource has no row: run [`sync`](crate::sync).
/// - [`Error::EmptyKey`], [`Error::NulCharacter`], [`Error::TooLong`], before anything is sent.
/// - [`Error::NotInstalled`], [`Error::MissingRights`], [`Error::ReadOnly`], [`Error::Database`].
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
/// assert!(import.attempt(conn, "this test")?.granted().is_some());
/// assert!(import.attempt(conn, "this test")?.denied().is_some());
///
/// testing::make_due(conn, &import)?; // an hour later
/// assert!(import.attempt(conn, "this test")?.granted().is_some());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn make_due<R: ThrottledResource>(
    conn: &mut PgConnection,
    throttle: &Throttle<R>,
) -> Result<()> {
    let _names = text::names_on(conn);
    let (label, key) = throttle.checked()?;
    let answered: QueryResult<Answer> = read_committed::repeat(conn, |conn| match key.as_deref() {
        None => diesel::sql_query(RESOURCE)
            .bind::<Text, _>(label)
            .get_result(conn),
        Some(key) => diesel::sql_query(KEY)
            .bind::<Text, _>(label)
            .bind::<Text, _>(key)
            .get_result(conn),
    });
    match answered {
        Ok(Answer { is_known: true }) => Ok(()),
        Ok(Answer { is_known: false }) => Err(Error::UnknownResource {
            label: label.to_owned(),
        }),
        Err(error) => Err(installed::explain(conn, error, Some(label))),
    }
}
