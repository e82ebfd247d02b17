//! Advisory locks: the handle, and the two scopes in which it can be taken.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "postgres")]
mod blocking;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod connection_budget;
#[cfg(feature = "postgres")]
mod discard;
mod doubt;
#[cfg(feature = "postgres")]
mod guard;
mod lock;
mod operations;
mod rules;
mod sql;
mod token;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod waiter;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod waiting;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod wakeup;
#[cfg(feature = "r2d2")]
mod watch;
#[cfg(any(feature = "r2d2", feature = "async"))]
mod watched;
#[cfg(feature = "postgres")]
mod xact;

#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

#[cfg(feature = "postgres")]
pub use self::discard::GuardConnection;
#[cfg(feature = "postgres")]
pub use self::guard::AdvisoryLockGuard;
use self::lock::LockMode;
#[cfg(feature = "r2d2")]
pub use self::watch::Watch;
use crate::key::LockKey;
#[cfg(feature = "r2d2")]
use crate::pool::PooledPgConnection;

/// A guard that owns its connection, which comes from a [`PgPool`](crate::PgPool).
#[cfg(feature = "r2d2")]
pub type PooledGuard = AdvisoryLockGuard<PooledPgConnection>;

/// The guard of a session lock on a borrowed connection.
#[cfg(feature = "postgres")]
pub type BorrowedGuard<'conn> = AdvisoryLockGuard<&'conn mut PgConnection>;

/// A named lock in PostgreSQL that one session of the database holds, or that several share.
///
/// PostgreSQL calls it an [advisory lock][pg]. It locks a number and no data, and excludes only sessions that request the same
/// number. The server frees it when the session that holds it ends, even if the process crashed. Nothing has to be installed for
/// it.
///
/// A handle is a small value that holds no connection. Declare it as a `static`, or create it where it is used. It is
/// exclusive by default. Readers make it [`shared`](Self::shared).
///
/// # Two scopes
///
/// | | [`transaction`](Self::transaction), [`acquire_xact`](Self::acquire_xact) | [`try_acquire`](Self::try_acquire), [`acquire`](Self::acquire), … |
/// |---|---|---|
/// | The lock is held | until the transaction ends | until the guard is released, over many transactions |
/// | The holder is | the transaction | the session, whose connection the guard pins |
/// | Behind a pooler in transaction mode | safe | **unsafe** |
/// | Deadlocks | PostgreSQL detects them | not detected: use a timeout, or take all locks in the order of [`LockId`](crate::LockId) |
///
/// # Examples
///
/// ```
/// use diesel_interlock::{AdvisoryLock, Attempt, Error, PgPool};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// fn nightly(pool: &PgPool) -> Result<(), Error> {
///     let Attempt::Acquired(mut guard) = NIGHTLY.try_acquire(pool)? else {
///         return Ok(()); // another instance is running it
///     };
///     write_report(guard.conn())?;
///     guard.release() // returns an error if the lock was lost meanwhile
/// }
/// # fn write_report(_: &mut diesel::PgConnection) -> Result<(), Error> { Ok(()) }
/// # let database = workbench::Database::new();
/// # nightly(&database.pool(1))?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Reentrancy
///
/// Session locks are reentrant, as in PostgreSQL. The same session may take the same lock again, and holds it until each
/// acquisition has been released. So [`acquire_on`](Self::acquire_on) on a guard's own [`conn`](AdvisoryLockGuard::conn) succeeds.
/// The forms that take a pool use another connection, which is another session. So while the caller holds an exclusive guard,
/// `try_acquire` on the pool returns [`Attempt::Busy`](crate::Attempt::Busy), and `acquire` waits forever. Both return
/// [`Error::Pool`](crate::Error::Pool) if the pool has no other connection.
///
/// # Caveats
///
/// A lock grants permission. It cannot stop a holder that has already proceeded. A holder that has lost its session (see
/// [`AdvisoryLockGuard`]) continues until it checks. If data must not be written twice, write it in the transaction that
/// holds the lock, with [`transaction`](Self::transaction), or protect it with a [`Fence`](crate::Fence).
///
/// [pg]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct AdvisoryLock {
    key: LockKey,
    mode: LockMode,
    fenced: bool,
}

impl AsRef<AdvisoryLock> for AdvisoryLock {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl AdvisoryLock {
    /// Makes the lock with this name. The same as `AdvisoryLock::new(LockKey::named(name))`.
    ///
    /// The first operation reports an empty name, as [`Input::EmptyName`](crate::error::Input::EmptyName).
    pub const fn named(name: &'static str) -> Self {
        Self::new(LockKey::named(name))
    }

    /// Makes the lock of a key. For a name that is known only at run time: `AdvisoryLock::new(LockKey::from(name))`.
    pub const fn new(key: LockKey) -> Self {
        Self {
            key,
            mode: LockMode::Exclusive,
            fenced: false,
        }
    }

    /// Returns the lock in shared mode: any number of sessions may hold it at a time, as long as none holds it exclusively. Locks
    /// are exclusive by default.
    pub const fn shared(mut self) -> Self {
        self.mode = LockMode::Shared;
        self
    }

    /// Returns the lock with an early [fencing token](AdvisoryLockGuard::fencing_token). The round trip that takes a free session
    /// lock then also draws the token. Without this, the token is drawn when it is requested. Each token costs a transaction id and
    /// a record in the write-ahead log.
    ///
    /// The statement that takes a fenced lock writes and commits. If `synchronous_standby_names` is set, it waits for the standbys
    /// while it holds the lock. Neither the timeout of `acquire_timeout` nor a `statement_timeout` ends that wait: see
    /// [`fencing_token`](AdvisoryLockGuard::fencing_token).
    pub const fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }

    /// Returns the key of the lock.
    pub const fn key(&self) -> &LockKey {
        &self.key
    }
}
