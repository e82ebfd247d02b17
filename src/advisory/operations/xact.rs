//! Transaction locks, and the transactions that take one first.

use std::time::{Duration, Instant};

use diesel::result::DatabaseErrorKind::Unknown;
use diesel::result::{Error as DieselError, QueryResult};

use crate::advisory::AdvisoryLock;
use crate::advisory::lock::Lock;
use crate::advisory::{rules, sql};
use crate::attempt::Attempt;
use crate::clock::Deadline;
use crate::error::{Misplaced, Result};
use crate::events::{self, Outcome, Subject};
use crate::panics::caught;
use crate::session::{OwnTransaction, Session, started};
use crate::transaction::{self, Transaction};

impl AdvisoryLock {
    /// Takes the lock until the transaction ends. Waits indefinitely, in the server's queue and under its deadlock detection.
    pub(in crate::advisory) async fn acquire_xact_in<S: Session>(
        &self,
        session: &mut S,
    ) -> Result<()> {
        // An error is found again below. To keep it over the wait would make the future larger.
        let lock = self.checked_on(session).ok();
        let subject = self.subject(lock);
        let acquire = async {
            let lock = lock.map_or_else(|| self.checked_on(session), Ok)?;
            if try_xact(session, lock).await?.is_busy() {
                session.batch(&sql::wait_for_xact(lock, 0)).await?;
            }
            Ok(())
        };
        events::observe("acquire", subject, acquire, |()| Outcome::Acquired).await
    }

    /// Takes the lock until the transaction ends. Waits until the deadline: one that has passed makes it one try.
    pub(in crate::advisory) async fn acquire_xact_until_in<S: Session>(
        &self,
        session: &mut S,
        deadline: Deadline,
    ) -> Result<Attempt<()>> {
        let lock = self.checked_on(session).ok();
        let subject = self.subject(lock);
        let acquire = async {
            let lock = lock.map_or_else(|| self.checked_on(session), Ok)?;
            let is_acquired = !try_xact(session, lock).await?.is_busy()
                || wait_for_xact_until(session, lock, deadline).await?;
            Ok(if is_acquired {
                Attempt::Acquired(())
            } else {
                Attempt::Busy
            })
        };
        events::observe("acquire", subject, acquire, Attempt::outcome).await
    }

    fn checked_on<S: Session>(&self, session: &mut S) -> Result<Lock> {
        Ok(Lock {
            id: session.lock_id(self.key())?,
            mode: self.mode,
        })
    }

    fn subject(&self, lock: Option<Lock>) -> Subject<'_> {
        Subject::Lock(self.key().shown_as(lock.map(|lock| lock.id)))
    }
}

/// Opens the transaction of a lock, at READ COMMITTED. Inside a test transaction it is a savepoint.
pub(in crate::advisory) async fn begin_transaction<S: Session>(
    session: &mut S,
) -> Result<OwnTransaction<'_, S>> {
    Ok(match session.transaction() {
        Transaction::None => OwnTransaction::begin_read_committed(session).await?,
        Transaction::Test => OwnTransaction::begin_in_test(session).await?,
        Transaction::Open => return Err(Misplaced::NestedTransaction.into()),
        Transaction::Broken => return Err(DieselError::BrokenTransactionManager.into()),
    })
}

async fn try_xact<S: Session>(session: &mut S, lock: Lock) -> Result<Attempt<()>> {
    transaction::require_open(session.transaction(), Misplaced::XactLockOutsideTransaction)?;
    let row = session.one(sql::Numbered(sql::TryXact { lock })).await?;
    sql::TriedXact::read(row)
}

/// Waits until the deadline, in a savepoint. Its rollback keeps the transaction usable after a timeout, restores its
/// settings, and undoes a grant of the last moment. Returns whether the lock was granted.
async fn wait_for_xact_until<S: Session>(
    session: &mut S,
    lock: Lock,
    deadline: Deadline,
) -> Result<bool> {
    let limit = deadline.remaining();
    if limit.is_zero() {
        return Ok(false);
    }
    let milliseconds = rules::milliseconds(limit);
    let limit = limit.min(Duration::from_millis(milliseconds.unsigned_abs().into()));
    let savepoint = Savepoint::set(session).await?;
    let began = Instant::now();
    let message = sql::wait_for_xact(lock, milliseconds);
    match savepoint.session.batch(&message).await {
        Ok(()) => {
            savepoint.end(sql::RELEASE_SAVEPOINT).await?;
            Ok(true)
        }
        Err(error) => {
            let timed_out = rules::is_timeout(&error, began.elapsed(), limit);
            let undone = savepoint.end(sql::ROLLBACK_TO_SAVEPOINT).await;
            match (error, undone) {
                (DieselError::DatabaseError(Unknown, _), undone) if timed_out => {
                    undone?;
                    Ok(false)
                }
                (error, _) => Err(error.into()),
            }
        }
    }
}

/// A savepoint inside the caller's transaction, of which Diesel does not know. Its drop rolls back to it, because a caller
/// whose future was dropped may continue the transaction.
struct Savepoint<'s, S: Session> {
    session: &'s mut S,
    is_ended: bool,
}

impl<'s, S: Session> Savepoint<'s, S> {
    async fn set(session: &'s mut S) -> QueryResult<Self> {
        let mut savepoint = Self {
            session,
            is_ended: false,
        };
        let set = savepoint.session.batch(sql::SAVEPOINT).await;
        savepoint.is_ended = set.is_err();
        set.map(|()| savepoint)
    }

    async fn end(mut self, message: &'static str) -> QueryResult<()> {
        // The message is sent when it is first polled, which is now.
        self.is_ended = true;
        self.session.batch(message).await
    }
}

impl<S: Session> Drop for Savepoint<'_, S> {
    fn drop(&mut self) {
        if !self.is_ended {
            caught(|| started(self.session.batch(sql::ROLLBACK_TO_SAVEPOINT)));
        }
    }
}
