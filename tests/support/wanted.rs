//! One lock, or several at once: a test of both cases.

use diesel_interlock::LockKey;
use workbench::Database;

use super::{Observer, foreign_holder};
use crate::half::AdvisoryLock;

/// A handle, and the locks that it takes.
pub(crate) struct Wanted {
    pub(crate) lock: AdvisoryLock,
    pub(crate) parts: Vec<AdvisoryLock>,
}

impl Wanted {
    /// The two cases of a test: one lock, and unordered locks of every kind.
    pub(crate) fn one_and_several(lock: &AdvisoryLock) -> [Self; 2] {
        [Self::of(vec![lock.clone()]), Self::several(lock)]
    }

    pub(crate) fn several(lock: &AdvisoryLock) -> Self {
        Self::of(vec![
            lock.key("a key"),
            AdvisoryLock::new(LockKey::pair(i32::MIN, -1)),
            AdvisoryLock::new(LockKey::bigint(i64::MIN)),
            AdvisoryLock::new(LockKey::pair(-1, i32::MAX)),
            AdvisoryLock::new(LockKey::bigint(-1)),
            lock.clone(),
            AdvisoryLock::new(LockKey::pair(0, 0)),
            AdvisoryLock::new(LockKey::bigint(0)),
        ])
    }

    pub(crate) fn of(parts: Vec<AdvisoryLock>) -> Self {
        let lock = match &parts[..] {
            [one] => one.clone(),
            all => AdvisoryLock::all(all),
        };
        Self { lock, parts }
    }

    /// The key of one of its locks.
    pub(crate) fn key(&self) -> &LockKey {
        self.parts[0].lock_key()
    }

    /// Takes that lock on another session.
    pub(crate) fn foreign_holder(&self, database: &Database) -> diesel::PgConnection {
        foreign_holder(database, self.key())
    }

    /// Asserts that each of the locks is held by one session, and that no other lock is held.
    #[track_caller]
    pub(crate) fn assert_held(&self, observer: &mut Observer) {
        for lock in &self.parts {
            assert_eq!(observer.holders(lock.lock_key()), 1, "{lock:?}");
        }
        assert_eq!(observer.all_held(), self.parts.len() as i64);
    }
}
