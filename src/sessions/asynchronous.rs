//! The check of the sessions behind an asynchronous pool.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use diesel_async::AsyncPgConnection;

use super::{Sessions, compare};
use crate::error::{Error, Result};
use crate::panics::lock;
use crate::pool::asynchronous::{self as pool, CheckedOut, Pool};
use crate::runtime;
use crate::session::{Asynchronous, Session};
use crate::transaction::Transaction;

/// How long [`probe_sessions`] waits for a second connection.
const PATIENCE: Duration = Duration::from_secs(1);

/// Tests whether the connections of the pool have their own server sessions.
///
/// As `probe_sessions` of the blocking half. Call it when a program starts. The methods of
/// [`AdvisoryLock`](crate::asynchronous::AdvisoryLock) that take a pool of deadpool run the same test, once per connection,
/// and return [`Error::SharedSessions`]. bb8 does not tell its connections apart, so with bb8 this function is the only test. It
/// waits for a second connection for a second at most.
///
/// If the future is dropped, the transaction on the second connection is rolled back, and that connection is discarded.
///
/// # Errors
///
/// - [`Error::TransactionInPool`] if an earlier user had left one of the two connections in a transaction. The connection is
///   discarded, and nothing of that transaction is committed.
/// - [`Error::Pool`], [`Error::Database`] and [`Error::NoRuntime`].
///
/// # Examples
///
/// ```
/// use diesel_interlock::Sessions;
/// use diesel_interlock::asynchronous::probe_sessions;
///
/// # let database = workbench::Database::new();
/// # let pool = database.deadpool(2);
/// # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// if probe_sessions(&pool).await? == Sessions::Shared {
///     eprintln!("connect past the pooler, or use transaction locks and semaphores only");
/// }
/// # Ok::<(), diesel_interlock::Error>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub async fn probe_sessions<P: Pool>(pool: &P) -> Result<Sessions> {
    runtime::current()?;
    let mut conn = pool::check_out(pool, None).await?;
    let other = match pool::try_check_out(pool).await {
        Some(other) => Ok(other),
        // bb8 opens a second connection only for a caller that waits.
        None => pool::check_out(pool, Some(PATIENCE)).await,
    };
    match other {
        Ok(mut other) => compare_on(&mut conn, &mut other).await,
        Err(_) => Ok(Sessions::Unknown),
    }
}

/// Refuses a connection whose session is shared. The result is remembered for the connection and for the one that it was
/// compared with.
///
/// An error of the comparison is none of the lock's, because the statement that takes the lock fails by itself on a connection
/// that is closed.
pub(crate) async fn require_own<P: Pool>(
    pool: &P,
    conn: &mut CheckedOut<P::Connection>,
) -> Result<()> {
    let Some(opened_at) = conn.opened_at() else {
        return Ok(());
    };
    let sessions = match KNOWN.of(opened_at) {
        Some(sessions) => sessions,
        None => find_out(pool, conn, opened_at).await?,
    };
    match sessions {
        Sessions::Shared => Err(Error::SharedSessions),
        Sessions::Own | Sessions::Unknown => Ok(()),
    }
}

async fn find_out<P: Pool>(
    pool: &P,
    conn: &mut AsyncPgConnection,
    opened_at: Instant,
) -> Result<Sessions> {
    if pool.size() < 2 || Asynchronous::pooled(conn).transaction() != Transaction::None {
        return Ok(Sessions::Unknown);
    }
    let Some(mut other) = pool::try_check_out(pool).await else {
        return Ok(Sessions::Unknown);
    };
    let others_opened_at = other.opened_at();
    let sessions = match others_opened_at.and_then(|opened_at| KNOWN.of(opened_at)) {
        Some(sessions) => sessions,
        None => {
            let compared = compare_on(conn, &mut other).await;
            drop(other);
            match compared {
                Ok(sessions) => sessions,
                Err(error) => {
                    let mut session = Asynchronous::pooled(conn);
                    if session.transaction() != Transaction::None {
                        if let Error::TransactionInPool = error {
                            return Err(error);
                        }
                        // The probe marked a connection that is closed. The take finds that out, and tries another one.
                        session.clear_mark();
                    }
                    Sessions::Unknown
                }
            }
        }
    };
    if sessions != Sessions::Unknown {
        KNOWN.remember(opened_at, sessions);
        if let Some(opened_at) = others_opened_at {
            KNOWN.remember(opened_at, sessions);
        }
    }
    Ok(sessions)
}

async fn compare_on(
    conn: &mut AsyncPgConnection,
    other: &mut AsyncPgConnection,
) -> Result<Sessions> {
    compare(
        &mut Asynchronous::pooled(conn),
        &mut Asynchronous::pooled(other),
    )
    .await
}

/// What is known of the connections of this process, by when they were opened. A pool of diesel-async has no place for it in
/// a connection.
struct Known(Mutex<BTreeMap<Instant, Sessions>>);

static KNOWN: Known = Known(Mutex::new(BTreeMap::new()));

impl Known {
    /// The connections that are remembered. Beyond it the oldest one is forgotten, and tested again if it is still open.
    const LIMIT: usize = 4096;

    fn of(&self, opened_at: Instant) -> Option<Sessions> {
        lock(&self.0).get(&opened_at).copied()
    }

    fn remember(&self, opened_at: Instant, sessions: Sessions) {
        let mut known = lock(&self.0);
        known.insert(opened_at, sessions);
        if known.len() > Self::LIMIT {
            known.pop_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_connection_is_forgotten_first() {
        let known = Known(Mutex::new(BTreeMap::new()));
        let first = Instant::now();
        let opened_at = |at: usize| first + Duration::from_nanos(at as u64);
        for at in 0..=Known::LIMIT {
            known.remember(opened_at(at), Sessions::Own);
        }
        assert_eq!(known.of(first), None);
        assert_eq!(known.of(opened_at(1)), Some(Sessions::Own));
        assert_eq!(known.of(opened_at(Known::LIMIT)), Some(Sessions::Own));
        assert_eq!(lock(&known.0).len(), Known::LIMIT);
    }
}
