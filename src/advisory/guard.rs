//! The guard of a session lock.

mod release;
mod verdict;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(feature = "r2d2")]
use std::time::Duration;
use std::time::Instant;

use diesel::pg::PgConnection;
use diesel::prelude::*;

pub(super) use self::release::is_closed;
use super::lease::{Lease, Pinned};
use super::mode::LockMode;
use super::query::{DrawToken, IsHeld};
use super::token::Token;
#[cfg(feature = "r2d2")]
use super::watch::{Watch, Watches};
use crate::error::{Error, Misplaced, Result};
use crate::events::{self, Event, Outcome, Subject};
use crate::key::{LockId, LockKey};
#[cfg(feature = "r2d2")]
use crate::pool::PgPool;
use crate::session::sent as send;
use crate::transaction::{self, Transaction};

/// A held session lock, together with the connection whose session holds it.
///
/// PostgreSQL releases a session lock only on the session that took it. The guard owns the pooled
/// connection (or borrows the one it was given) and lends it as [`conn`](Self::conn), so the
/// protected work runs on the same session and needs no second connection; a pool full of waiters
/// could not give it one.
///
/// Made by [`AdvisoryLock`](crate::AdvisoryLock).
///
/// # Release
///
/// [`release`](Self::release) unlocks in one round trip, reports a lock that was lost, and gives
/// the connection back. Dropping the guard does the same without a word.
///
/// The unlock runs on the session that took the lock, or not at all:
/// ```sql
/// SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock($2) END
/// ```
///
/// A pooled connection whose unlock did not surely succeed never goes back to the pool: it is
/// discarded, the server ends its session within milliseconds, and the lock is free with it. That
/// is so after an aborted transaction, a transaction left open (also by a `BEGIN` that Diesel does
/// not know of), a killed backend, a restarted server, and a panic.
///
/// # On a borrowed connection
///
/// it is the caller who decides what becomes of it. Where the caller's plain SQL `BEGIN` is aborted,
/// it is rolled back and the unlock repeated. Where the unlock failed otherwise, and the session
/// still holds the lock, the session is ended. A transaction of Diesel's own that is aborted is
/// nobody's to roll back but the caller's: the lock then stays with the session, the connection is
/// marked as broken, and [`release`](Self::release) answers [`Error::ReleaseFailed`].
///
/// **A connection is not to be used again after that error.** Diesel takes the mark back with the
/// next successful statement, and a pool that lent the connection would take it back with the lock:
/// drop it, with deadpool after `Object::take`.
///
/// Rust itself refuses to let the guard go inside a transaction of its own connection:
/// ```compile_fail,E0505
/// # use diesel::prelude::*;
/// # use diesel_interlock::{Error, PooledGuard};
/// fn releases_too_early(mut guard: PooledGuard) -> Result<(), Error> {
///     guard.conn().transaction(|_| {
///         drop(guard);
///         Ok(())
///     })
/// }
/// ```
///
/// # Release on drop blocks
///
/// Dropping a guard waits for the server's answer to the unlock. On a network that swallows
/// packets this takes as long as the connection string's `tcp_user_timeout` and `keepalives_*`
/// settings allow.
///
/// # A lost lock
///
/// If the session ends (a killed backend, a restarted server, a broken network), the server frees
/// the lock at once, and the code under the guard runs on unprotected: see
/// [`is_held`](Self::is_held).
#[must_use = "if unused the lock is released at once"]
#[clippy::has_significant_drop]
pub struct AdvisoryLockGuard<C: Lease> {
    pinned: Pinned<C>,
    key: LockKey,
    hold: Hold,
    since: Instant,
    #[cfg(feature = "r2d2")]
    watches: Watches,
    released: bool,
}

/// What a session lock's release has to know.
#[derive(Debug)]
pub(super) struct Hold {
    pub(super) id: LockId,
    pub(super) mode: LockMode,
    /// 0 as long as it waits in a session that is not known.
    pub(super) pid: i32,
    /// To be given back to the session, where it was lifted.
    pub(super) idle_session_timeout: Option<String>,
    /// If one was drawn.
    pub(super) fencing_token: Option<Token>,
}

impl<C: Lease> AdvisoryLockGuard<C> {
    pub(super) fn new(pinned: Pinned<C>, key: LockKey, hold: Hold) -> Self {
        Self {
            pinned,
            key,
            hold,
            since: Instant::now(),
            #[cfg(feature = "r2d2")]
            watches: Watches::default(),
            released: false,
        }
    }

    /// Lends the connection whose session holds the lock.
    ///
    /// Anything may run on it, transactions included; they must have ended when the guard goes. After a `COPY`
    /// through Diesel, the next statement of the guard takes one more round trip, which reads what is left of
    /// the rows.
    /// After `pg_advisory_unlock_all()` or `DISCARD ALL` the lock is lost, and
    /// [`release`](Self::release) answers an error.
    pub fn conn(&mut self) -> &mut PgConnection {
        self.pinned.conn()
    }

    /// The key of the lock that is held.
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// The `pg_backend_pid()` of the session that holds the lock, as `pg_locks` and
    /// `pg_stat_activity` show it.
    pub fn backend_pid(&self) -> i32 {
        self.hold.pid
    }

    /// Asks the server whether the lock is still held, in one round trip.
    ///
    /// `false` means that it was lost: the session ended, or somebody unlocked it there. `true` is
    /// the server's word for the moment of the question.
    ///
    /// # Errors
    ///
    /// - [`Error::Database`] if the server could not answer, which says nothing about the lock:
    ///   after an error inside a transaction it answers again when that was rolled back.
    pub fn is_held(&mut self) -> Result<bool> {
        let locator = self.hold.id.into();
        let answer = send(self.pinned.conn(), |conn| {
            let question = IsHeld {
                locator: &locator,
                mode: self.hold.mode,
                prepared: true,
            };
            question.get_result::<(i32, bool)>(conn)
        });
        match answer {
            Ok((pid, held)) => Ok(held && pid == self.hold.pid),
            Err(error) if is_closed(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Watches over the lock from now on: a thread asks the server about it that often, over a connection
    /// out of the pool, and the [`Watch`](crate::Watch) tells what it last heard.
    ///
    /// One round trip here, which asks whether the lock is held now, and one for each question of the
    /// thread, which waits for no connection: it takes one that is idle, or none. `every` is at least 10
    /// milliseconds and at most a year.
    ///
    /// A lock that is gone already is told as lost from the beginning. The watch ends with the
    /// [release](Watch#release).
    ///
    /// # Errors
    ///
    /// [`Error::Database`] if the server could not answer.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use diesel_interlock::AdvisoryLock;
    ///
    /// # let database = workbench::Database::new();
    /// # let pool = database.pool(2);
    /// # let pages = 0..3;
    /// let mut guard = AdvisoryLock::named("import").acquire(&pool)?;
    /// let watch = guard.watch(&pool, Duration::from_secs(1))?;
    /// for page in pages {
    ///     if !watch.is_held_within(Duration::from_secs(5)) {
    ///         break; // stop before somebody else is far into it
    ///     }
    ///     // … import the page, which needs no connection
    /// }
    /// guard.release()?;
    /// assert!(!watch.is_held_within(Duration::MAX) && !watch.is_lost());
    /// # Ok::<(), diesel_interlock::Error>(())
    /// ```
    #[cfg(feature = "r2d2")]
    pub fn watch(&mut self, pool: &PgPool, every: Duration) -> Result<Watch> {
        let Hold { mode, pid, .. } = self.hold;
        let watch = Watch::begin(self.pinned.conn(), pool, &self.key, mode, pid, every)?;
        self.watches.add(&watch);
        Ok(watch)
    }

    /// A number that is greater than that of everybody who held the lock before: what a
    /// [`Fence`](crate::Fence), or a service, refuses when it has seen a greater one.
    ///
    /// It is a transaction id, `pg_current_xact_id()`, drawn while the lock is held. Comes with the lock
    /// where that is [`fenced`](crate::AdvisoryLock::fenced) and was free; otherwise the first call
    /// draws it, in one round trip. Of those who share a lock each has one, in no order.
    ///
    /// Guards of one lock on one session, nested in each other, have one token, since they hold the lock
    /// together: that of the innermost guard further out which has one. The session gets a name for this, in the
    /// setting `diesel_interlock.session`; after a `RESET ALL` between the two guards they are not known to
    /// share a session. A guard that takes exclusively what its session holds shared draws a token of its own,
    /// because it comes after other sharers. A fence that this one has passed refuses the sharer's.
    ///
    /// An empty message in the write-ahead log, `pg_logical_emit_message`, keeps it over a crash of the
    /// server. It is not kept where `synchronous_commit` is `off`, nor over a failover to an asynchronous
    /// standby: the next holder's may then be smaller.
    ///
    /// # Blocking
    ///
    /// The transaction that draws a token waits for the log as every commit does: with
    /// `synchronous_standby_names` set, for the standbys, without end while they are away. No timeout of a wait
    /// for the lock and no `statement_timeout` ends this, because the statement itself is over by then. Only
    /// `synchronous_commit = local` on the session bounds it, at the price of a token that a failover may give
    /// again.
    ///
    /// # Errors
    ///
    /// - [`Misplaced::TokenInTransaction`](crate::error::Misplaced::TokenInTransaction) if it is to be drawn while a transaction is open on the connection,
    ///   also by a plain SQL `BEGIN`: nothing of it is in the log before the commit, and a crash would give
    ///   the number again.
    /// - [`Error::LockLost`] if the lock is not held any more.
    /// - [`Error::Database`] if the server could not answer.
    pub fn fencing_token(&mut self) -> Result<i64> {
        if let Some(token) = &self.hold.fencing_token {
            return Ok(token.number());
        }
        let Hold { id, mode, .. } = self.hold;
        let conn = self.pinned.conn();
        if transaction::of(conn) == Transaction::Open {
            return Err(Error::Misplaced(Misplaced::TokenInTransaction));
        }
        let (drawn, in_transaction) = transaction::probed(conn, |conn| {
            send(conn, |conn| {
                let locator = &id.into();
                let draw = DrawToken { locator, mode };
                draw.get_result::<(i32, String, Option<i64>)>(conn)
            })
        });
        if in_transaction && !drawn.as_ref().is_err_and(is_closed) {
            // The transaction is the caller's, who may go on with it.
            transaction::clear_mark(conn);
        }
        let lost = |source| Error::LockLost {
            key: self.key.clone(),
            source,
        };
        match drawn {
            Ok((pid, session, Some(number))) if pid == self.hold.pid => {
                if in_transaction {
                    return Err(Error::Misplaced(Misplaced::TokenInTransaction));
                }
                let token = Token::drawn(session, id, mode, number);
                let number = token.number();
                self.hold.fencing_token = Some(token);
                Ok(number)
            }
            Ok(_) => Err(lost(None)),
            Err(error) if is_closed(&error) => Err(lost(Some(error))),
            Err(error) => Err(error.into()),
        }
    }

    /// Releases the lock and gives the connection back. The same as dropping the guard, but it
    /// reports what went wrong.
    ///
    /// One round trip, and one more to prepare the statement, once per connection. Whatever the
    /// answer is, the lock is not held by this guard any more.
    ///
    /// # Errors
    ///
    /// - [`Error::LockLost`] if the lock was not held any more, or its session had ended.
    /// - [`Error::SessionMoved`] if another session answered than the one that took the lock.
    /// - [`Error::TransactionLeftOpen`] if a transaction was left open on the connection.
    /// - [`Error::ReleaseFailed`] if the unlock failed, as it does in an aborted transaction.
    pub fn release(mut self) -> Result<()> {
        self.release_inner()
    }

    fn release_inner(&mut self) -> Result<()> {
        self.released = true;
        #[cfg(feature = "r2d2")]
        self.watches.releasing();
        let released = self.unlock_and_check();
        // Before the connection is back in its pool, because the next guard on this session must not share the token.
        self.hold.fencing_token = None;
        #[cfg(feature = "r2d2")]
        self.watches.released(&released);
        let event = Event::of("release", Subject::Lock(&self.key), &released, |()| {
            Outcome::Released
        });
        events::record(&event.held_since(self.since));
        released
    }
}

impl<C: Lease> Drop for AdvisoryLockGuard<C> {
    fn drop(&mut self) {
        if !self.released {
            // Diesel's instrumentation is the caller's code: a panic there, while another one
            // unwinds, would abort the process. The doubt it leaves discards the connection.
            let _ = catch_unwind(AssertUnwindSafe(|| self.release_inner()));
        }
    }
}

impl<C: Lease> fmt::Debug for AdvisoryLockGuard<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdvisoryLockGuard")
            .field("key", &self.key)
            .field("mode", &self.hold.mode)
            .field("backend_pid", &self.hold.pid)
            .finish_non_exhaustive()
    }
}
