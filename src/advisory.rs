//! Advisory locks: the handle, and the two scopes in which it can be taken.

mod guard;
mod lease;
mod mode;
mod query;
#[cfg(feature = "r2d2")]
mod seats;
mod session;
mod token;
mod wait;
#[cfg(feature = "r2d2")]
mod watch;
mod with;
mod xact;

use std::time::Duration;

use diesel::pg::PgConnection;

use self::mode::LockMode;
use self::wait::Deadline;
use crate::attempt::Attempt;
use crate::error::Result;
use crate::key::LockKey;
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool, PooledPgConnection};
#[cfg(feature = "r2d2")]
use crate::sessions;

pub use self::guard::AdvisoryLockGuard;
pub use self::lease::Lease;
#[cfg(feature = "r2d2")]
pub use self::watch::Watch;

/// The guard of a session lock that owns its connection, taken out of a [`PgPool`].
#[cfg(feature = "r2d2")]
pub type PooledGuard = AdvisoryLockGuard<PooledPgConnection>;

/// The guard of a session lock on a connection that the caller lent.
pub type BorrowedGuard<'conn> = AdvisoryLockGuard<&'conn mut PgConnection>;

/// A lock that PostgreSQL keeps for the application: at most one session of the database holds it.
///
/// PostgreSQL calls it an [advisory lock][pg]: it locks a number and no data, excludes only those
/// who ask for the same number, and is freed by the server when the session that holds it ends,
/// however it ends. Nothing needs to be installed for it.
///
/// A handle is a small value that holds no connection; make it a `static`, or on the fly. It is
/// exclusive by default; [`shared`](Self::shared) is for readers.
///
/// # Which scope
///
/// | | [`transaction`](Self::transaction), [`acquire_xact`](Self::acquire_xact) | [`try_acquire`](Self::try_acquire), [`acquire`](Self::acquire), … |
/// |---|---|---|
/// | held | until the transaction ends | until the guard is released, over many transactions |
/// | by | the transaction | the session, whose connection the guard pins |
/// | behind a pooler in transaction mode | safe | **unsafe** |
/// | deadlocks | detected by PostgreSQL | not detected: use a timeout, or one order, that of [`LockId`](crate::LockId) |
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
///         return Ok(()); // another instance is at it
///     };
///     write_report(guard.conn())?;
///     guard.release() // an error if the lock was lost on the way
/// }
/// # fn write_report(_: &mut diesel::PgConnection) -> Result<(), Error> { Ok(()) }
/// # let database = workbench::Database::new();
/// # nightly(&database.pool(1))?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Reentrancy
///
/// is PostgreSQL's: the same session may take the same lock again, and holds it until it was
/// released as often. That is so for [`acquire_on`](Self::acquire_on) on a guard's own
/// [`conn`](AdvisoryLockGuard::conn); the pool forms take another connection, which is another
/// session, and wait for themselves.
///
/// # What it does not protect from
///
/// A lock tells who may go; it does not stop who went. A holder that lost its session (see
/// [`AdvisoryLockGuard`]) works on until it asks. Data that must not be written twice is protected
/// by the transaction that writes it: [`transaction`](Self::transaction).
///
/// [pg]: https://www.postgresql.org/docs/current/explicit-locking.html#ADVISORY-LOCKS
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AdvisoryLock {
    key: LockKey,
    mode: LockMode,
    fenced: bool,
}

impl AdvisoryLock {
    /// Names a lock. The same as `AdvisoryLock::new(LockKey::named(name))`.
    ///
    /// An empty name is reported by the first operation, as
    /// [`Input::EmptyName`](crate::error::Input::EmptyName).
    pub const fn named(name: &'static str) -> Self {
        Self::new(LockKey::named(name))
    }

    /// Makes the lock of a key.
    pub const fn new(key: LockKey) -> Self {
        Self {
            key,
            mode: LockMode::Exclusive,
            fenced: false,
        }
    }

    /// Makes it a shared lock: any number of sessions hold it shared, while nobody holds it
    /// exclusively. Defaults to exclusive.
    #[must_use = "the handle itself stays as it is"]
    pub const fn shared(mut self) -> Self {
        self.mode = LockMode::Shared;
        self
    }

    /// Draws a [fencing token](AdvisoryLockGuard::fencing_token) in the round trip that takes a session
    /// lock. Costs a transaction id and a write to the log each time. Defaults to drawing it when it is
    /// asked for.
    ///
    /// The statement that takes the lock is then a commit that writes. Where `synchronous_standby_names` is set
    /// it waits for the standbys, holding the lock, and neither the timeout of `acquire_timeout` nor a
    /// `statement_timeout` ends that: see [`fencing_token`](AdvisoryLockGuard::fencing_token).
    #[must_use = "the handle itself stays as it is"]
    pub const fn fenced(mut self) -> Self {
        self.fenced = true;
        self
    }

    /// The key of the lock.
    pub const fn key(&self) -> &LockKey {
        &self.key
    }

    const fn mode(&self) -> LockMode {
        self.mode
    }
}

/// # Session locks
///
/// Held by a server session until it is released or the session ends, over any number of
/// transactions. **Behind a pooler in transaction mode they are unsafe**, since the statements of
/// one connection run on many sessions: use [`transaction`](Self::transaction) there.
///
/// Taking one is a single prepared statement. It answers the session's pid, refuses on a hot standby,
/// whose locks exclude nobody on the primary, and tells whether the session has an
/// `idle_session_timeout` (PostgreSQL 14 and later), which would end it and so lose the lock:
/// ```sql
/// SELECT CASE WHEN pg_is_in_recovery() OR current_setting('idle_session_timeout', true) <> '0' THEN 0
///             WHEN pg_try_advisory_lock($1) THEN pg_backend_pid() END
/// ```
/// Where there is one, a longer statement lifts it as it takes the lock, and the release puts it back.
/// The first time that a process meets one it takes one more round trip; from then on it sends the longer
/// statement at once. So does a [`fenced`](Self::fenced) lock.
///
/// An `idle_session_timeout` that comes into force while a lock is held, by a reload of the server's
/// configuration, ends a session that is idle after its next statement. The lock is then lost, which the
/// release reports as [`Error::LockLost`](crate::Error::LockLost). Setting it to 0 with every lock would prevent that, but
/// would make a lock and its release 3 to 6 % slower. A session with a value of its own is not reached by a
/// reload: connect with `options=-c idle_session_timeout=0`, or use `ALTER ROLE … SET`.
///
/// # Errors of all of them
///
/// - [`Input::EmptyName`](crate::error::Input::EmptyName), before anything is sent.
/// - [`Error::Pool`](crate::Error::Pool) if the pool gave no connection in time.
/// - [`Misplaced::SessionLockInTransaction`](crate::error::Misplaced::SessionLockInTransaction) if a transaction is open on the
///   connection, whoever opened it; only that of `begin_test_transaction` is none.
/// - [`Error::SharedSessions`](crate::Error::SharedSessions) if a pool's connections share server
///   sessions. Asked once per connection of a pool, in six round trips, if the pool has a second one
///   to compare it with.
/// - [`Error::Standby`](crate::Error::Standby) on a hot standby.
/// - [`Error::SessionMoved`](crate::Error::SessionMoved) if a pooler moved the session while it
///   waited.
/// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if the pool gave a connection that
///   somebody had left in a transaction.
/// - [`Error::Database`](crate::Error::Database) for anything else. Whether the lock was granted is
///   then unknown, so a pooled connection is discarded; the session of a borrowed one is asked, and
///   ended if it holds the lock.
///
/// After an error nothing is held.
impl AdvisoryLock {
    /// Takes the lock if it is free, on a connection out of the pool; never waits for the lock.
    ///
    /// One round trip beyond the pool's own check-out, and one more to prepare the statement, once
    /// per connection. If another session has the lock the answer is [`Attempt::Busy`], and the
    /// connection is back in the pool.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool is set to wait: 30 seconds, unless its
    /// `connection_timeout` says otherwise.
    ///
    /// # Errors
    ///
    /// Those of [all session locks](#errors-of-all-of-them).
    #[cfg(feature = "r2d2")]
    pub fn try_acquire(&self, pool: &PgPool) -> Result<Attempt<PooledGuard>> {
        let lease = self.check_out(pool, None)?;
        session::acquire_until(self, lease, Deadline::after(Duration::ZERO))
    }

    /// Takes the lock if it is free, on the given connection; never waits.
    ///
    /// One round trip. If another session has the lock the answer is [`Attempt::Busy`].
    ///
    /// # Errors
    ///
    /// Those of [all session locks](#errors-of-all-of-them).
    pub fn try_acquire_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        self.acquire_timeout_on(conn, Duration::ZERO)
    }

    /// Takes the lock, on a connection out of the pool; waits for it as long as it takes.
    ///
    /// One round trip beyond the pool's own check-out if the lock is free. Otherwise one more for
    /// each 200 milliseconds of waiting, and one after each of them that ends without the lock.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as [`try_acquire`](Self::try_acquire) does, and then for the lock,
    /// without end; [`acquire_timeout`](Self::acquire_timeout) ends the wait. Once it waits for the lock,
    /// a pool that has no connection in time does not end the wait.
    ///
    /// A thread that waits on the server occupies a connection. So that a crowd of waiters does not take
    /// the pool from everybody else, the waiting threads of a process occupy no more than half as many
    /// connections as the pool may have (and one at least). The keys that are waited for share these
    /// connections equally, or take turns. The other threads hold no connection: they try when it is
    /// their turn, and otherwise now and then, together about two hundred times a second at most, of
    /// which each key has the same share. So a thread that is alone at its key hardly waits longer
    /// because of a crowd at another.
    ///
    /// The wait on the server is cut into slices of 200 milliseconds, or of half of `deadlock_timeout`
    /// where that is shorter. Otherwise a waiter's snapshot and the holder's `CREATE INDEX
    /// CONCURRENTLY` would wait for each other. Hence
    /// - a holder that sets a `lock_timeout` and then waits for snapshots, as `CREATE INDEX CONCURRENTLY`
    ///   does, needs one of more than a slice: 300 milliseconds or more;
    /// - no order among waiters is promised, because the place in the queue is lost between slices;
    /// - PostgreSQL does not detect a deadlock of two sessions that wait for each other's locks;
    /// - two sharers that both ask for the exclusive lock wait for each other for ever;
    /// - each slice that ends without the lock is an error entry in the server's log, about
    ///   `lock_timeout`;
    /// - `pg_cancel_backend` ends the wait with the server's error. A cancellation within the last
    ///   hundredth of a slice is taken for the slice's timeout, and the wait goes on, because Diesel does
    ///   not tell the two errors apart and the server's messages are localised.
    ///
    /// The user's own `statement_timeout`, `lock_timeout` and `transaction_timeout` do not cut the wait
    /// short. Where one of them would end a slice, the slice takes two round trips more, for a
    /// transaction of its own in which they are lifted.
    ///
    /// # Errors
    ///
    /// Those of [all session locks](#errors-of-all-of-them).
    #[cfg(feature = "r2d2")]
    pub fn acquire(&self, pool: &PgPool) -> Result<PooledGuard> {
        // Without a deadline a wait ends with the lock, or with an error.
        loop {
            let lease = self.check_out(pool, None)?;
            let attempt = session::acquire_in_turn(self, pool, lease, Deadline::NEVER)?;
            if let Attempt::Acquired(guard) = attempt {
                return Ok(guard);
            }
        }
    }

    /// Takes the lock, on the given connection; waits for it as long as it takes.
    ///
    /// Round trips as [`acquire`](Self::acquire).
    ///
    /// # Blocking
    ///
    /// Waits for the lock as [`acquire`](Self::acquire) does.
    ///
    /// # Errors
    ///
    /// Those of [all session locks](#errors-of-all-of-them).
    pub fn acquire_on<'conn>(&self, conn: &'conn mut PgConnection) -> Result<BorrowedGuard<'conn>> {
        session::acquire(self, conn)
    }

    /// Takes the lock, on the given connection; waits for it as long as it takes, by asking again and again,
    /// with a growing pause of 20 to 250 milliseconds on average. Unlike another waiter it has no snapshot in between,
    /// so that the holder's migrations may have any `lock_timeout`.
    #[cfg(feature = "migrations")]
    pub(crate) fn acquire_without_snapshot_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
    ) -> Result<BorrowedGuard<'conn>> {
        session::acquire_without_snapshot(self, conn)
    }

    /// Takes the lock, on a connection out of the pool; waits at most `timeout` for both.
    ///
    /// Round trips as [`acquire`](Self::acquire). A wait that ended without the lock is
    /// [`Attempt::Busy`]; a pool that had no connection in time is an error.
    ///
    /// # Blocking
    ///
    /// For `timeout`, of which the check-out is a part; the pool's own `connection_timeout` may end
    /// that part sooner. The last slice is rounded up to whole milliseconds. Zero waits for neither,
    /// not even for a pool to open a connection. Otherwise as [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// Those of [all session locks](#errors-of-all-of-them).
    #[cfg(feature = "r2d2")]
    pub fn acquire_timeout(
        &self,
        pool: &PgPool,
        timeout: Duration,
    ) -> Result<Attempt<PooledGuard>> {
        let deadline = Deadline::after(timeout);
        let lease = self.check_out(pool, Some(timeout))?;
        session::acquire_in_turn(self, pool, lease, deadline)
    }

    /// Takes the lock, on the given connection; waits at most `timeout` for it.
    ///
    /// Round trips as [`acquire_on`](Self::acquire_on). A wait that ended without the lock is
    /// [`Attempt::Busy`].
    ///
    /// # Blocking
    ///
    /// For `timeout`, rounded up to whole milliseconds; zero is a try. Otherwise as
    /// [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// Those of [all session locks](#errors-of-all-of-them).
    pub fn acquire_timeout_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
        timeout: Duration,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        session::acquire_until(self, conn, Deadline::after(timeout))
    }

    #[cfg(feature = "r2d2")]
    fn check_out(&self, pool: &PgPool, limit: Option<Duration>) -> Result<PooledPgConnection> {
        self.key.id()?; // bad input is reported before the pool is asked
        let mut conn = pool::check_out(pool, limit)?;
        sessions::require_own(pool, &mut conn)?;
        Ok(conn)
    }
}
