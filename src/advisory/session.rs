//! Taking a session lock on a leased connection.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "r2d2")]
use std::time::Duration;

use diesel::prelude::*;
use diesel::result::Error as DieselError;

use super::AdvisoryLock;
#[cfg(feature = "r2d2")]
use super::PooledGuard;
use super::first_wait;
use super::guard::{AdvisoryLockGuard, Hold};
use super::lease::{Doubt, Lease, Pinned};
use super::query::{
    TryAcquire, TryAcquireCarefully, TryAcquireFenced, TryAcquired, TryAcquiredFenced,
    get_numbered_result,
};
#[cfg(feature = "r2d2")]
use super::seats::Seat;
use super::token::Token;
use super::wait::{self, Deadline};
use crate::attempt::Attempt;
use crate::error::{Error, Result};
use crate::events::{self, What};
use crate::key::{LockId, LockKey};
#[cfg(feature = "r2d2")]
use crate::pauses::{Crowd, Pauses};
#[cfg(feature = "r2d2")]
use crate::pool::{PgPool, PooledPgConnection};
use crate::send::send;
use crate::transaction::{self, Transaction};

/// Takes the lock; waits for it as long as it takes.
pub(super) fn acquire<C: Lease>(lock: &AdvisoryLock, lease: C) -> Result<AdvisoryLockGuard<C>> {
    events::acquire(
        What::Lock(&lock.key),
        || {
            let mut tried = Tried::send(lock, lease)?;
            tried.wait_until(Deadline::NEVER)?;
            Ok(tried.into_guard())
        },
        |_| "acquired",
    )
}

/// Takes the lock; waits for it until the deadline.
pub(super) fn acquire_until<C: Lease>(
    lock: &AdvisoryLock,
    lease: C,
    deadline: Deadline,
) -> Result<Attempt<AdvisoryLockGuard<C>>> {
    events::acquire(
        What::Lock(&lock.key),
        || {
            let mut tried = Tried::send(lock, lease)?;
            tried.wait_until(deadline)?;
            Ok(tried.into_attempt())
        },
        Attempt::outcome,
    )
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
    static WITHOUT_SEAT: Crowd = Crowd::new();
    let mut pauses = None;
    let call = || {
        let mut tried = Tried::send(lock, lease)?;
        while !tried.granted {
            if let Some(_seat) = Seat::take(pool.max_size()) {
                pauses = None;
                tried.wait_until(deadline)?;
                break;
            }
            drop(tried.into_attempt());
            let pauses =
                pauses.get_or_insert_with(|| Pauses::until(deadline.instant(), &WITHOUT_SEAT));
            let Some(pause) = pauses.next(Duration::MAX) else {
                return Ok(Attempt::Busy);
            };
            Seat::wait_for_one(pause);
            tried = match lock.check_out(pool, Some(pauses.remaining())) {
                Ok(lease) => Tried::send(lock, lease)?,
                // The pool's connections were in use to the end of the wait.
                Err(Error::Pool(_)) if pauses.remaining().is_zero() => return Ok(Attempt::Busy),
                Err(error) => return Err(error),
            };
        }
        Ok(tried.into_attempt())
    };
    events::acquire(What::Lock(&lock.key), call, Attempt::outcome)
}

/// What the server said to a try of any kind.
struct Answer {
    /// 0 if it was not told.
    pid: i32,
    idle_session_timeout: Option<String>,
    /// `None` on a hot standby.
    granted: Option<bool>,
    token: Option<Token>,
}

impl Answer {
    /// Tries in one prepared round trip. The first of this process that meets a session with an
    /// `idle_session_timeout` takes two, and from then on all are careful: nobody knows which session is next.
    fn to(lock: &AdvisoryLock, id: LockId, conn: &mut PgConnection) -> QueryResult<Self> {
        static CAREFULLY: AtomicBool = AtomicBool::new(false);
        let mode = lock.mode;
        if lock.fenced {
            let query = TryAcquireFenced { id: &id, mode };
            let answer = query.get_result::<TryAcquiredFenced>(conn)?;
            let token = answer.token(id, mode);
            return Ok(Self {
                token,
                ..Self::from(answer)
            });
        }
        if !CAREFULLY.load(Ordering::Relaxed) {
            let pid: Option<i32> = get_numbered_result!(TryAcquire { id: &id, mode }, conn)?;
            if pid != Some(0) {
                return Ok(Self {
                    pid: pid.unwrap_or_default(),
                    idle_session_timeout: None,
                    granted: Some(pid.is_some()),
                    token: None,
                });
            }
        }
        let answer: TryAcquired =
            get_numbered_result!(TryAcquireCarefully { id: &id, mode }, conn)?;
        let answer = Self::from(answer);
        CAREFULLY.fetch_or(answer.idle_session_timeout.is_some(), Ordering::Relaxed);
        Ok(answer)
    }
}

/// The time-out, if there is one.
fn not_zero(idle_session_timeout: Option<String>) -> Option<String> {
    idle_session_timeout.filter(|value| value != "0")
}

impl From<TryAcquired> for Answer {
    fn from(answer: TryAcquired) -> Self {
        Self {
            pid: answer.pid.map_or(0, i32::abs),
            idle_session_timeout: not_zero(answer.idle_session_timeout),
            granted: answer.pid.map(|pid| pid > 0),
            token: None,
        }
    }
}

impl From<TryAcquiredFenced> for Answer {
    fn from(answer: TryAcquiredFenced) -> Self {
        Self {
            pid: answer.pid,
            idle_session_timeout: not_zero(answer.idle_session_timeout),
            granted: answer.token.map(|token| token != 0),
            token: None,
        }
    }
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
        let (id, mode) = (key.id_on(pinned.conn())?, *mode);
        match transaction::of(pinned.conn()) {
            Transaction::None | Transaction::Test => {}
            Transaction::Open => return Err(Error::InTransaction),
            Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
        }
        pinned.doubt(Doubt::Acquiring(id, mode));
        let (answer, in_raw_transaction) = transaction::probed(pinned.conn(), |conn| {
            send(conn, |conn| Answer::to(lock, id, conn))
        });
        let answer = answer?;
        let mut tried = Self {
            pinned,
            key: key.with_id(id),
            hold: Hold {
                id,
                mode,
                pid: answer.pid,
                idle_session_timeout: answer.idle_session_timeout,
                fencing_token: answer.token,
            },
            granted: answer.granted == Some(true),
        };
        if in_raw_transaction {
            return Err(tried.refuse_raw_transaction());
        }
        if answer.granted.is_none() {
            tried.pinned.trust();
            return Err(Error::Standby);
        }
        Ok(tried)
    }

    /// Waits, slice by slice, until it has the lock or the time is up.
    fn wait_until(&mut self, deadline: Deadline) -> Result<()> {
        // The statement for the first slice does not lift a time-out.
        let mut is_first = self.hold.idle_session_timeout.is_none();
        while !self.granted {
            let left = deadline.remaining();
            if left.is_zero() {
                break;
            }
            self.granted = if mem::take(&mut is_first) {
                first_wait::for_session_lock(self.pinned.conn(), &mut self.hold, left)?
            } else {
                wait::for_session_lock(self.pinned.conn(), &self.key, &self.hold, left)?
            };
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
        Error::InTransaction
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
