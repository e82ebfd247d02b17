//! A prefix per test.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;

/// Prefixes the names of locks and services and the keys of throttles on this thread until it is
/// dropped, so that tests which run side by side on one database do not exclude each other.
///
/// Reaches the keys of [`LockKey::named`](crate::LockKey::named) and
/// [`LockKey::parts`](crate::LockKey::parts) whose locks are taken on this thread, and the slots that
/// are claimed and the throttles with a [key](crate::Throttle::key) that are attempted on it; call it on
/// every thread that does any of these. Lock keys that are numbers, or that other ecosystems share, stay
/// what they are. So does a throttle without a key, which is one for the whole database: a test that
/// takes it needs a database of its own, or a test transaction and no other test at it.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Semaphore, testing};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// let permit = GEOCODER.try_acquire(&pool)?;
/// let _prefix = testing::key_prefix("a test beside this one");
/// assert!(!GEOCODER.try_acquire(&pool)?.is_busy());
/// # drop(permit);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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

/// Answers a name as the database has it, with the prefix that is in force on this thread: for queries
/// of one's own, such as those of [`monitor`](crate::monitor), which know of no prefix.
///
/// # Examples
///
/// ```
/// use diesel_interlock::testing;
///
/// assert_eq!(testing::prefixed("geocoder"), "geocoder");
/// let _prefix = testing::key_prefix("this test");
/// assert_eq!(testing::prefixed("geocoder"), "this test geocoder");
/// ```
pub fn prefixed(name: &str) -> Cow<'_, str> {
    PREFIX.with_borrow(|prefix| match prefix {
        Some(prefix) if !name.is_empty() => format!("{prefix} {name}").into(),
        _ => name.into(),
    })
}
