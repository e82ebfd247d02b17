//! Throttles that are due when a test says so.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::{Bool, Text};

use crate::error::{Error, Result, Schema};
use crate::installed;
use crate::session::repeat_at_read_committed;
use crate::text::Name;
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
/// - [`Schema::UnknownResource`](crate::error::Schema::UnknownResource) if the resource has no row: run [`sync`](crate::sync).
/// - [`Input::EmptyKey`](crate::error::Input::EmptyKey), [`Input::NulCharacter`](crate::error::Input::NulCharacter), [`Input::TooLong`](crate::error::Input::TooLong), before anything is sent.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled), [`Schema::MissingRights`](crate::error::Schema::MissingRights), [`Error::ReadOnly`], [`Error::Database`].
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
/// assert!(import.clone().details("this test").attempt_on(conn)?.granted().is_some());
/// assert!(import.clone().details("this test").attempt_on(conn)?.denied().is_some());
///
/// testing::make_due(conn, &import)?; // an hour later
/// assert!(import.clone().details("this test").attempt_on(conn)?.granted().is_some());
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn make_due<R: ThrottledResource>(
    conn: &mut PgConnection,
    throttle: &Throttle<R>,
) -> Result<()> {
    let checked = throttle.checked(|key| Name::on(conn, key))?;
    let label = checked.label;
    let answered: QueryResult<Answer> = repeat_at_read_committed(conn, |conn| match &checked.key {
        None => diesel::sql_query(RESOURCE)
            .bind::<Text, _>(label)
            .get_result(conn),
        Some(key) => diesel::sql_query(KEY)
            .bind::<Text, _>(label)
            .bind::<Text, _>(key.as_str())
            .get_result(conn),
    });
    match answered {
        Ok(Answer { is_known: true }) => Ok(()),
        Ok(Answer { is_known: false }) => Err(Error::Schema(Schema::UnknownResource {
            label: label.to_owned(),
        })),
        Err(error) => Err(installed::explain_on(conn, error, Some(label))),
    }
}
