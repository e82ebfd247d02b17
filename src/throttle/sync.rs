//! Adding to the database what a program declares.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::data_types::PgInterval;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel::sql_types::{BigInt, Bool, Interval, Nullable, Text};

use super::resource::{DeclaredResources, checked};
use crate::advisory::AdvisoryLock;
use crate::error::{Error, Result, Schema};
use crate::events::{self, Event, Outcome, Subject};
use crate::installed;
use crate::key::LockKey;
use crate::session::sent as send;
use crate::transaction;

/// The lock under which [`sync`] writes. Its key never changes.
static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::frozen(
    "diesel_interlock sync",
    -9069087413270826968,
));

/// What [`sync`] found and did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "`sync` leaves the intervals in `different` as they are in the database"]
#[non_exhaustive]
pub struct Synced {
    /// The labels of resources that were added, by this call.
    pub added: Vec<String>,
    /// The resources whose interval in the database is not the declared one.
    pub different: Vec<Difference>,
}

/// A resource whose interval in the database is not the declared one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The resource.
    pub label: String,
    /// The interval that the program declares.
    pub declared: Duration,
    /// The interval that the database has.
    pub in_database: Duration,
}

#[derive(QueryableByName)]
struct Found {
    #[diesel(sql_type = Nullable<BigInt>)]
    microseconds: Option<i64>,
}

const FIND: &str = "
    SELECT (
            SELECT (extract(epoch FROM resource_control.elapsed(throttle_interval)) * 1000000)::bigint
            FROM resource_control.throttled_resource WHERE resource_id::text = $1
        ) AS microseconds";

/// Adds the declared resources that the database does not have, and returns what it added and
/// which intervals differ.
///
/// Meant for every start of a program, also of twenty instances at once. It reads first, one round
/// trip per resource, and sends no DDL when nothing is missing, so it then succeeds for a role that
/// may not alter the type. Otherwise it takes a session lock, and adds label and row of each
/// missing resource (`ALTER TYPE … ADD VALUE IF NOT EXISTS`, `INSERT … ON CONFLICT DO NOTHING`),
/// each committed by itself.
///
/// The database's interval counts from then on: a changed `every` has no effect until [`sync_intervals`],
/// because an operator may have changed the row. Each interval that differs is returned, and logged as a
/// [warning](crate#events). Resources that are not declared are left alone.
///
/// # Errors
///
/// - [`Input::BadLabel`](crate::error::Input::BadLabel), [`Input::BadInterval`](crate::error::Input::BadInterval) and [`Input::NulCharacter`](crate::error::Input::NulCharacter), before anything is
///   sent.
/// - [`Misplaced::CommitsInTransaction`](crate::error::Misplaced::CommitsInTransaction) inside a transaction, a test transaction included.
/// - [`Schema::NotInstalled`](crate::error::Schema::NotInstalled); [`Schema::MissingRights`](crate::error::Schema::MissingRights) if something is missing and the role does not
///   own the type.
/// - Those of [`AdvisoryLock::acquire_on`].
pub fn sync<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    let synced = add_missing::<R>(conn)?;
    for difference in &synced.different {
        let resource = Subject::Throttle {
            resource: &difference.label,
            key: None,
        };
        let outcome = Outcome::Different {
            declared: difference.declared,
            in_database: difference.in_database,
        };
        events::record(&Event::new("sync", resource, outcome));
    }
    Ok(synced)
}

fn add_missing<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    let declared: Vec<_> = R::ALL.iter().map(checked).collect::<Result<_>>()?;
    transaction::refuse_any(conn)?;
    let (missing, mut synced) = compare(conn, &declared)?;
    if missing.is_empty() {
        return Ok(synced);
    }
    let mut guard = LOCK.acquire_on(conn)?;
    let (missing, seen) = compare(guard.conn(), &declared)?;
    synced.different = seen.different;
    for (label, microseconds) in missing {
        add(guard.conn(), &label, microseconds)?;
        synced.added.push(label);
    }
    guard.release()?;
    Ok(synced)
}

/// As [`sync`], and then overwrites the intervals that differ with the declared ones, which it returns as
/// `different` and does not log.
///
/// # Errors
///
/// As [`sync`].
pub fn sync_intervals<R: DeclaredResources>(conn: &mut PgConnection) -> Result<Synced> {
    let synced = add_missing::<R>(conn)?;
    for Difference {
        label, declared, ..
    } in &synced.different
    {
        let microseconds = declared.as_micros() as i64;
        diesel::sql_query(
            "UPDATE resource_control.throttled_resource SET throttle_interval = $1 \
             WHERE resource_id::text = $2",
        )
        .bind::<Interval, _>(PgInterval::from_microseconds(microseconds))
        .bind::<Text, _>(label)
        .execute(conn)
        .map_err(|error| installed::explain_on(conn, error, None))?;
    }
    Ok(synced)
}

type Declared = (String, i64);

/// What of the declared is missing, and what is different.
fn compare(conn: &mut PgConnection, declared: &[Declared]) -> Result<(Vec<Declared>, Synced)> {
    let mut missing = Vec::new();
    let mut synced = Synced::default();
    for (label, microseconds) in declared {
        let find = |conn: &mut _| {
            diesel::sql_query(FIND)
                .bind::<Text, _>(label)
                .get_result(conn)
        };
        let found: Found =
            send(conn, find).map_err(|error| installed::explain_on(conn, error, None))?;
        match found.microseconds {
            None => missing.push((label.clone(), *microseconds)),
            Some(in_database) if in_database != *microseconds => {
                synced.different.push(Difference {
                    label: label.clone(),
                    declared: from_microseconds(*microseconds),
                    in_database: from_microseconds(in_database),
                });
            }
            Some(_) => {}
        }
    }
    Ok((missing, synced))
}

/// In two statements: a new label cannot be used by the transaction that adds it.
fn add(conn: &mut PgConnection, label: &str, microseconds: i64) -> Result<()> {
    // DDL takes no bind parameters. An E'' literal means the same under every setting.
    let literal = label.replace('\\', r"\\").replace('\'', "''");
    conn.batch_execute(&format!(
        "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE IF NOT EXISTS E'{literal}'"
    ))
    .map_err(|error| explain_ddl(conn, error))?;
    diesel::sql_query(
        "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) \
         VALUES ($1::resource_control.throttled_resource_enum, $2) ON CONFLICT DO NOTHING",
    )
    .bind::<Text, _>(label)
    .bind::<Interval, _>(PgInterval::from_microseconds(microseconds))
    .execute(conn)
    .map_err(|error| installed::explain_on(conn, error, None))?;
    Ok(())
}

/// PostgreSQL refuses to add a label, even one that is there, to whoever does not own the type.
fn explain_ddl(conn: &mut PgConnection, error: DieselError) -> Error {
    #[derive(QueryableByName)]
    struct Owner {
        #[diesel(sql_type = Text)]
        role: String,
        #[diesel(sql_type = Bool)]
        owns: bool,
    }
    if let DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) = &error {
        let owner: QueryResult<Owner> = diesel::sql_query(
            "SELECT current_user::text AS role, \
             pg_catalog.pg_has_role(typowner, 'USAGE') AS owns FROM pg_catalog.pg_type \
             WHERE oid = 'resource_control.throttled_resource_enum'::regtype",
        )
        .get_result(conn);
        if let Ok(Owner { role, owns: false }) = owner {
            let missing = "the ownership of throttled_resource_enum, to add a resource";
            return Error::Schema(Schema::MissingRights { role, missing });
        }
    }
    installed::explain_on(conn, error, None)
}

fn from_microseconds(microseconds: i64) -> Duration {
    Duration::from_micros(microseconds.unsigned_abs())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_number_of_the_lock_is_that_of_its_name() {
        let key = super::LOCK.key();
        let number = crate::fnv1a(key.name().unwrap_or_default());
        assert_eq!(key, &crate::LockKey::bigint(number));
    }
}
