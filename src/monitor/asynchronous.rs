//! The functions of the monitor that take a connection, asynchronous.

use diesel_async::AsyncPgConnection;

use super::rate_limits::{KeyNearLimit, find_keys_near_limit};
use super::requests::{Slots, find_slots};
use super::who_holds::{Holder, Waiter, find_holders, find_waiters};
use crate::error::Result;
use crate::key::LockKey;
use crate::rate_limit::RateLimit;
use crate::session::Asynchronous;

/// Returns who holds the lock: one session, several sharers, or nobody. As
/// `monitor::holders_of` of the blocking half.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName), [`Error::Database`](crate::Error::Database).
pub async fn holders_of(conn: &mut AsyncPgConnection, key: &LockKey) -> Result<Vec<Holder>> {
    find_holders(&mut Asynchronous::lent(conn), key).await
}

/// Returns who waits for the lock, the longest wait first. As
/// `monitor::waiters_of` of the blocking half.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName), [`Error::Database`](crate::Error::Database).
pub async fn waiters_of(conn: &mut AsyncPgConnection, key: &LockKey) -> Result<Vec<Waiter>> {
    find_waiters(&mut Asynchronous::lent(conn), key).await
}

/// Returns which of the given number of slots of a service are free, and how many requests are in flight. As
/// `monitor::slots` of the blocking half.
///
/// # Errors
///
/// As in the blocking half.
pub async fn slots(conn: &mut AsyncPgConnection, service: &str, slots: u32) -> Result<Slots> {
    find_slots(&mut Asynchronous::lent(conn), service, slots).await
}

/// Returns the keys of a limit that are nearest to it, those with the fewest units left first, and at most so many. As
/// `monitor::keys_near_limit` of the blocking half.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName), [`Input::BadQuota`](crate::error::Input::BadQuota),
/// [`Schema::NotInstalled`](crate::error::Schema::NotInstalled),
/// [`Schema::MissingRights`](crate::error::Schema::MissingRights),
/// [`Error::Database`](crate::Error::Database).
pub async fn keys_near_limit(
    conn: &mut AsyncPgConnection,
    limit: &impl AsRef<RateLimit>,
    rows: u32,
) -> Result<Vec<KeyNearLimit>> {
    find_keys_near_limit(&mut Asynchronous::lent(conn), limit.as_ref(), rows).await
}
