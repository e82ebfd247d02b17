//! Advisory locks: one holder at a time, among all programs that use the database.

mod all;
mod attempt;
mod guard;
pub(crate) mod holder;
mod owner;
pub(crate) mod scope;
pub(crate) mod sql;
mod sql_several;
pub(crate) mod xact;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use self::all::Locks;
pub use self::attempt::Attempt;
pub use self::guard::AdvisoryLockGuard;
use self::holder::Holder;
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::key::LockKey;
use crate::mode::Mode;
use crate::pool::{Checkout, Pool, Reply, impl_debug};
use crate::waiting::Turns;

/// A lock that one holder has at a time, or several share, among all programs that use the
/// database.
///
/// `P` is your connection pool, and there is an alias for each pool:
/// [`AdvisoryLock`](crate::AdvisoryLock) for r2d2, `deadpool::AdvisoryLock` and
/// `bb8::AdvisoryLock`. Operations return a [`Reply`]: with r2d2 they block and return a `Result`;
/// with deadpool and bb8 they return a future of a `Result`.
///
/// ```
/// use diesel_interlock::{AdvisoryLock, Attempt, Error, PgPool};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// fn report(pool: &PgPool) -> Result<bool, Error> {
///     let Attempt::Acquired(mut guard) = NIGHTLY.try_acquire(pool)? else {
///         return Ok(false); // another instance writes it
///     };
///     let conn = guard.conn(); // work on the session that holds the lock
///     # let _ = conn;
///     guard.release()?; // an error if the lock was lost meanwhile
///     Ok(true)
/// }
/// # assert!(report(&workbench::Database::new().pool(1))?);
/// # Ok::<(), Error>(())
/// ```
///
/// The compiler finds two mistakes: an outcome that is ignored (a warning, unless you deny
/// `unused_must_use`), and a handle that is used with the pool of the other half.
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use diesel_interlock::{AdvisoryLock, Error, PgPool};
/// fn report(pool: &PgPool) -> Result<(), Error> {
///     AdvisoryLock::named("nightly report").try_acquire(pool)?;
///     Ok(()) // work here would run without the lock
/// }
/// ```
#[cfg_attr(
    feature = "deadpool",
    doc = r#"
```compile_fail,E0308
# use diesel_interlock::{AdvisoryLock, deadpool::PgPool};
fn report(pool: &PgPool) {
    // Import `diesel_interlock::deadpool::AdvisoryLock`.
    let _ = AdvisoryLock::named("nightly report").try_acquire(pool);
}
```
"#
)]
///
/// # Session locks
///
/// A session lock belongs to the server session that took it, until that session unlocks it or
/// ends. So the [guard](AdvisoryLockGuard) keeps the connection of that session. The connection is
/// returned to its pool only if the server has confirmed the unlock. If the server cannot confirm
/// it, for example after an error or a panic, with an open transaction, or because a future was
/// dropped, the connection is discarded instead: its session ends, which frees the lock.
///
/// Behind a pooler in transaction mode, the statements of one connection run on many server
/// sessions, so use [transaction locks](Self#transaction-locks) there. To find out, call
/// [`check_exclusion`](crate::check_exclusion).
///
/// # Waiting
///
/// Of the waiters for a key in one process, only the oldest acts; the others sleep and hold no
/// connection. The oldest waits on the server, for 200 ms at a time, so processes take turns. It
/// does so on a connection that the pool can spare; if the pool can spare none, it polls every 5 to
/// 100 ms. A release in the same process wakes the oldest at once. No order among waiters is
/// promised.
///
/// **A program can wait for itself**, and PostgreSQL does not see that: it takes a lock whose guard
/// it keeps, on another connection, or a guard keeps the only connection of its pool. A wait of
/// more than five seconds, also for a connection or in a transaction, is logged as a warning, which
/// names the session that holds the lock, and says whether it is one of this process.
///
/// No setting of the session, such as `lock_timeout`, ends the wait, and the wait writes nothing to
/// the server's log. With bb8 only an idle connection counts as one to spare, so set its `min_idle`
/// to 1 or more. For a lock that is held for a millisecond, thousands of times a second, use a
/// transaction lock.
///
/// With r2d2 a timeout does not interrupt a try that was sent: set libpq's `tcp_user_timeout` to
/// bound the try if the network fails. With deadpool and bb8 the timeout holds there, too; if the
/// server grants the lock after the timeout, the crate releases it.
///
/// # Errors
///
/// Session locks fail with [`Error::Input`] for an invalid name or key, [`Error::Pool`] if the pool
/// gives no connection, and [`Error::TimedOut`] if there was no reply before the timeout. If the
/// pool gives a connection inside a transaction, that is [`Error::InsideTransaction`] (a
/// transaction of `begin_test_transaction` does not count). A hot standby, and a server that is set
/// to refuse writes, are [`Error::Standby`]. With deadpool and bb8, awaiting outside a tokio
/// runtime is [`Error::NoRuntime`]. Other failures are [`Error::Database`].
#[must_use = "a lock protects nothing until it is taken"]
#[derive(Clone)]
pub struct AdvisoryLock<P: Pool> {
    key: LockKey,
    /// The key of the name alone, if a key was added to it in `key`.
    unkeyed: Option<LockKey>,
    label: &'static str,
    is_shared: bool,
    /// The keys of several locks, and whether each is shared. `key` is then the first of them.
    all: Option<Arc<[(LockKey, bool)]>>,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> AdvisoryLock<P> {
    /// Makes the lock with a name, which is a constant of the program. What varies, such as a
    /// tenant, belongs in [`key`](Self::key).
    pub const fn named(name: &'static str) -> Self {
        Self::new(LockKey::named(name))
    }

    /// Makes the lock of a [`LockKey`]: a name, a number or a pair.
    pub const fn new(key: LockKey) -> Self {
        Self {
            label: key.label(),
            key,
            unkeyed: None,
            is_shared: false,
            all: None,
            pool: PhantomData,
        }
    }

    /// Returns the lock of one thing under this name.
    ///
    /// Its key is [`LockKey::parts`] of the name and `key`:
    ///
    /// ```
    /// use diesel_interlock::{AdvisoryLock, LockKey};
    ///
    /// static SERVER: AdvisoryLock = AdvisoryLock::named("server");
    /// assert_eq!(*SERVER.key(345).lock_key(), LockKey::parts(["server", "345"]));
    /// ```
    ///
    /// A second call replaces the key; for a thing with several parts use [`LockKey::parts`]. Only
    /// a lock with a name has keys. A lock of a number, a pair or several locks is refused with
    /// [`Error::Input`] when it is used with a key.
    pub fn key(&self, key: impl fmt::Display) -> Self {
        let unkeyed = self.unkeyed.as_ref().unwrap_or(&self.key);
        Self {
            key: match self.all {
                None => unkeyed.with_key(key),
                Some(_) => LockKey::none(),
            },
            unkeyed: Some(unkeyed.clone()),
            all: None,
            ..*self
        }
    }

    /// Returns the shared form of the lock: many may hold it at once, while nobody holds it
    /// exclusively.
    ///
    /// Of [several locks](Self::all), each becomes shared.
    pub const fn shared(mut self) -> Self {
        self.is_shared = true;
        self
    }

    /// Returns the key of the lock, or the first key of several.
    pub const fn lock_key(&self) -> &LockKey {
        &self.key
    }

    /// Takes the lock if it is free; never waits for it.
    ///
    /// One round trip on a connection of the pool: `SELECT pg_try_advisory_lock($1)`, in a
    /// statement that also checks that the server is not a standby.
    pub fn try_acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Attempt<AdvisoryLockGuard<P>>> {
        P::Mode::drive(
            self.subject()
                .observe("try_acquire", async move { self.try_once(pool).await }),
        )
    }

    /// Takes the lock, and [waits](Self#waiting) while others hold it.
    ///
    /// Another guard of the same lock in this process is another holder, too: a caller who keeps
    /// one waits for ever. One round trip if the lock is free.
    pub fn acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, AdvisoryLockGuard<P>> {
        P::Mode::drive(async move {
            let wait = self.wait(pool, None);
            let waited = self.subject().observe_wait("acquire", wait).await?;
            waited.of_endless_wait()
        })
    }

    /// Takes the lock, and [waits](Self#waiting) for at most `timeout`.
    ///
    /// The timeout includes the wait for a connection of the pool; a timeout of zero is the same as
    /// [`try_acquire`](Self::try_acquire). One round trip if the lock is free. After
    /// [`Attempt::Busy`] nothing is held.
    pub fn acquire_timeout<'a>(
        &'a self,
        pool: &'a P,
        timeout: Duration,
    ) -> Reply<'a, P, Attempt<AdvisoryLockGuard<P>>> {
        P::Mode::drive(async move {
            let subject = self.subject();
            if timeout.is_zero() {
                return subject
                    .observe_wait("acquire_timeout", self.try_once(pool))
                    .await;
            }
            let wait = self.wait(pool, Instant::now().checked_add(timeout));
            subject.observe_wait("acquire_timeout", wait).await
        })
    }

    async fn try_once(&self, pool: &P) -> Result<Attempt<AdvisoryLockGuard<P>>> {
        let guard = self.attempt(pool, &self.locks()?, None, None).await?;
        Ok(guard.map_or(Attempt::Busy, Attempt::Acquired))
    }

    async fn wait(
        &self,
        pool: &P,
        deadline: Option<Instant>,
    ) -> Result<Attempt<AdvisoryLockGuard<P>>> {
        let locks = self.locks()?;
        let mut turns = Turns::new(deadline);
        while turns.next::<P::Mode>().await {
            let attempt = self.attempt(pool, &locks, deadline, Some(&mut turns));
            match P::Mode::within(deadline, attempt).await {
                Some(Ok(None)) => {}
                Some(Ok(Some(guard))) => return Ok(Attempt::Acquired(guard)),
                // A try was refused before, and then the pool had no connection until the deadline.
                Some(Err(Error::Pool(_))) if turns.was_refused() && turns.is_over() => break,
                Some(Err(error)) => return Err(error),
                None => break,
            }
        }
        if turns.was_refused() {
            Ok(Attempt::Busy)
        } else {
            Err(Error::TimedOut)
        }
    }

    /// Tries once. If refused, also waits on the server, if this is the oldest waiter and the pool
    /// can spare a connection. If the session turns out to have ended, or its server to be a
    /// standby, tries once more on another connection. That is safe, because the first try has
    /// taken nothing that lasts.
    async fn attempt(
        &self,
        pool: &P,
        locks: &Locks,
        deadline: Option<Instant>,
        mut turns: Option<&mut Turns>,
    ) -> Result<Option<AdvisoryLockGuard<P>>> {
        let mut holder = self.holder(pool, locks, deadline).await?;
        let may_wait = || pool.can_spare();
        let mut held = holder.attempt(turns.as_deref_mut(), may_wait).await;
        if held.as_ref().is_err_and(Error::is_unavailable) {
            drop(holder);
            holder = self.holder(pool, locks, deadline).await?;
            held = holder.attempt(turns, may_wait).await;
        }
        Ok(held?.then(|| AdvisoryLockGuard::new(holder)))
    }

    async fn holder(
        &self,
        pool: &P,
        locks: &Locks,
        deadline: Option<Instant>,
    ) -> Result<Holder<Checkout<P>>> {
        let checkout = Checkout::new(pool, deadline).await?;
        Ok(Holder::new(checkout, locks.clone(), self.subject()))
    }

    fn subject(&self) -> Subject {
        Subject {
            primitive: "lock",
            name: self.label,
        }
    }
}

#[cfg(feature = "r2d2")]
impl<M> AdvisoryLock<diesel::r2d2::Pool<M>>
where
    M: diesel::r2d2::ManageConnection<Connection = diesel::PgConnection>,
{
    /// [Acquires](Self::acquire) the lock, runs `work` on the guard's connection, and releases the
    /// lock.
    ///
    /// If `work` fails, its error is returned, and the lock is released as by a drop. If `work`
    /// succeeds but the release fails, for example because the lock was lost, that is an error.
    pub fn with<T, E: From<Error>>(
        &self,
        pool: &diesel::r2d2::Pool<M>,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool)?.run(work)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> AdvisoryLock<P> {
    /// [Acquires](Self::acquire) the lock, runs `work` on the guard's connection, and releases the
    /// lock, as the blocking `with` does.
    pub async fn with<T, E: From<Error>>(
        &self,
        pool: &P,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool).await?.run(work).await
    }
}

impl_debug!(
    AdvisoryLock | this | key = this.key,
    is_shared = this.is_shared,
    all = this.all
);
