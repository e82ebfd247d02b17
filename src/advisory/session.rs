//! Taking a session lock on a leased connection.

#[cfg(any(feature = "r2d2", feature = "migrations"))]
use std::thread;
#[cfg(any(feature = "r2d2", feature = "migrations"))]
use std::time::Duration;

#[cfg(feature = "migrations")]
use diesel::pg::PgConnection;
use diesel::result::Error as DieselError;

use super::AdvisoryLock;
#[cfg(feature = "r2d2")]
use super::PooledGuard;
use super::guard::{AdvisoryLockGuard, Hold};
use super::lease::{Doubt, Lease, Pinned};
use super::query::Answer;
#[cfg(feature = "r2d2")]
use super::seats::Waiter;
use super::wait::{self, Deadline};
use crate::attempt::Attempt;
#[cfg(feature = "r2d2")]
use crate::crowds::Crowds;
use crate::error::{Error, Misplaced, Result};
use crate::events::{self, Outcome, Subject};
#[cfg(feature = "r2d2")]
use crate::key::LockId;
use crate::key::LockKey;
#[cfg(any(feature = "r2d2", feature = "migrations"))]
use crate::pauses::Pauses;
#[cfg(feature = "r2d2")]
use crate::pool::{PgPool, PooledPgConnection};
use crate::session::{now, sent as send};
use crate::transaction::{self, Transaction};

/// Takes the lock; waits for it as long as it takes.
pub(super) fn acquire<C: Lease>(lock: &AdvisoryLock, lease: C) -> Result<AdvisoryLockGuard<C>> {
    let call = || {
        let mut tried = Tried::send(lock, lease)?;
        tried.wait(Deadline::NEVER, || false)?;
        Ok(tried.into_guard())
    };
    now(events::observe(
        "acquire",
        Subject::Lock(&lock.key),
        async { call() },
        |_| Outcome::Acquired,
    ))
}

/// Takes the lock; waits for it until the deadline.
pub(super) fn acquire_until<C: Lease>(
    lock: &AdvisoryLock,
    lease: C,
    deadline: Deadline,
) -> Result<Attempt<AdvisoryLockGuard<C>>> {
    let call = || {
        let mut tried = Tried::send(lock, lease)?;
        tried.wait(deadline, || false)?;
        Ok(tried.into_attempt())
    };
    now(events::observe(
        "acquire",
        Subject::Lock(&lock.key),
        async { call() },
        Attempt::outcome,
    ))
}

/// Takes the lock; waits for it as long as it takes, but asks for it now and then only, with no
/// transaction in between: what its holder does never waits for the snapshot of a waiter.
#[cfg(feature = "migrations")]
pub(super) fn acquire_without_snapshot<'conn>(
    lock: &AdvisoryLock,
    conn: &'conn mut PgConnection,
) -> Result<AdvisoryLockGuard<&'conn mut PgConnection>> {
    const SHORTEST: Duration = Duration::from_millis(20);
    const LONGEST: Duration = Duration::from_millis(250);
    let call = || {
        let mut tried = Tried::send(lock, conn)?;
        let mut pauses = Pauses::between(SHORTEST, LONGEST);
        while !tried.granted {
            let pause = pauses.next(Duration::ZERO, Duration::MAX, Duration::MAX);
            thread::sleep(pause.unwrap_or(LONGEST));
            tried = tried.send_again(lock)?;
        }
        Ok(tried.into_guard())
    };
    now(events::observe(
        "acquire",
        Subject::Lock(&lock.key),
        async { call() },
        |_| Outcome::Acquired,
    ))
}

/// Takes the lock, on a connection out of the pool; waits for it until the deadline, but gives the
/// connection back meanwhile if too many wait.
#[cfg(feature = "r2d2")]
pub(super) fn acquire_in_turn(
    lock: &AdvisoryLock,
    pool: &PgPool,
    lease: PooledPgConnection,
    deadline: Deadline,
) -> Result<Attempt<PooledGuard>> {
    static STANDING: Crowds<LockId> = Crowds::new();
    let call = || {
        let mut tried = Tried::send(lock, lease)?;
        if tried.granted {
            return Ok(tried.into_attempt());
        }
        let pool_size = pool.max_size();
        let mut waiter = Waiter::of(tried.hold.id);
        let mut standing = None;
        while !tried.granted {
            if waiter.sit(pool_size) {
                standing = None;
                tried.wait(deadline, || waiter.is_to_stand(pool_size))?;
                waiter.stand();
                if tried.granted || deadline.remaining().is_zero() {
                    break;
                }
            }
            drop(tried.into_attempt());
            let (member, pauses) =
                standing.get_or_insert_with(|| (STANDING.join(waiter.id()), Pauses::new()));
            tried = loop {
                let remaining = deadline.remaining();
                let Some(pause) = pauses.next(member.apart(), Duration::MAX, remaining) else {
                    return Ok(Attempt::Busy);
                };
                waiter.wait_for_seat(pool_size, pause);
                match lock.check_out(pool, Some(deadline.remaining())) {
                    Ok(lease) => break Tried::send(lock, lease)?,
                    // The connections were in use for as long as the pool waits, but the wait for the
                    // lock is not over.
                    Err(Error::Pool(_)) => thread::sleep(pause.min(deadline.remaining())),
                    Err(error) => return Err(error),
                }
            };
        }
        Ok(tried.into_attempt())
    };
    now(events::observe(
        "acquire",
        Subject::Lock(&lock.key),
        async { call() },
        Attempt::outcome,
    ))
}

/// A session that was asked for the lock.
///
/// It stays in doubt until it is made a guard or known to hold nothing: every other way out, be it
/// an error or a panic, gives its connection up.
struct Tried<C: Lease> {
    pinned: Pinned<C>,
    key: LockKey,
    hold: Hold,
    granted: bool,
}

impl<C: Lease> Tried<C> {
    /// Tries in one prepared round trip. Waiting is only for what is found taken: PostgreSQL does
    /// not let a try overtake those who wait.
    fn send(lock: &AdvisoryLock, lease: C) -> Result<Self> {
        let AdvisoryLock { key, mode, .. } = lock;
        let mut pinned = Pinned::new(lease);
        let hold = Hold {
            id: key.id_on(pinned.conn())?,
            mode: *mode,
            pid: 0,
            idle_session_timeout: None,
            fencing_token: None,
        };
        Self {
            pinned,
            key: key.with_id(hold.id),
            hold,
            granted: false,
        }
        .send_again(lock)
    }

    fn send_again(mut self, lock: &AdvisoryLock) -> Result<Self> {
        let Hold { id, mode, .. } = self.hold;
        match transaction::of(self.pinned.conn()) {
            Transaction::None | Transaction::Test => {}
            Transaction::Open => return Err(Error::Misplaced(Misplaced::SessionLockInTransaction)),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        self.pinned.doubt(Doubt::Acquiring(id, mode));
        let (answer, in_raw_transaction) = transaction::probed(self.pinned.conn(), |conn| {
            send(conn, |conn| Answer::to(conn, &id, mode, lock.fenced))
        });
        let answer = answer?;
        self.hold.pid = answer.pid;
        self.hold.idle_session_timeout = answer.idle_session_timeout;
        self.hold.fencing_token = answer.token;
        self.granted = answer.granted == Some(true);
        if in_raw_transaction {
            return Err(self.refuse_raw_transaction());
        }
        if answer.granted.is_none() {
            self.pinned.trust();
            return Err(Error::Standby);
        }
        Ok(self)
    }

    /// Waits until it has the lock, or the time is up, or `give_up` says so after a slice.
    fn wait(&mut self, deadline: Deadline, give_up: impl FnMut() -> bool) -> Result<()> {
        if !self.granted {
            let Self {
                pinned, key, hold, ..
            } = self;
            self.granted = wait::for_session_lock(pinned.conn(), key, hold, deadline, give_up)?;
        }
        Ok(())
    }

    /// In a transaction that Diesel does not know of. On a borrowed connection it is the caller's, so
    /// what was taken is released. In a pool, whoever had the connection last left it behind, so the
    /// doubt stays and discards it.
    fn refuse_raw_transaction(mut self) -> Error {
        #[cfg(feature = "r2d2")]
        if Pinned::<C>::POOLED {
            return Error::TransactionInPool;
        }
        transaction::clear_mark(self.pinned.conn());
        if self.granted {
            // Its release reports the open transaction, which is no news here.
            drop(self.into_guard());
        } else {
            self.pinned.trust();
        }
        Error::Misplaced(Misplaced::SessionLockInTransaction)
    }

    fn into_attempt(mut self) -> Attempt<AdvisoryLockGuard<C>> {
        if self.granted {
            Attempt::Acquired(self.into_guard())
        } else {
            self.pinned.trust();
            Attempt::Busy
        }
    }

    fn into_guard(mut self) -> AdvisoryLockGuard<C> {
        self.pinned.trust();
        AdvisoryLockGuard::new(self.pinned, self.key, self.hold)
    }
}
