//! Advisory locks: one holder at a time, among all programs that use the database.

mod all;
mod attempt;
mod guard;
pub(crate) mod holder;
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
use self::holder::{Holder, Pooled};
use crate::error::{Error, Result};
use crate::event::Subject;
use crate::key::LockKey;
use crate::mode::Mode;
use crate::pool::{Pool, Reply, debug};
use crate::waiting::Turns;

/// A lock that one holder has at a time, or several share, among all programs that use the
/// database.
///
/// `P` is the pool of the program, for each of which there is an alias:
/// [`AdvisoryLock`](crate::AdvisoryLock) for r2d2, `deadpool::AdvisoryLock` and
/// `bb8::AdvisoryLock`. Operations return a [`Reply`]: over r2d2 they block and return a `Result`,
/// over deadpool and bb8 they are futures of it.
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
/// The compiler tells what goes wrong without a run: an outcome that is ignored, and a handle with
/// the pool of the other half.
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
/// The server session that takes a session lock holds it until it unlocks it or ends, so the
/// [guard](AdvisoryLockGuard) pins the connection to it. A connection goes back to its pool only if
/// the server has confirmed the unlock. Otherwise its session is ended, which frees the lock: after
/// an error, a panic, a transaction that was left open, and a dropped future.
///
/// Behind a pooler in transaction mode the statements of one connection run on many sessions, so
/// use [transaction locks](Self#transaction-locks) there.
/// [`check_exclusion`](crate::check_exclusion) finds out.
///
/// # Waiting
///
/// In a process only the oldest waiter of a key does something. It waits on the server, for 200 ms
/// at a time, on a connection that the pool can spare, so processes take turns; if the pool can
/// spare none, it tries every 5 to 100 ms. bb8 tells only which connections are idle, so set its
/// `min_idle` to 1 or more. The others hold no connection. A release in this process wakes the
/// oldest at once. No setting of the session ends the wait, and nothing is written to the server's
/// log. No order is promised. A lock that is taken for a millisecond, thousands of times a second,
/// is better a transaction lock.
///
/// A blocking try that was sent is not interrupted by a timeout: libpq's `tcp_user_timeout` bounds
/// it if the network fails. In the asynchronous half a timeout holds also there, and what the try
/// may yet get is released.
///
/// # Errors
///
/// Session locks fail with [`Error::Input`] for an invalid name, [`Error::Pool`] if the pool gives
/// no connection, [`Error::InsideTransaction`] if it gives one inside a transaction (that of
/// `begin_test_transaction` is none), [`Error::Standby`] on a hot standby and on a server
/// that is set to refuse writes, and [`Error::Database`].
#[must_use = "a lock protects nothing until it is taken"]
#[derive(Clone)]
pub struct AdvisoryLock<P: Pool> {
    key: LockKey,
    /// What a key is added to, if `key` has one.
    unkeyed: Option<LockKey>,
    label: &'static str,
    is_shared: bool,
    /// What it is on, if it is of several, and which of them are shared. Then `key` is the first
    /// one.
    all: Option<Arc<[(LockKey, bool)]>>,
    pool: PhantomData<fn(&P)>,
}

impl<P: Pool> AdvisoryLock<P> {
    /// Makes the lock of a name.
    pub const fn named(name: &'static str) -> Self {
        Self::new(LockKey::named(name))
    }

    /// Makes the lock of a key.
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

    /// Returns the lock of one thing under this name: that of [`LockKey::parts`] with the name and
    /// the key.
    ///
    /// ```
    /// use diesel_interlock::{AdvisoryLock, LockKey};
    ///
    /// static SERVER: AdvisoryLock = AdvisoryLock::named("server");
    /// assert_eq!(*SERVER.key(345).lock_key(), LockKey::parts(["server", "345"]));
    /// ```
    ///
    /// A second key replaces the first; for a thing with several parts use [`LockKey::parts`]. Only
    /// a lock of a name has keys. That of a number, a pair or several is refused when it is used
    /// ([`Error::Input`]).
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

    /// Returns the shared form of the lock, or of each of several: many may hold it at once, while
    /// nobody holds the exclusive one.
    pub const fn shared(mut self) -> Self {
        self.is_shared = true;
        self
    }

    /// Returns what the lock is on, or the first of several.
    pub const fn lock_key(&self) -> &LockKey {
        &self.key
    }

    /// Takes the lock if it is free, and never waits for it.
    ///
    /// One round trip on a connection of the pool: `SELECT pg_try_advisory_lock($1)`, with checks
    /// for a standby.
    pub fn try_acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, Attempt<AdvisoryLockGuard<P>>> {
        P::Mode::drive(self.subject().observe("try_acquire", async move {
            let guard = self.attempt(pool, &self.locks()?, None, None).await?;
            Ok(guard.map_or(Attempt::Busy, Attempt::Acquired))
        }))
    }

    /// Takes the lock, and [waits](Self#waiting) for as long as others hold it. One round trip if
    /// it is free.
    pub fn acquire<'a>(&'a self, pool: &'a P) -> Reply<'a, P, AdvisoryLockGuard<P>> {
        P::Mode::drive(async move {
            let tried = self
                .subject()
                .observe_wait("acquire", self.wait(pool, None))
                .await?;
            tried.acquired().ok_or(Error::TimedOut)
        })
    }

    /// Takes the lock, and [waits](Self#waiting) for at most `timeout`, the check-out of the
    /// connection included. Nothing is held after [`Attempt::Busy`]. One round trip if the lock is
    /// free.
    pub fn acquire_timeout<'a>(
        &'a self,
        pool: &'a P,
        timeout: Duration,
    ) -> Reply<'a, P, Attempt<AdvisoryLockGuard<P>>> {
        P::Mode::drive(async move {
            let deadline = Instant::now().checked_add(timeout);
            let wait = self.wait(pool, deadline);
            self.subject().observe_wait("acquire_timeout", wait).await
        })
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
                // The pool was waited for until the deadline.
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

    /// Tries once, and waits on the server if it is this one's turn and the pool can spare a
    /// connection. A pooled session that turns out to have ended, or whose server is a standby, is
    /// replaced once: a try on it has taken nothing that lasts.
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
        if let Err(error) = &held {
            let is_elsewhere = matches!(error, Error::Standby);
            if is_elsewhere || holder.has_ended(error).await {
                drop(holder);
                holder = self.holder(pool, locks, deadline).await?;
                held = holder.attempt(turns, may_wait).await;
            }
        }
        Ok(held?.then(|| AdvisoryLockGuard::new(holder)))
    }

    async fn holder(
        &self,
        pool: &P,
        locks: &Locks,
        deadline: Option<Instant>,
    ) -> Result<Holder<Pooled<P>>> {
        let pooled = Pooled::check_out(pool, deadline).await?;
        Ok(Holder::new(pooled, locks.clone(), self.subject()))
    }

    fn subject(&self) -> Subject {
        Subject {
            primitive: "lock",
            name: self.label,
        }
    }
}

#[cfg(feature = "r2d2")]
impl AdvisoryLock<crate::pool::PgPool> {
    /// [Acquires](Self::acquire) the lock, runs `work` on the connection whose session holds it,
    /// and releases it.
    ///
    /// After an error of `work` the lock is released as by a drop. A lock that was lost while
    /// `work` succeeded is an error.
    pub fn with<T, E: From<Error>>(
        &self,
        pool: &crate::pool::PgPool,
        work: impl FnOnce(&mut diesel::PgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool)?.run(work)
    }
}

#[cfg(feature = "async")]
impl<P: Pool<Mode = crate::mode::Async>> AdvisoryLock<P> {
    /// [Acquires](Self::acquire) the lock, runs `work` on the connection whose session holds it,
    /// and releases it.
    ///
    /// After an error of `work` the lock is released as by a drop. A lock that was lost while
    /// `work` succeeded is an error.
    pub async fn with<T, E: From<Error>>(
        &self,
        pool: &P,
        work: impl AsyncFnOnce(&mut diesel_async::AsyncPgConnection) -> Result<T, E>,
    ) -> Result<T, E> {
        self.acquire(pool).await?.run(work).await
    }
}

debug!(
    AdvisoryLock | this | key = this.key,
    is_shared = this.is_shared,
    all = this.all
);
