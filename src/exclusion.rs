//! Do session locks exclude on this pool?

use std::time::{Duration, Instant};

use crate::advisory::Locks;
use crate::advisory::pinned::Pinned;
use crate::advisory::sql::Lock;
use crate::error::{Error, Result};
use crate::key::LockKey;
use crate::mode::Mode;
use crate::pool::{Pool, Reply};
use crate::transaction::Own;

/// What was found, and the remedy.
const ONE_SESSION: &str = "two connections have the same server session, so a pooler in transaction mode is in between: connect past \
     it, or use `AdvisoryLock::transaction`, or a semaphore of one slot";
const MOVED: &str = "the statements of one connection run on several server sessions, so a pooler in transaction mode is in between: \
     connect past it, or use `AdvisoryLock::transaction`, or a semaphore of one slot";
const NO_LOCKS: &str = "two sessions got the same lock, so the advisory locks of this server do nothing: use a semaphore of one slot, \
     or a server that has them";

/// Checks that session locks exclude on this pool: takes one on a connection, and tries it on a second one, which must be refused.
///
/// It finds poolers in transaction mode, and servers whose advisory locks do nothing. Call it once when a program starts that uses
/// session locks; [`migrations::install`](crate::migrations::install) does, and logs a warning. It needs two connections, and fails
/// with [`Error::Pool`] if the second is not lent within a second. Five round trips.
///
/// # Errors
///
/// [`Error::NotExclusive`] with what was found and what to do, and those of a [session lock](crate::advisory::AdvisoryLock#errors).
///
/// ```
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// diesel_interlock::check_exclusion(&pool)?;
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn check_exclusion<P: Pool>(pool: &P) -> Reply<'_, P, Result<()>> {
    P::Mode::drive(check(pool))
}

pub(crate) async fn check<P: Pool>(pool: &P) -> Result<()> {
    let lock = Lock::new(LockKey::bigint(fastrand::i64(..)), false)?;
    let lock = Locks::from(lock);
    let mut first = Pinned::check_out(pool, None).await?;
    let Ok(pid) = first.take(&lock).await? else {
        // Somebody else has just this number, and excludes this one.
        return Ok(());
    };
    let deadline = Some(Instant::now() + Duration::from_secs(1));
    let second = P::Mode::within(deadline, Pinned::check_out(pool, deadline)).await;
    let mut second = second.ok_or(Error::TimedOut)??;
    match second.take(&lock).await? {
        Ok(other) if other == pid => return Err(Error::NotExclusive(ONE_SESSION)),
        Ok(_) => return Err(Error::NotExclusive(NO_LOCKS)),
        Err(_) => {}
    }
    // A pooler that lends a session to each transaction lends the first one's to this, unless it has others to spare.
    let transaction = Own::begin_borrowed(second.conn()).await?;
    let released = first.release(&lock, pid).await;
    match transaction.end(released).await {
        Ok(()) => Ok(()),
        Err(Error::SessionMoved { .. } | Error::LockLost(_)) => Err(Error::NotExclusive(MOVED)),
        Err(error) => Err(error),
    }
}
