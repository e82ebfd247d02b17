//! Session locks over a pool and on a connection, blocking.

use std::sync::OnceLock;
use std::time::Duration;

use diesel::pg::PgConnection;

use super::discard::{GuardConnection, PinnedConnection};
use super::guard::AdvisoryLockGuard;
use super::lock::Lock;
use super::operations::{self, HeldLock};
use super::{AdvisoryLock, BorrowedGuard};
#[cfg(feature = "r2d2")]
use super::{
    PooledGuard,
    connection_budget::budget,
    waiter::Waiter,
    waiting::{self, Half},
};
use crate::attempt::Attempt;
use crate::clock::Deadline;
#[cfg(feature = "r2d2")]
use crate::error::Error;
use crate::error::Result;
use crate::events::{self, Outcome, Subject};
use crate::key::LockId;
#[cfg(feature = "r2d2")]
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::now;
#[cfg(feature = "r2d2")]
use crate::sessions;

/// # Session locks
///
/// A server session holds the lock until it is released or the session ends, over any number of transactions. **Behind a
/// pooler in transaction mode session locks are unsafe**, because the statements of one connection run on many sessions.
/// Use [`transaction`](Self::transaction) there.
///
/// Taking a session lock is a single prepared statement:
/// ```sql
/// SELECT CASE WHEN pg_is_in_recovery() OR current_setting('idle_session_timeout', true) <> '0' THEN 0
///             WHEN pg_try_advisory_lock($1) THEN pg_backend_pid() END
/// ```
/// It returns the session's pid. It refuses a hot standby, whose locks exclude nobody on the primary. It also detects an
/// `idle_session_timeout` (PostgreSQL 14 and later), which would end the session and so lose the lock. In that case a longer
/// statement lifts the timeout as it takes the lock, and the release restores it. When a process detects such a timeout for the
/// first time, the acquisition takes one more round trip. From then on the process always sends the longer statement. A
/// [`fenced`](Self::fenced) lock always sends it.
///
/// A reload of the server's configuration that introduces an `idle_session_timeout` while a lock is held can end the session: see
/// [the hazard](crate::guide::reference#idle_session_timeout-set-by-a-reload). Setting the timeout to 0 with every lock would
/// prevent that, but a lock and its release would be 3 to 6 % slower.
///
/// # Errors of session locks
///
/// - [`Input::EmptyName`](crate::error::Input::EmptyName), before anything is sent.
/// - [`Error::Pool`](crate::Error::Pool) if the pool had no connection in time.
/// - [`Misplaced::SessionLockInTransaction`](crate::error::Misplaced::SessionLockInTransaction) if a transaction is open on the
///   connection, even one that Diesel does not know of. The transaction of `begin_test_transaction` does not count.
/// - [`Error::SharedSessions`](crate::Error::SharedSessions) if the connections of the pool share server sessions. This is tested
///   once per connection of a pool, in seven round trips, if the pool has a second connection to compare with. If none is idle, the
///   pool opens one, unless it is at its full size. The acquisition waits for the new connection for at most 200 milliseconds, and
///   only once for each connection that it tests.
/// - [`Error::Standby`](crate::Error::Standby) on a hot standby.
/// - [`Error::SessionMoved`](crate::Error::SessionMoved) if a pooler changed the session during the wait.
/// - [`Error::TransactionInPool`](crate::Error::TransactionInPool) if an earlier user of the pooled connection had left a
///   transaction open.
/// - [`Error::Database`](crate::Error::Database) for anything else. The server may have granted the lock, so the crate makes sure
///   that it is not held. It discards a pooled connection. On a borrowed connection, one more round trip queries whether the
///   session holds the lock, and ends a session that does. If the statement has aborted a transaction of a plain SQL `BEGIN`, the
///   crate rolls that back first.
///
/// The lock is not held after any of these errors.
impl AdvisoryLock {
    /// Takes the lock if it is free, on a connection from the pool. Never waits for the lock.
    ///
    /// One round trip beyond the pool's own check-out, and once per connection one more to prepare the statement and six to
    /// compare sessions. If another session holds the lock, this returns [`Attempt::Busy`], and the connection is back in the
    /// pool.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as long as the pool's `connection_timeout` allows: 30 seconds by default.
    ///
    /// # Errors
    ///
    /// See [errors of session locks](#errors-of-session-locks).
    #[cfg(feature = "r2d2")]
    pub fn try_acquire(&self, pool: &PgPool) -> Result<Attempt<PooledGuard>> {
        self.acquire_until(
            || self.check_out(pool, None),
            Deadline::after(Duration::ZERO),
        )
    }

    /// Takes the lock if it is free, on the given connection. Never waits.
    ///
    /// One round trip. If another session holds the lock, this returns [`Attempt::Busy`].
    ///
    /// # Errors
    ///
    /// See [errors of session locks](#errors-of-session-locks).
    pub fn try_acquire_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        self.acquire_timeout_on(conn, Duration::ZERO)
    }

    /// Takes the lock on a connection from the pool. Waits indefinitely.
    ///
    /// One round trip beyond the pool's own check-out if the lock is free. Otherwise the wait is cut into slices of 200
    /// milliseconds, as explained below, with one more round trip for each slice, and another one after each slice that ends
    /// without the lock.
    ///
    /// # Blocking
    ///
    /// Waits for a connection as [`try_acquire`](Self::try_acquire) does, and then indefinitely for the lock.
    /// [`acquire_timeout`](Self::acquire_timeout) limits the wait. Once a thread waits for the lock, a pool that has no
    /// connection in time does not end the wait.
    ///
    /// A thread that waits on the server occupies a connection. The waiting threads of a process occupy at most half of the pool's
    /// maximum size, and at least one connection, so that many waiters do not exhaust the pool. The locks that are waited for share
    /// these connections equally. If there are more such locks than connections, they take turns. All other waiting threads hold no
    /// connection, and poll. A release in this process wakes the thread that has waited longest for the lock, unless another thread
    /// waits for that lock on the server. Together the threads poll at most about two hundred times a second, and each key has the
    /// same share of that. Even many waiters for one key therefore hardly delay the only waiter for another.
    ///
    /// The wait on the server is cut into slices of 200 milliseconds, or of half of `deadlock_timeout` if that is shorter.
    /// Otherwise a waiter's snapshot and the holder's `CREATE INDEX CONCURRENTLY` would wait for each other. This has
    /// consequences:
    /// - A holder that sets a `lock_timeout` and then waits for snapshots, as `CREATE INDEX CONCURRENTLY` does, needs a
    ///   `lock_timeout` longer than a slice: 300 milliseconds or more.
    /// - Waiters are not served in order, because the place in the queue is lost between slices.
    /// - PostgreSQL does not detect a deadlock of two sessions that wait for each other's locks.
    /// - If two sessions share the lock and both then request it exclusively, they wait for each other indefinitely.
    /// - Each slice that ends without the lock is an error entry about `lock_timeout` in the server's log.
    /// - `pg_cancel_backend` ends the wait with the server's error. A cancellation within the last hundredth of a slice is
    ///   mistaken for the slice's timeout, and the wait continues, because Diesel does not distinguish the two errors and the
    ///   server's messages are localised.
    ///
    /// The session's `statement_timeout`, `lock_timeout` and `transaction_timeout` do not shorten the wait. If
    /// `statement_timeout` or `transaction_timeout` is shorter than a slice plus half a second, a slice takes two more round trips,
    /// for a separate transaction in which they are lifted.
    ///
    /// # Errors
    ///
    /// See [errors of session locks](#errors-of-session-locks).
    #[cfg(feature = "r2d2")]
    pub fn acquire(&self, pool: &PgPool) -> Result<PooledGuard> {
        // Without a deadline a wait ends with the lock or with an error, so this runs once.
        loop {
            let attempt = self.acquire_in_turn(pool, None, Deadline::NEVER)?;
            if let Attempt::Acquired(guard) = attempt {
                return Ok(guard);
            }
        }
    }

    /// Takes the lock on the given connection. Waits indefinitely.
    ///
    /// Round trips as with [`acquire`](Self::acquire).
    ///
    /// # Blocking
    ///
    /// Waits for the lock as [`acquire`](Self::acquire) does.
    ///
    /// # Errors
    ///
    /// See [errors of session locks](#errors-of-session-locks).
    pub fn acquire_on<'conn>(&self, conn: &'conn mut PgConnection) -> Result<BorrowedGuard<'conn>> {
        self.observed(
            |request| {
                let mut acquisition = Acquisition::begin(request, conn)?;
                acquisition.wait(Deadline::NEVER, || false)?;
                Ok(acquisition.into_guard())
            },
            |_| Outcome::Acquired,
        )
    }

    /// Takes the lock on a connection from the pool. Waits for the connection and the lock for at most `timeout`.
    ///
    /// Round trips as with [`acquire`](Self::acquire). A wait that ends without the lock returns [`Attempt::Busy`]. If the pool
    /// has no connection in time for the first try, that is an error.
    ///
    /// # Blocking
    ///
    /// Waits for at most `timeout`, check-out included. The pool's own `connection_timeout` may end that part sooner. `timeout`
    /// does not limit the comparison of sessions, once per connection, but its time counts. The comparison waits for a second
    /// connection no longer than `timeout`. The last slice is rounded up to whole milliseconds. A timeout of zero waits for
    /// nothing, not even for the pool to open a connection. Otherwise as [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// See [errors of session locks](#errors-of-session-locks).
    #[cfg(feature = "r2d2")]
    pub fn acquire_timeout(
        &self,
        pool: &PgPool,
        timeout: Duration,
    ) -> Result<Attempt<PooledGuard>> {
        let deadline = Deadline::after(timeout);
        self.acquire_in_turn(pool, Some(timeout), deadline)
    }

    /// Takes the lock on the given connection. Waits for at most `timeout`.
    ///
    /// Round trips as with [`acquire_on`](Self::acquire_on). A wait that ends without the lock returns [`Attempt::Busy`].
    ///
    /// # Blocking
    ///
    /// Waits for at most `timeout`, rounded up to whole milliseconds. A timeout of zero makes one try. Otherwise as
    /// [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// See [errors of session locks](#errors-of-session-locks).
    pub fn acquire_timeout_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
        timeout: Duration,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        self.acquire_until(|| Ok(conn), Deadline::after(timeout))
    }

    /// Runs `work` under the lock, on a connection from the pool. Waits for the lock indefinitely.
    ///
    /// The same as `self.acquire(pool)?.run(work)`: see [`acquire`](Self::acquire) and
    /// [`AdvisoryLockGuard::run`](crate::AdvisoryLockGuard::run). For any other form of acquisition, call `run` on its guard or
    /// its [`Attempt`](Attempt::run).
    ///
    /// # Errors
    ///
    /// The error of `work`, the [errors of session locks](#errors-of-session-locks), and those of
    /// [`release`](crate::AdvisoryLockGuard::release).
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel::prelude::*;
    /// use diesel_interlock::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(1);
    /// let one = AdvisoryLock::named("vacuum").with(&pool, |conn| {
    ///     diesel::sql_query("VACUUM").execute(conn)?; // not possible inside a transaction
    ///     QueryResult::Ok(1)
    /// })?;
    /// # assert_eq!(one, 1);
    /// # Ok::<(), diesel::result::Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn with<T, E, F>(&self, pool: &PgPool, work: F) -> Result<T, E>
    where
        F: FnOnce(&mut PgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        self.acquire(pool)?.run(work)
    }

    /// Takes the lock on the given connection. Waits indefinitely by polling, and holds no snapshot in between, so the holder
    /// may run migrations with any `lock_timeout`.
    #[cfg(feature = "migrations")]
    pub(crate) fn acquire_without_snapshot_on<'conn>(
        &self,
        conn: &'conn mut PgConnection,
    ) -> Result<BorrowedGuard<'conn>> {
        self.observed(
            |request| {
                let mut acquisition = Acquisition::new(request, conn)?;
                acquisition.poll()?;
                Ok(acquisition.into_guard())
            },
            |_| Outcome::Acquired,
        )
    }

    fn acquire_until<C: GuardConnection>(
        &self,
        conn: impl FnOnce() -> Result<C>,
        deadline: Deadline,
    ) -> Result<Attempt<AdvisoryLockGuard<C>>> {
        self.observed(
            |request| {
                let mut acquisition = Acquisition::begin(request, conn()?)?;
                acquisition.wait(deadline, || false)?;
                Ok(acquisition.into_attempt())
            },
            Attempt::outcome,
        )
    }

    /// Tries once, and then waits.
    #[cfg(feature = "r2d2")]
    fn acquire_in_turn(
        &self,
        pool: &PgPool,
        limit: Option<Duration>,
        deadline: Deadline,
    ) -> Result<Attempt<PooledGuard>> {
        let acquire = |request: &Request<'_>| {
            let acquisition = Acquisition::begin(request, self.check_out(pool, limit)?)?;
            if acquisition.is_granted {
                return Ok(acquisition.into_attempt());
            }
            let (half, lock) = (InPool { request, pool }, acquisition.held.lock);
            now(waiting::for_session_lock(
                &half,
                acquisition,
                lock,
                deadline,
            ))
        };
        self.observed(acquire, Attempt::outcome)
    }

    /// Reports bad input before it takes a connection.
    #[cfg(feature = "r2d2")]
    fn check_out(&self, pool: &PgPool, limit: Option<Duration>) -> Result<PooledPgConnection> {
        self.key().id()?;
        let mut conn = pool::check_out(pool, limit)?;
        sessions::require_own(pool, &mut conn, limit)?;
        Ok(conn)
    }

    fn observed<T>(
        &self,
        acquire: impl FnOnce(&Request<'_>) -> Result<T>,
        outcome: impl FnOnce(&T) -> Outcome,
    ) -> Result<T> {
        let request = Request {
            handle: self,
            id: OnceLock::new(),
        };
        now(events::observe_more(
            "acquire",
            request.subject(),
            async { acquire(&request) },
            outcome,
            |_| request.subject(),
        ))
    }
}

/// A request for a lock. Its number is known once there is a connection, because that may carry a prefix of the tests.
struct Request<'a> {
    handle: &'a AdvisoryLock,
    id: OnceLock<LockId>,
}

impl<'a> Request<'a> {
    fn id_on(&self, conn: &mut PgConnection) -> Result<LockId> {
        let id = self.handle.key().id_on(conn)?;
        let _ = self.id.set(id); // set already, if the wait has taken another connection
        Ok(id)
    }

    fn subject(&self) -> Subject<'a> {
        Subject::Lock(self.handle.key().shown_as(self.id.get().copied()))
    }
}

/// A wait of a thread. Each of its futures is ready.
#[cfg(feature = "r2d2")]
struct InPool<'a> {
    request: &'a Request<'a>,
    pool: &'a PgPool,
}

#[cfg(feature = "r2d2")]
impl Half for InPool<'_> {
    type Acquisition = Acquisition<PooledPgConnection>;
    type Guard = PooledGuard;

    fn budget(&self) -> u32 {
        budget(self.pool.max_size(), false)
    }

    async fn begin(&self, waiter: &mut Waiter, limit: Duration) -> Result<Self::Acquisition> {
        let conn = self.request.handle.check_out(self.pool, Some(limit))?;
        waiter.tries();
        Acquisition::begin(self.request, conn)
    }

    async fn wait(
        &self,
        acquisition: &mut Self::Acquisition,
        deadline: Deadline,
        give_up: impl FnMut() -> bool + Send,
    ) -> Result<()> {
        acquisition.wait(deadline, give_up)
    }

    fn is_granted(&self, acquisition: &Self::Acquisition) -> bool {
        acquisition.is_granted
    }

    fn end(&self, acquisition: Self::Acquisition) -> Attempt<PooledGuard> {
        acquisition.into_attempt()
    }

    async fn turn(&self, waiter: &mut Waiter, limit: Duration) {
        waiter.block_for_turn(self.budget(), limit);
    }

    async fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// An acquisition in progress on a connection. Unless it becomes a guard, or is known to hold nothing, dropping it discards
/// the connection, on every way out: an error, or a panic.
struct Acquisition<C: GuardConnection> {
    pinned: PinnedConnection<C>,
    held: HeldLock,
    is_fenced: bool,
    is_granted: bool,
}

impl<C: GuardConnection> Acquisition<C> {
    fn new(request: &Request<'_>, conn: C) -> Result<Self> {
        let handle = request.handle;
        let mut pinned = PinnedConnection::new(conn);
        let lock = Lock {
            id: request.id_on(pinned.conn())?,
            mode: handle.mode,
        };
        Ok(Self {
            pinned,
            held: HeldLock::requested(handle.key(), lock),
            is_fenced: handle.fenced,
            is_granted: false,
        })
    }

    /// Tries once.
    fn begin(request: &Request<'_>, conn: C) -> Result<Self> {
        let mut acquisition = Self::new(request, conn)?;
        let (mut session, doubt) = acquisition.pinned.session();
        acquisition.is_granted = now(operations::try_session_lock(
            &mut session,
            doubt,
            &mut acquisition.held,
            acquisition.is_fenced,
        ))?;
        Ok(acquisition)
    }

    fn wait(&mut self, deadline: Deadline, give_up: impl FnMut() -> bool) -> Result<()> {
        if !self.is_granted {
            let (mut session, _) = self.pinned.session();
            self.is_granted = now(operations::wait_for_session_lock(
                &mut session,
                &mut self.held,
                deadline,
                give_up,
            ))?;
        }
        Ok(())
    }

    #[cfg(feature = "migrations")]
    fn poll(&mut self) -> Result<()> {
        let (mut session, doubt) = self.pinned.session();
        now(operations::poll_for_session_lock(
            &mut session,
            doubt,
            &mut self.held,
            async |time| std::thread::sleep(time),
        ))?;
        self.is_granted = true;
        Ok(())
    }

    fn into_attempt(mut self) -> Attempt<AdvisoryLockGuard<C>> {
        if self.is_granted {
            Attempt::Acquired(self.into_guard())
        } else {
            self.pinned.trust();
            Attempt::Busy
        }
    }

    fn into_guard(mut self) -> AdvisoryLockGuard<C> {
        self.pinned.trust();
        AdvisoryLockGuard::new(self.pinned, self.held)
    }
}
