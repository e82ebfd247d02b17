//! The sessions that hold advisory locks, and those that wait for them.

// Diesel's macros write aliases and modules without documentation.
#![allow(missing_docs)]

use std::time::Duration;

use chrono::{DateTime, Utc};
use diesel::dsl::{AsSelect, auto_type};
use diesel::pg::Pg;
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;
use diesel::prelude::*;

use super::locks::{AdvisoryLocks, advisory_lock, of_id};
use crate::error::Result;
use crate::key::{LockId, LockKey};
use crate::session::Session as Server;
#[cfg(feature = "postgres")]
use crate::session::{Blocking, now};
use crate::time::Elapsed;

/// The server session that holds an advisory lock, or waits for it.
///
/// A role without `pg_read_all_stats` sees only the process id, the user and the application of other roles' sessions. The
/// other fields are `None`.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[diesel(table_name = advisory_lock, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Session {
    /// The process id, `pg_backend_pid()`. If a prepared transaction holds the lock, this and all other fields are `None`.
    pub pid: Option<i32>,
    /// Its `application_name`.
    pub application_name: Option<String>,
    /// The client's address; `None` over a Unix socket, and where it is hidden.
    pub client_addr: Option<String>,
    /// The client's host name; `None` unless the server looks names up (`log_hostname`).
    pub client_hostname: Option<String>,
    /// The role that it logged in as.
    pub usename: Option<String>,
    /// `active`, `idle`, `idle in transaction` and the like; `None` where it is hidden.
    pub state: Option<String>,
    /// The statement that runs, or ran last; `None` where it is hidden.
    pub query: Option<String>,
    /// When it started; `None` where it is hidden. It took its locks later, but PostgreSQL does not record when.
    pub backend_start: Option<DateTime<Utc>>,
    /// When its open transaction started; `None` where there is none, or where it is hidden.
    pub xact_start: Option<DateTime<Utc>>,
}

/// An advisory lock that is held, and its holder. [`holders()`] loads it.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[diesel(table_name = advisory_lock, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Holder {
    /// The lock. [`Names`](super::Names) has the names of known keys.
    #[diesel(embed)]
    pub key: LockId,
    /// Whether it is held as a shared lock.
    pub shared: bool,
    /// The session that holds it.
    #[diesel(embed)]
    pub session: Session,
}

/// A wait for an advisory lock, and its session. [`waiters()`] loads it.
#[derive(Debug, Clone, PartialEq, Eq, Queryable, Selectable)]
#[diesel(table_name = advisory_lock, check_for_backend(Pg))]
#[non_exhaustive]
pub struct Waiter {
    /// The lock. [`Names`](super::Names) has the names of known keys.
    #[diesel(embed)]
    pub key: LockId,
    /// Whether the session waits for a shared lock.
    pub shared: bool,
    /// When the wait started; `None` before PostgreSQL 14, and for a moment as the wait starts.
    pub waiting_since: Option<DateTime<Utc>>,
    /// The duration of the wait, by the server's clock; `None` where `waiting_since` is.
    #[diesel(deserialize_as = Elapsed<Option<Duration>>)]
    pub waited: Option<Duration>,
    /// The session that waits.
    #[diesel(embed)]
    pub session: Session,
}

/// Selects the advisory locks of the current database that any session holds, with or without this crate. Loads as
/// [`Holder`].
///
/// One round trip over `pg_locks` and `pg_stat_activity`. These views have no snapshot, so a row may be out of date when it
/// arrives. A lock that several sessions share has several rows. A lock that a session has taken several times has one.
///
/// # Examples
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::{AdvisoryLock, monitor};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// # let conn = &mut database.connect();
/// let guard = NIGHTLY.acquire(&pool)?;
/// let holders = monitor::holders()
///     .filter(monitor::of_key(NIGHTLY.key())?)
///     .order(monitor::backend_start)
///     .load(conn)?;
/// assert_eq!(holders[0].session.pid, Some(guard.backend_pid()));
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
#[auto_type]
pub fn holders() -> _ {
    let selection: AsSelect<Holder, Pg> = Holder::as_select();
    AdvisoryLocks
        .filter(advisory_lock::granted)
        .select(selection)
}

/// Selects the waits of all sessions for advisory locks of the current database. Loads as [`Waiter`].
///
/// One round trip, as for [`holders()`]. A session that waits for a session lock through this crate waits in slices of at
/// most 200 milliseconds. Its wait is as long as the current slice, and it is not listed between two slices.
///
/// # Examples
///
/// ```
/// use diesel::prelude::*;
/// use diesel_interlock::monitor;
///
/// fn stuck(conn: &mut PgConnection) -> QueryResult<Vec<monitor::Waiter>> {
///     monitor::waiters().filter(monitor::application_name.like("web-%")).load(conn)
/// }
/// # let database = workbench::Database::new();
/// # assert!(stuck(&mut database.connect())?.is_empty());
/// # Ok::<(), diesel::result::Error>(())
/// ```
#[auto_type]
pub fn waiters() -> _ {
    let selection: AsSelect<Waiter, Pg> = Waiter::as_select();
    AdvisoryLocks
        .filter(diesel::dsl::not(advisory_lock::granted))
        .select(selection)
}

/// Returns who holds the lock: one session, several sharers, or nobody.
///
/// One round trip, the same as `holders().filter(of_key(key)?).load(conn)`.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName), [`Error::Database`](crate::Error::Database).
#[cfg(feature = "postgres")]
pub fn holders_of(conn: &mut PgConnection, key: &LockKey) -> Result<Vec<Holder>> {
    now(find_holders(&mut Blocking::lent(conn), key))
}

pub(crate) async fn find_holders<S: Server>(session: &mut S, key: &LockKey) -> Result<Vec<Holder>> {
    let id = session.lock_id(key)?;
    Ok(session.all(holders().filter(of_id(id))).await?)
}

/// Returns who waits for the lock, the longest wait first.
///
/// One round trip, the same as `waiters().filter(of_key(key)?).order(waiting_since).load(conn)`.
///
/// # Errors
///
/// [`Input::EmptyName`](crate::error::Input::EmptyName), [`Error::Database`](crate::Error::Database).
#[cfg(feature = "postgres")]
pub fn waiters_of(conn: &mut PgConnection, key: &LockKey) -> Result<Vec<Waiter>> {
    now(find_waiters(&mut Blocking::lent(conn), key))
}

pub(super) async fn find_waiters<S: Server>(session: &mut S, key: &LockKey) -> Result<Vec<Waiter>> {
    let id = session.lock_id(key)?;
    let waiters = waiters().filter(of_id(id));
    Ok(session
        .all(waiters.order(advisory_lock::waiting_since))
        .await?)
}

#[cfg(test)]
mod tests {
    use super::super::locks::LOCKS;
    use super::*;

    #[test]
    fn holders_and_waiters_are_read_from_one_view_and_told_apart() {
        let holders = diesel::debug_query::<Pg, _>(&holders()).to_string();
        assert_eq!(
            holders,
            format!(
                "SELECT \"advisory_lock\".\"key\", \"advisory_lock\".\"key1\", \
                 \"advisory_lock\".\"key2\", \"advisory_lock\".\"shared\", \
                 \"advisory_lock\".\"pid\", \"advisory_lock\".\"application_name\", \
                 \"advisory_lock\".\"client_addr\", \"advisory_lock\".\"client_hostname\", \
                 \"advisory_lock\".\"usename\", \"advisory_lock\".\"state\", \
                 \"advisory_lock\".\"query\", \"advisory_lock\".\"backend_start\", \
                 \"advisory_lock\".\"xact_start\" FROM ({LOCKS}) AS \"advisory_lock\" \
                 WHERE \"advisory_lock\".\"granted\" -- binds: []"
            )
        );
        let waiters = diesel::debug_query::<Pg, _>(&waiters()).to_string();
        assert!(
            waiters.contains("\"advisory_lock\".\"waiting_since\", \"advisory_lock\".\"waited\"")
        );
        assert!(waiters.ends_with(" NOT (\"advisory_lock\".\"granted\") -- binds: []"));
    }
}
