//! For the tests of an application that uses this crate, on a real server.
//!
//! ```
//! use diesel_interlock::{AdvisoryLock, testing};
//!
//! static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
//!
//! # let database = workbench::Database::new();
//! # let pool = database.pool(2);
//! // This test's locks do not meet those of the tests that run beside it.
//! let _prefix = testing::key_prefix("nightly() leaves nothing behind");
//! NIGHTLY.try_with(&pool, |_| Ok::<_, diesel_interlock::Error>(()))?;
//! let mut conn = pool.get()?;
//! testing::assert_not_held(&NIGHTLY, &mut conn);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Locks work inside `begin_test_transaction` (and r2d2's `TestCustomizer`): it does not count as
//! an open transaction. Migrations are refused there, since they commit. What
//! [`AdvisoryLock::transaction`] takes there stays until the test transaction ends.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;
use std::time::{Duration, Instant};

use diesel::pg::PgConnection;
use diesel::prelude::*;

use crate::advisory::AdvisoryLock;
use crate::error::{Error, Result};
use crate::monitor::{self, Holder};

/// A session that discards its connection frees its locks within milliseconds, but not at once.
const PATIENCE: Duration = Duration::from_secs(2);

/// Lists the advisory locks that are held in this database, by whichever session. One round trip:
/// [`monitor::holders()`], in the order of their keys.
///
/// # Errors
///
/// [`Error::Database`].
pub fn held_locks(conn: &mut PgConnection) -> Result<Vec<Holder>> {
    monitor::holders()
        .order((monitor::key, monitor::key1, monitor::key2, monitor::pid))
        .load(conn)
        .map_err(Error::Database)
}

/// Panics if any advisory lock is held in this database, and says which and by whom.
///
/// Looks again for up to two seconds before it panics: a discarded connection frees its locks a
/// moment after it was discarded.
///
/// # Panics
///
/// If a lock is held, or the database cannot be asked.
#[track_caller]
pub fn assert_nothing_held(conn: &mut PgConnection) {
    assert_none(conn, "no advisory lock", |_| true);
}

/// Panics if the lock is held by any session of this database, and says by which. Looks again as
/// [`assert_nothing_held`] does.
///
/// # Panics
///
/// If the lock is held, or the database cannot be asked.
#[track_caller]
pub fn assert_not_held(lock: &AdvisoryLock, conn: &mut PgConnection) {
    let id = match lock.key().id() {
        Ok(id) => id,
        Err(error) => panic!("{error}"),
    };
    assert_none(conn, &format!("{} not", lock.key()), |held| held.key == id);
}

#[track_caller]
fn assert_none(conn: &mut PgConnection, what: &str, of_interest: impl Fn(&Holder) -> bool) {
    let end = Instant::now() + PATIENCE;
    loop {
        let held: Vec<_> = match held_locks(conn) {
            Ok(held) => held.into_iter().filter(|lock| of_interest(lock)).collect(),
            Err(error) => panic!("cannot look at pg_locks: {error}"),
        };
        if held.is_empty() {
            return;
        }
        assert!(
            Instant::now() < end,
            "expected {what} to be held, but: {held:#?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Prefixes the names of locks and services on this thread until it is dropped, so that tests which run side by
/// side on one database do not exclude each other.
///
/// Reaches the keys of [`LockKey::named`](crate::LockKey::named) and [`LockKey::parts`](crate::LockKey::parts)
/// whose locks are taken on this thread, and the slots that are claimed on it; call it on every thread
/// that does either. Keys that are numbers, or that other ecosystems
/// share, stay what they are.
#[must_use = "if unused the prefix ends at once"]
pub fn key_prefix(prefix: impl Into<String>) -> KeyPrefix {
    let before = PREFIX.with_borrow_mut(|current| current.replace(prefix.into()));
    KeyPrefix {
        before,
        _of_this_thread: PhantomData,
    }
}

/// A prefix in force. Made by [`key_prefix`]; dropping it brings back the one before.
pub struct KeyPrefix {
    before: Option<String>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for KeyPrefix {
    fn drop(&mut self) {
        let before = self.before.take();
        PREFIX.with_borrow_mut(|current| *current = before);
    }
}

impl fmt::Debug for KeyPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        PREFIX.with_borrow(|current| f.debug_tuple("KeyPrefix").field(current).finish())
    }
}

thread_local! {
    static PREFIX: RefCell<Option<String>> = const { RefCell::new(None) };
}

pub(crate) fn prefixed(name: &str) -> Cow<'_, str> {
    PREFIX.with_borrow(|prefix| match prefix {
        Some(prefix) if !name.is_empty() => format!("{prefix} {name}").into(),
        _ => name.into(),
    })
}
