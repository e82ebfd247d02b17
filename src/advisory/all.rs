//! Several locks at once: all of them, or none.

use std::fmt;
use std::sync::Arc;

use super::AdvisoryLock;
use super::sql::{Lock, Released, Tried};
use crate::error::{Error, Result};
use crate::key::{LockId, LockKey};
use crate::long_wait::HeldHere;
use crate::pool::Pool;
use crate::statement::Database;

/// The most locks of one operation: the server keeps the locks of all sessions in a table of a
/// fixed size, which has room for some thousands.
const MOST: usize = 1000;

/// # Several locks
impl<P: Pool> AdvisoryLock<P> {
    /// Returns one lock for several things: a holder has all of them or none.
    ///
    /// ```
    /// use diesel_interlock::{AdvisoryLock, Error, PgPool};
    ///
    /// static ACCOUNT: AdvisoryLock = AdvisoryLock::named("account");
    ///
    /// fn transfer(pool: &PgPool, from: i64, to: i64) -> Result<(), Error> {
    ///     let both = AdvisoryLock::all([&ACCOUNT.key(from), &ACCOUNT.key(to)]);
    ///     let mut guard = both.acquire(pool)?;
    ///     let conn = guard.conn(); // the one session that holds both
    ///     # let _ = conn;
    ///     guard.release()
    /// }
    /// # transfer(&workbench::Database::new().pool(1), 7, 8)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// Use it like a single lock; it takes as many round trips. One statement takes the locks in
    /// the order of their numbers. At the first busy lock, the statement stops and releases those
    /// that it has taken. A waiter waits only for the busy lock, holds none meanwhile, and then
    /// tries all of them again. So callers do not deadlock, in whatever order they name the locks.
    ///
    /// In a transaction, a waiter keeps the locks before the busy one. All such callers take the
    /// locks in the same order, so they do not deadlock with each other. `try_acquire_xact` and
    /// `acquire_xact_timeout` take two more round trips, for a savepoint: rolling back to it gives
    /// the locks back after a refusal.
    ///
    /// A lock that is given twice is taken once, exclusively unless both are shared. Using no
    /// locks, or more than 1,000, is an [`Error::Input`].
    pub fn all<'l>(locks: impl IntoIterator<Item = &'l Self>) -> Self
    where
        P: 'l,
    {
        let (mut label, mut all) = (None, Vec::new());
        for lock in locks {
            label.get_or_insert(lock.label);
            match &lock.all {
                None => all.push((lock.key.clone(), lock.is_shared)),
                Some(several) => all.extend(
                    several
                        .iter()
                        .map(|(key, is_shared)| (key.clone(), *is_shared || lock.is_shared)),
                ),
            }
        }
        let first = all.first().map(|(key, _)| key.clone());
        Self {
            label: label.unwrap_or_default(),
            all: Some(all.into()),
            ..Self::new(first.unwrap_or_else(LockKey::none))
        }
    }

    /// The locks as an operation takes them.
    pub(super) fn locks(&self) -> Result<Locks> {
        let Some(all) = &self.all else {
            return Lock::new(self.key.clone(), self.is_shared).map(Locks::from);
        };
        let locks: Result<Vec<_>> = all
            .iter()
            .map(|(key, is_shared)| Lock::new(key.clone(), *is_shared || self.is_shared))
            .collect();
        let mut locks = locks?;
        // Of two locks on one key, the exclusive one sorts first, and `dedup` keeps it.
        locks.sort_by_key(|lock| (lock.id, lock.is_shared));
        locks.dedup_by_key(|lock| lock.id);
        match locks.len() {
            0 => Err(Error::input("at least one lock must be given")),
            1..=MOST => Ok(Locks(locks.into())),
            _ => Err(Error::input(
                "at most 1,000 locks can be taken at once: use one lock for all",
            )),
        }
    }
}

/// The locks that an operation takes: at least one, and several in the order of their numbers.
#[derive(Debug, Clone)]
pub(crate) struct Locks(pub(super) Arc<[Lock]>);

/// A refusal: the place of the busy lock, and the database that refused it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy {
    place: usize,
    pub(super) database: Database,
}

impl Busy {
    /// Reads the reply to a try: the pid of the session, which now holds all locks, or the refusal.
    pub(super) fn read(tried: &Tried) -> Result<Result<i32, Self>> {
        match tried.outcome.as_str() {
            "taken" => Ok(Ok(tried.pid)),
            "standby" => Err(Error::Standby),
            "repeatable read" => Err(Error::RepeatableRead),
            _ => Ok(Err(Self {
                place: usize::try_from(tried.place).unwrap_or_default(),
                database: Database(tried.database.unwrap_or_default()),
            })),
        }
    }
}

impl From<Lock> for Locks {
    fn from(lock: Lock) -> Self {
        Self(Arc::new([lock]))
    }
}

/// The first lock, and how many more there are: a message has no room for all.
impl fmt::Display for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first().key)?;
        match self.0.len() - 1 {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl Locks {
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn first(&self) -> &Lock {
        &self.0[0]
    }

    pub(super) fn get(&self, busy: Busy) -> &Lock {
        self.at(busy.place)
    }

    fn at(&self, place: usize) -> &Lock {
        self.0.get(place).unwrap_or_else(|| self.first())
    }

    /// Only the busy lock.
    pub(super) fn only(&self, busy: Busy) -> Self {
        self.get(busy).clone().into()
    }

    pub(super) fn is_last(&self, busy: Busy) -> bool {
        busy.place + 1 == self.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = LockId> {
        self.0.iter().map(|lock| lock.id)
    }

    /// Notes that this process holds them, in a session with this pid.
    pub(super) fn held_here(&self, pid: Option<i32>) -> Vec<HeldHere> {
        self.ids().map(|id| HeldHere::new(id, pid)).collect()
    }

    /// The name and number of a lock that was not held.
    pub(super) fn name_lost(&self, released: &Released) -> String {
        let place = usize::try_from(released.place).unwrap_or_default();
        self.at(place).key.to_string()
    }
}
