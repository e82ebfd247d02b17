//! Several locks at once: taken together, or none of them.

use std::fmt;
use std::sync::Arc;

use super::AdvisoryLock;
use super::sql::{Lock, REPEATABLE_READ};
use crate::error::{Error, Result};
use crate::key::{LockId, LockKey};
use crate::pool::Pool;
use crate::statement::Database;

/// The server keeps all locks of all sessions in a table of a fixed size, which has room for some
/// thousands.
const MOST: usize = 1000;

/// # Several locks
impl<P: Pool> AdvisoryLock<P> {
    /// Returns a lock of several things, of which a holder has all or none.
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
    /// It is used as a single one is, with as many round trips. One statement takes the locks in
    /// the order of their numbers; at the first that is busy it stops, and releases the others. A
    /// waiter waits only for the lock that was busy, holds none meanwhile, and then tries all, so
    /// callers do not deadlock, in any order in which they name the locks.
    ///
    /// In a transaction, a wait holds the locks before the busy one in that order, which does not
    /// deadlock among such callers. A savepoint gives them back, so `try_acquire_xact` and
    /// `acquire_xact_timeout` take two round trips more.
    ///
    /// A lock that is given twice is taken once, exclusively unless both are shared. To use none,
    /// or more than 1,000, is an [`Error::Input`].
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
        // Of two for one key the exclusive one comes first, and stays.
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

/// The locks that an operation takes: one, or several in the order of their numbers. There is at
/// least one.
#[derive(Debug, Clone)]
pub(crate) struct Locks(pub(super) Arc<[Lock]>);

/// The place of a lock that is busy, and in which database.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Busy {
    place: usize,
    pub(super) database: Database,
}

impl Busy {
    /// Converts a place in the order of [`Locks::take_others`] to one in that of [`Locks`].
    pub(super) const fn beside(self, held: Self) -> Self {
        let place = match self.place {
            0 => held.place,
            place if place <= held.place => place - 1,
            place => place,
        };
        Self { place, ..self }
    }

    /// Reads the reply to a try: the pid of the session that has taken all now. A refusal is below
    /// 0, and has the place of the busy one in its last ten bits, and the database in those before.
    pub(super) fn read(reply: Option<i32>) -> Result<Result<i32, Self>> {
        let refusal = match reply {
            Some(0) => return Err(Error::Standby),
            Some(REPEATABLE_READ) => return Err(Error::RepeatableRead),
            Some(pid @ 1..) => return Ok(Ok(pid)),
            Some(refusal) => -1 - refusal,
            None => 0,
        };
        Ok(Err(Self {
            place: (refusal & 1023).unsigned_abs() as usize,
            database: Database(refusal >> 10),
        }))
    }
}

impl From<Lock> for Locks {
    fn from(lock: Lock) -> Self {
        Self(Arc::new([lock]))
    }
}

/// The names and numbers, as far as a message has room for them.
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

    /// The one that is busy.
    pub(super) fn only(&self, busy: Busy) -> Self {
        self.get(busy).clone().into()
    }

    pub(super) fn is_last(&self, busy: Busy) -> bool {
        busy.place + 1 == self.len()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = LockId> {
        self.0.iter().map(|lock| lock.id)
    }

    /// The name and number of one that was not held, after this reply to
    /// [`release`](Self::release).
    pub(super) fn name_lost(&self, reply: i32) -> String {
        let place = usize::try_from(reply.unsigned_abs()).unwrap_or_default();
        self.at(place).key.to_string()
    }
}
