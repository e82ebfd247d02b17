//! Locks that are held, and assertions that none is.

use std::collections::HashSet;

use diesel::dsl::sql;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::BigInt;

use super::in_flight::{Tables, find_in_flight};
#[cfg(feature = "postgres")]
use super::polling::assert_none;
use crate::advisory::AdvisoryLock;
use crate::error::{Error, Result};
use crate::installed;
use crate::key::LockId;
use crate::monitor::{self, Holder, ServiceRequest};
use crate::session::Session;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};

/// Lists the advisory locks that are held in this database, by any session.
///
/// One round trip if no lock is held: [`monitor::holders()`], ordered by key. Otherwise up to three more round trips find
/// the locks that a claim of a slot, or an attempt at a throttle with a key, holds until its transaction ends. These are
/// left out, because no caller requested them, and inside a test transaction they stay. They are recognised by the row of the
/// request or of the key. If the same test transaction deletes that row, as pruning does, the lock is listed.
///
/// # Errors
///
/// [`Schema::MissingRights`](crate::error::Schema::MissingRights), [`Error::Database`].
#[cfg(feature = "postgres")]
pub fn held_locks(conn: &mut PgConnection) -> Result<Vec<Holder>> {
    now(find_held(&mut Blocking::lent(conn)))
}

pub(super) async fn find_held<S: Session>(session: &mut S) -> Result<Vec<Holder>> {
    let order = (monitor::key, monitor::key1, monitor::key2, monitor::pid);
    let mut held: Vec<Holder> = match session.all(monitor::holders().order(order)).await {
        Ok(held) => held,
        Err(error) => return Err(Error::Database(error)),
    };
    if !held.is_empty() {
        let unrequested = locks_of_transactions(session).await?;
        held.retain(|lock| !unrequested.contains(&lock.key));
    }
    Ok(held)
}

/// Returns the locks that claims and attempts hold until their transaction ends. That is at once, except inside a test
/// transaction. Up to three round trips.
async fn locks_of_transactions<S: Session>(session: &mut S) -> Result<HashSet<LockId>> {
    let tables = Tables::of(session).await;
    let tables = installed::explained(session, tables, &[]).await?;
    let mut locks = Vec::<i64>::new();
    if tables.service_request {
        let query = sql::<BigInt>(
            "SELECT resource_control.service_request_lock(r.service, r.slot) \
             FROM (SELECT DISTINCT service, slot FROM resource_control.service_request) AS r",
        );
        let needs = &[
            ("service_request_lock", "EXECUTE"),
            ("service_request", "SELECT"),
        ];
        let found = session.all::<i64, _>(query).await;
        locks.extend(installed::explained(session, found, needs).await?);
    }
    if tables.throttled_key {
        let query = sql::<BigInt>(
            "SELECT resource_control.throttled_key_lock(k.resource_id, k.key) \
             FROM resource_control.throttled_key AS k",
        );
        let needs = &[
            ("throttled_key_lock", "EXECUTE"),
            ("throttled_key", "SELECT"),
        ];
        let found = session.all::<i64, _>(query).await;
        locks.extend(installed::explained(session, found, needs).await?);
    }
    Ok(locks.into_iter().map(LockId::BigInt).collect())
}

/// A lock or a slot that is held, as the message shows it.
#[derive(Debug)]
#[allow(dead_code)] // Read by `Debug`.
pub(super) enum Held {
    Lock(Holder),
    Slot(ServiceRequest),
}

/// Panics if an advisory lock is held in this database, or a request to a service is in flight. The message names each
/// with its holder.
///
/// No prefix restricts it. Where tests share a database, use [`assert_not_held`] and
/// [`assert_none_in_flight`](super::assert_none_in_flight) for one lock or semaphore. Throttles are not held, because a
/// grant is never given back. In a test transaction that prunes requests or keys of throttles, their locks are found: see
/// [`held_locks`].
///
/// It polls for up to two seconds before it panics, with the round trips of [`held_locks`] and
/// [`requests_in_flight`](super::requests_in_flight), because a discarded connection frees its locks, and a dropped permit
/// its slot, a moment later.
///
/// # Panics
///
/// If a lock is held, a request is in flight, or a query fails.
///
/// # Examples
///
/// ```
/// use diesel_interlock::{AdvisoryLock, testing};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # let conn = &mut database.connect();
/// let guard = NIGHTLY.acquire(&pool)?;
/// let report = std::thread::spawn(move || {
///     let _guard = guard;
///     panic!("out of paper");
/// });
/// assert!(report.join().is_err());
/// testing::assert_nothing_held(conn);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
#[cfg(feature = "postgres")]
pub fn assert_nothing_held(conn: &mut PgConnection) {
    let session = &mut Blocking::lent(conn);
    assert_none("nothing is held", || now(find_anything(session)));
}

pub(super) async fn find_anything<S: Session>(session: &mut S) -> Result<Vec<Held>> {
    let locks = find_held(session).await?;
    let mut held: Vec<_> = locks.into_iter().map(Held::Lock).collect();
    let requests = find_in_flight(session).await?;
    held.extend(requests.into_iter().map(Held::Slot));
    Ok(held)
}

/// Panics if any session of this database holds the lock. The message names the session.
///
/// It polls for up to two seconds before it panics, one round trip each time ([`monitor::holders_of`]), as
/// [`assert_nothing_held`] does.
///
/// # Panics
///
/// If the lock is held, or the query fails.
///
/// # Examples
///
/// ```
/// use diesel_interlock::{AdvisoryLock, testing};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(1);
/// # let conn = &mut database.connect();
/// drop(NIGHTLY.acquire(&pool)?);
/// testing::assert_not_held(conn, &NIGHTLY);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
#[cfg(feature = "postgres")]
pub fn assert_not_held(conn: &mut PgConnection, lock: &AdvisoryLock) {
    let session = &mut Blocking::lent(conn);
    let expected = nobody_holds(session, lock);
    assert_none(&expected, || {
        now(monitor::find_holders(session, lock.key()))
    });
}

/// Returns the expectation that nobody holds the lock.
pub(super) fn nobody_holds<S: Session>(session: &mut S, lock: &AdvisoryLock) -> String {
    let key = match session.lock_id(lock.key()) {
        Ok(id) => lock.key().with_id(id).to_string(),
        Err(_) => lock.key().to_string(),
    };
    format!("nobody holds the lock {key}")
}
