//! That nothing is held any more.

use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::in_flight::requests_in_flight;
use super::patience::assert_none;
use super::tables;
use crate::advisory::AdvisoryLock;
use crate::error::{Error, Result};
use crate::installed;
use crate::monitor::{self, Holder, ServiceRequest};
use crate::text;

/// Lists the advisory locks that are held in this database, by whichever session.
///
/// One round trip where there are none: [`monitor::holders()`], in the order of their keys. Else up to
/// three more tell which of them a claim of a slot, or an attempt at a throttle with a key, holds until
/// its transaction ends. These are left out: nobody asked for them, and inside a test transaction they
/// stay.
///
/// # Errors
///
/// [`Schema::MissingRights`](crate::error::Schema::MissingRights), [`Error::Database`].
pub fn held_locks(conn: &mut PgConnection) -> Result<Vec<Holder>> {
    let mut held: Vec<Holder> = monitor::holders()
        .order((monitor::key, monitor::key1, monitor::key2, monitor::pid))
        .load(conn)
        .map_err(Error::Database)?;
    if !held.is_empty() {
        let not_asked_for = tables::locks_of_transactions(conn)
            .map_err(|error| installed::explain_on(conn, error, None))?;
        held.retain(|lock| !not_asked_for.contains(&lock.key));
    }
    Ok(held)
}

/// Something that somebody holds, for the message.
#[derive(Debug)]
#[allow(dead_code)] // Read by `Debug`.
enum Held {
    Lock(Holder),
    Slot(ServiceRequest),
}

/// Panics if an advisory lock is held in this database, or a request to a service is in flight, and
/// says which and by whom.
///
/// Whatever their names: no prefix restricts it. Where tests share a database, ask about the lock or
/// the semaphore, with [`assert_not_held`] and [`assert_none_in_flight`](super::assert_none_in_flight). Throttles are not held: what
/// they hand out is never given back.
///
/// The round trips of [`held_locks`] and [`requests_in_flight`], again and again for up to two seconds
/// before it panics: a discarded connection frees its locks, and a dropped permit its slot, a moment
/// later.
///
/// # Panics
///
/// If a lock is held, a request is in flight, or the database cannot be asked.
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
pub fn assert_nothing_held(conn: &mut PgConnection) {
    assert_none("nothing is held", || {
        let mut held: Vec<_> = held_locks(conn)?.into_iter().map(Held::Lock).collect();
        held.extend(requests_in_flight(conn)?.into_iter().map(Held::Slot));
        Ok(held)
    });
}

/// Panics if the lock is held by any session of this database, and says by which.
///
/// One round trip ([`monitor::holders_of`]), again and again for up to two seconds before it panics, as
/// [`assert_nothing_held`] does.
///
/// # Panics
///
/// If the lock is held, or the database cannot be asked.
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
pub fn assert_not_held(conn: &mut PgConnection, lock: &AdvisoryLock) {
    let _names = text::names_on(conn);
    let expected = format!("nobody holds the lock {}", lock.key());
    assert_none(&expected, || monitor::holders_of(conn, lock.key()));
}
