//! Synchronization of the declared resources with the database, on a blocking or an asynchronous session.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;

use std::time::Duration;

use diesel::result::{DatabaseErrorKind, Error as DieselError};

use super::rules::Declared;
use super::sql::{self, Owner};
use crate::advisory::AdvisoryLock;
use crate::error::{Error, Result, Schema};
use crate::events::{self, Event, Outcome, Subject};
use crate::installed;
use crate::key::LockKey;
use crate::session::Session;

/// The lock under which [`sync`](crate::sync) writes. Its key never changes.
pub(super) static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::frozen(
    "diesel_interlock sync",
    -9069087413270826968,
));

/// What [`sync`](crate::sync) inserted, and which intervals differ.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "`sync` leaves the intervals in `different` as they are in the database"]
#[non_exhaustive]
pub struct Synced {
    /// The labels of the resources that this call inserted.
    pub added: Vec<String>,
    /// The resources whose interval in the database differs from the declared one.
    pub different: Vec<Difference>,
}

/// A resource whose interval in the database differs from the declared one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The label of the resource.
    pub label: String,
    /// The interval that the program declares.
    pub declared: Duration,
    /// The interval in the database.
    pub in_database: Duration,
}

/// A declared resource that has no row in the database.
#[derive(Debug)]
pub(super) struct Missing {
    resource: Declared,
    has_label: bool,
}

/// Finds which declared resources the database does not have, and which intervals differ. One round trip per resource.
pub(super) async fn compare<S: Session>(
    session: &mut S,
    declared: &[Declared],
) -> Result<(Vec<Missing>, Synced)> {
    let mut missing = Vec::new();
    let mut synced = Synced::default();
    for resource in declared {
        let found = session.one(sql::find(&resource.label)).await;
        let found = installed::explained(session, found, sql::FIND_NEEDS).await?;
        match found.microseconds {
            None => missing.push(Missing {
                resource: resource.clone(),
                has_label: found.has_label,
            }),
            Some(in_database) if in_database != resource.microseconds => {
                synced.different.push(Difference {
                    label: resource.label.clone(),
                    declared: from_microseconds(resource.microseconds),
                    in_database: from_microseconds(in_database),
                });
            }
            Some(_) => {}
        }
    }
    Ok((missing, synced))
}

/// Compares again under the lock, and inserts what is missing. A label that exists is not added again, because PostgreSQL would
/// refuse even that to a role that does not own the type.
pub(super) async fn add_missing<S: Session>(
    session: &mut S,
    declared: &[Declared],
) -> Result<Synced> {
    let (missing, mut synced) = compare(session, declared).await?;
    for Missing {
        resource,
        has_label,
    } in missing
    {
        if !has_label {
            if let Err(error) = session.batch(&sql::add_label(&resource.label)).await {
                return Err(explain_ddl(session, error).await);
            }
        }
        let insert = sql::insert_resource(&resource.label, resource.microseconds);
        let inserted = session.execute(insert).await;
        installed::explained(session, inserted, sql::INSERT_NEEDS).await?;
        synced.added.push(resource.label);
    }
    Ok(synced)
}

/// Overwrites the intervals that differ with the declared ones.
pub(super) async fn overwrite<S: Session>(session: &mut S, different: &[Difference]) -> Result<()> {
    for difference in different {
        let microseconds = difference.declared.as_micros() as i64;
        let set = sql::set_interval(&difference.label, microseconds);
        let set = session.execute(set).await;
        installed::explained(session, set, sql::SET_NEEDS).await?;
    }
    Ok(())
}

/// Logs each interval that differs.
pub(super) fn log(different: &[Difference]) {
    for difference in different {
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
}

/// Returns what an error of `ALTER TYPE` means.
async fn explain_ddl<S: Session>(session: &mut S, error: DieselError) -> Error {
    if let DieselError::DatabaseError(DatabaseErrorKind::Unknown, _) = &error {
        if let Ok(Owner { role, owns: false }) = session.one(sql::find_owner()).await {
            return Error::Schema(Schema::MissingRights {
                role,
                missing: "the ownership of throttled_resource_enum, to add a resource".to_owned(),
                source: Some(error),
            });
        }
    }
    installed::by_kind(error)
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
