//! Session locks over a pool and on a connection, asynchronous.

mod borrowed;
mod guard;
mod pinned;
mod watch;
#[cfg(feature = "migrations")]
mod without_snapshot;
mod xact;

use std::future::Future;
use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;

pub use self::borrowed::Borrowed;
pub use self::guard::AdvisoryLockGuard;
pub use self::pinned::{GuardConnection, Pooled};
pub use self::watch::Watch;
use super::connection_budget::budget;
use super::lock::{Lock, LockMode};
use super::operations::{self, HeldLock};
use super::waiter::Waiter;
use super::waiting::{self, Half};
use crate::attempt::Attempt;
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::events::{self, Subject};
use crate::key::LockKey;
use crate::pool::asynchronous::{self as pool, Pool};
use crate::runtime;
use crate::session::Session;
use crate::sessions;

/// A guard that owns its connection, which comes from a [`Pool`].
pub type PooledGuard<P> = AdvisoryLockGuard<Pooled<<P as Pool>::Connection>>;

/// The guard of a session lock on a connection that the caller lends.
pub type BorrowedGuard<'conn> = AdvisoryLockGuard<Borrowed<'conn>>;

/// A named lock in PostgreSQL that one session of the database holds, or that several share.
///
/// The same lock as [`diesel_interlock::AdvisoryLock`](crate::AdvisoryLock), for asynchronous connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a lock does nothing until it is acquired"]
pub struct AdvisoryLock(crate::AdvisoryLock);

impl From<crate::AdvisoryLock> for AdvisoryLock {
    fn from(lock: crate::AdvisoryLock) -> Self {
        Self(lock)
    }
}

impl AsRef<crate::AdvisoryLock> for AdvisoryLock {
    fn as_ref(&self) -> &crate::AdvisoryLock {
        &self.0
    }
}

impl AdvisoryLock {
    /// Makes the lock with this name. The same as `AdvisoryLock::new(LockKey::named(name))`.
    ///
    /// The first operation reports an empty name, as [`Input::EmptyName`](crate::error::Input::EmptyName).
    pub const fn named(name: &'static str) -> Self {
        Self(crate::AdvisoryLock::named(name))
    }

    /// Makes the lock of a key.
    pub const fn new(key: LockKey) -> Self {
        Self(crate::AdvisoryLock::new(key))
    }

    /// Returns the lock in shared mode: any number of sessions may hold it at a time, as long as none holds it exclusively. Locks
    /// are exclusive by default.
    pub const fn shared(mut self) -> Self {
        self.0.mode = LockMode::Shared;
        self
    }

    /// Draws a [fencing token](AdvisoryLockGuard::fencing_token) in the round trip that takes a free session lock. Defaults to
    /// drawing the token when it is requested. As [`AdvisoryLock::fenced`](crate::AdvisoryLock::fenced).
    pub const fn fenced(mut self) -> Self {
        self.0.fenced = true;
        self
    }

    /// Returns the key of the lock.
    pub const fn key(&self) -> &LockKey {
        self.0.key()
    }
}

/// # Session locks
impl AdvisoryLock {
    /// Takes the lock if it is free, on a connection from the pool. Never waits for the lock.
    ///
    /// As [`AdvisoryLock::try_acquire`](crate::AdvisoryLock::try_acquire). The wait for the connection is as long as the pool's
    /// own settings allow. If the session of that connection turns out to have ended, another one is tried, once.
    ///
    /// If the future is dropped, a task on the runtime releases all session locks of the connection, and gives it back or
    /// discards it. Locks that the application took on that session by plain SQL are released, too.
    ///
    /// # Errors
    ///
    /// The [errors of session locks](crate::AdvisoryLock#errors-of-session-locks), and [`Error::NoRuntime`].
    ///
    /// # Examples
    ///
    /// ```
    /// # workbench::block_on(async {
    /// use diesel_interlock::asynchronous::AdvisoryLock;
    /// use diesel_interlock::{Attempt, Error};
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.deadpool(1);
    /// let nightly = AdvisoryLock::named("nightly report");
    /// if let Attempt::Acquired(mut guard) = nightly.try_acquire(&pool).await? {
    ///     assert!(guard.is_held().await?);
    ///     guard.release().await?;
    /// }
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn try_acquire<P: Pool>(&self, pool: &P) -> Result<Attempt<PooledGuard<P>>> {
        let acquire = async {
            let acquisition = self.begin(pool, None, None).await?;
            Ok(acquisition.into_attempt())
        };
        events::observe("acquire", self.subject(), acquire, Attempt::outcome).await
    }

    /// Takes the lock if it is free, on the given connection. Never waits.
    ///
    /// If the future is dropped, the unlock is queued behind the statements that were sent, and is sent even if the connection is
    /// not used again. An `idle_session_timeout` that the try had lifted then stays lifted.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](Self::try_acquire), without those of a pool.
    pub async fn try_acquire_on<'conn>(
        &self,
        conn: &'conn mut AsyncPgConnection,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        self.acquire_timeout_on(conn, Duration::ZERO).await
    }

    /// Takes the lock on a connection from the pool. Waits indefinitely.
    ///
    /// As [`AdvisoryLock::acquire`](crate::AdvisoryLock::acquire). The waiting tasks of a process occupy connections as the
    /// threads of the blocking half do, but at most an eighth of the pool while
    /// [other tasks wait for a connection](Pool::is_contended). If the future is dropped while the server waits, the statement is
    /// cancelled and the connection is discarded.
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](Self::try_acquire).
    pub async fn acquire<P: Pool>(&self, pool: &P) -> Result<PooledGuard<P>> {
        // Without a deadline a wait ends with the lock or with an error, so this runs once.
        loop {
            let attempt = self.acquire_in_turn(pool, None, Deadline::NEVER).await?;
            if let Attempt::Acquired(guard) = attempt {
                return Ok(guard);
            }
        }
    }

    /// Takes the lock on the given connection. Waits indefinitely.
    ///
    /// If the future is dropped while a statement waits on the server, the statement ends within 200 milliseconds. The unlock is
    /// queued behind it.
    ///
    /// # Errors
    ///
    /// As [`try_acquire_on`](Self::try_acquire_on).
    pub async fn acquire_on<'conn>(
        &self,
        conn: &'conn mut AsyncPgConnection,
    ) -> Result<BorrowedGuard<'conn>> {
        runtime::current()?;
        let acquire = async {
            let mut acquisition = Acquisition::of(self, Borrowed::new(conn))?;
            acquisition.take().await?;
            acquisition.wait(Deadline::NEVER, || false).await?;
            Ok(acquisition.into_guard())
        };
        events::observe("acquire", self.subject(), acquire, |_| {
            events::Outcome::Acquired
        })
        .await
    }

    /// Takes the lock on a connection from the pool. Waits for the connection and the lock for at most `timeout`. If `timeout` has
    /// passed or is zero, there is one last try, for which the pool may take up to a second more (bb8: 50 milliseconds) to check or
    /// open a connection. If the network is cut while a statement waits for its reply, this waits until the connection ends, as
    /// [the settings of TCP](crate::guide::growing#dead-hosts) decide.
    ///
    /// If the future is dropped, the same happens as with [`acquire`](Self::acquire).
    ///
    /// # Errors
    ///
    /// As [`try_acquire`](Self::try_acquire), and [`Error::Pool`] if the pool had no connection in time for the first try.
    ///
    /// # Examples
    ///
    /// ```
    /// # workbench::block_on(async {
    /// use std::time::Duration;
    ///
    /// use diesel_interlock::Error;
    /// use diesel_interlock::asynchronous::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.deadpool(2);
    /// let import = AdvisoryLock::named("import");
    /// let guard = import.acquire(&pool).await?;
    /// let second = import.acquire_timeout(&pool, Duration::from_millis(50)).await?;
    /// assert!(second.is_busy());
    /// guard.release().await?;
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn acquire_timeout<P: Pool>(
        &self,
        pool: &P,
        timeout: Duration,
    ) -> Result<Attempt<PooledGuard<P>>> {
        let deadline = Deadline::after(timeout);
        self.acquire_in_turn(pool, Some(timeout), deadline).await
    }

    /// Takes the lock on the given connection. Waits for at most `timeout`.
    ///
    /// If the future is dropped, the same happens as with [`acquire_on`](Self::acquire_on).
    ///
    /// # Errors
    ///
    /// As [`try_acquire_on`](Self::try_acquire_on).
    pub async fn acquire_timeout_on<'conn>(
        &self,
        conn: &'conn mut AsyncPgConnection,
        timeout: Duration,
    ) -> Result<Attempt<BorrowedGuard<'conn>>> {
        runtime::current()?;
        let deadline = Deadline::after(timeout);
        let acquire = async {
            let mut acquisition = Acquisition::of(self, Borrowed::new(conn))?;
            acquisition.take().await?;
            acquisition.wait(deadline, || false).await?;
            Ok(acquisition.into_attempt())
        };
        events::observe("acquire", self.subject(), acquire, Attempt::outcome).await
    }

    /// Runs `work` under the lock, on a connection from the pool. Waits for the lock indefinitely.
    ///
    /// The same as `self.acquire(pool).await?.run(work).await`. If the future is dropped, the lock is released as by a drop of
    /// the guard.
    ///
    /// # Errors
    ///
    /// The error of `work`, and those of [`acquire`](Self::acquire) and of [`release`](AdvisoryLockGuard::release).
    ///
    /// # Examples
    ///
    /// ```
    /// # workbench::block_on(async {
    /// use diesel_async::SimpleAsyncConnection;
    /// use diesel_interlock::Error;
    /// use diesel_interlock::asynchronous::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.deadpool(1);
    /// AdvisoryLock::named("vacuum")
    ///     .with(&pool, async |conn| {
    ///         conn.batch_execute("VACUUM").await?;
    ///         Ok::<_, Error>(())
    ///     })
    ///     .await?;
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn with<P, T, E, F>(&self, pool: &P, work: F) -> Result<T, E>
    where
        P: Pool,
        F: AsyncFnOnce(&mut AsyncPgConnection) -> Result<T, E>,
        E: From<Error>,
    {
        self.acquire(pool).await?.run(work).await
    }

    fn subject(&self) -> Subject<'_> {
        Subject::Lock(self.key().shown())
    }

    /// Tries once, and then waits.
    async fn acquire_in_turn<P: Pool>(
        &self,
        pool: &P,
        limit: Option<Duration>,
        deadline: Deadline,
    ) -> Result<Attempt<PooledGuard<P>>> {
        let acquire = async {
            let acquisition = self.begin(pool, limit, None).await?;
            if acquisition.is_granted {
                return Ok(acquisition.into_attempt());
            }
            let (half, lock) = (InPool { handle: self, pool }, acquisition.held.lock);
            let wait = waiting::for_session_lock(&half, acquisition, lock, deadline);
            Box::pin(wait).await
        };
        events::observe("acquire", self.subject(), acquire, Attempt::outcome).await
    }

    /// Tries once, on a connection from the pool.
    ///
    /// A pool may return a connection whose session has ended. Nothing can be held there, so another one is tried, once.
    ///
    /// Boxed, as the waits are, because the state of a task that waits for a lock would have room for all of it.
    fn begin<'a, P: Pool>(
        &'a self,
        pool: &'a P,
        limit: Option<Duration>,
        mut waiter: Option<&'a mut Waiter>,
    ) -> impl Future<Output = Result<Acquisition<Pooled<P::Connection>>>> {
        Box::pin(async move {
            self.key().id()?;
            let runtime = runtime::current()?;
            if waiter.is_none() && Waiter::exists() {
                // A pool may give a connection to the task that asks first. One that has just given a connection back would take
                // it again, before the task that waits for it runs.
                tokio::task::yield_now().await;
            }
            let began = Instant::now();
            let mut is_second = false;
            loop {
                let limit = limit.map(|limit| limit.saturating_sub(began.elapsed()));
                let mut conn = pool::check_out(pool, limit).await?;
                sessions::asynchronous::require_own(pool, &mut conn).await?;
                if let Some(waiter) = &mut waiter {
                    waiter.tries();
                }
                let mut acquisition =
                    Acquisition::of(self, Pooled::new(conn.into_inner(), runtime.clone()))?;
                match acquisition.take().await {
                    Ok(()) => return Ok(acquisition),
                    Err(Error::Database(error))
                        if !is_second && acquisition.has_ended(&error).await =>
                    {
                        is_second = true;
                    }
                    Err(error) => return Err(error),
                }
            }
        })
    }
}

/// How often a task that waits without a connection looks whether the pool was closed. In a crowd it pauses for longer.
const LOOK: Duration = Duration::from_secs(1);

/// A wait of a task.
struct InPool<'a, P: Pool> {
    handle: &'a AdvisoryLock,
    pool: &'a P,
}

impl<P: Pool> Half for InPool<'_, P> {
    type Acquisition = Acquisition<Pooled<P::Connection>>;
    type Guard = PooledGuard<P>;

    fn budget(&self) -> u32 {
        budget(self.pool.size(), self.pool.is_contended())
    }

    async fn begin(&self, waiter: &mut Waiter, limit: Duration) -> Result<Self::Acquisition> {
        let (limit, waiter) = (Some(limit), Some(waiter));
        self.handle.begin(self.pool, limit, waiter).await
    }

    async fn wait(
        &self,
        acquisition: &mut Self::Acquisition,
        deadline: Deadline,
        give_up: impl FnMut() -> bool + Send,
    ) -> Result<()> {
        Box::pin(acquisition.wait(deadline, give_up)).await
    }

    fn is_granted(&self, acquisition: &Self::Acquisition) -> bool {
        acquisition.is_granted
    }

    fn end(&self, acquisition: Self::Acquisition) -> Attempt<PooledGuard<P>> {
        acquisition.into_attempt()
    }

    async fn turn(&self, waiter: &mut Waiter, limit: Duration) {
        let deadline = Deadline::after(limit);
        loop {
            let remaining = deadline.remaining().min(LOOK);
            let is_turn = waiter.await_turn(self.budget(), remaining).await;
            if is_turn || deadline.remaining().is_zero() || self.is_closed() {
                return;
            }
        }
    }

    async fn pause(&self, time: Duration) {
        let deadline = Deadline::after(time);
        while !deadline.remaining().is_zero() && !self.is_closed() {
            tokio::time::sleep(deadline.remaining().min(LOOK)).await;
        }
    }

    fn is_closed(&self) -> bool {
        self.pool.is_closed()
    }
}

/// An acquisition in progress. Unless it becomes a guard, or is known to hold nothing, dropping it releases what was granted.
struct Acquisition<C: GuardConnection> {
    pinned: C,
    held: HeldLock,
    is_fenced: bool,
    is_granted: bool,
}

impl<C: GuardConnection> Acquisition<C> {
    fn of(handle: &AdvisoryLock, mut pinned: C) -> Result<Self> {
        let id = pinned.session().0.lock_id(handle.key())?;
        let mode = handle.0.mode;
        let lock = Lock { id, mode };
        Ok(Self {
            pinned,
            held: HeldLock::requested(handle.key(), lock),
            is_fenced: handle.0.fenced,
            is_granted: false,
        })
    }

    async fn take(&mut self) -> Result<()> {
        let began = Instant::now();
        let (mut session, doubt) = self.pinned.session();
        let tried =
            operations::try_session_lock(&mut session, doubt, &mut self.held, self.is_fenced).await;
        self.pinned.replied_in(began.elapsed());
        self.conclude(tried).await
    }

    async fn wait(&mut self, deadline: Deadline, give_up: impl FnMut() -> bool) -> Result<()> {
        if !self.is_granted {
            self.pinned.set_waiting(true);
            let (mut session, _) = self.pinned.session();
            let waited =
                operations::wait_for_session_lock(&mut session, &mut self.held, deadline, give_up)
                    .await;
            self.pinned.set_waiting(false);
            self.conclude(waited).await?;
        }
        Ok(())
    }

    async fn conclude(&mut self, granted: Result<bool>) -> Result<()> {
        if granted.is_err() {
            self.pinned.failed();
            self.pinned.repair().await;
        }
        self.is_granted = granted?;
        Ok(())
    }

    async fn has_ended(&mut self, error: &diesel::result::Error) -> bool {
        let (mut session, _) = self.pinned.session();
        session.has_ended(error).await
    }

    fn into_attempt(mut self) -> Attempt<AdvisoryLockGuard<C>> {
        if self.is_granted {
            Attempt::Acquired(self.into_guard())
        } else {
            self.trust();
            Attempt::Busy
        }
    }

    fn into_guard(mut self) -> AdvisoryLockGuard<C> {
        self.trust();
        AdvisoryLockGuard::new(self.pinned, self.held)
    }

    /// Ends the doubt: the session holds nothing that no guard accounts for.
    fn trust(&mut self) {
        let (_, doubt) = self.pinned.session();
        *doubt = None;
    }
}
