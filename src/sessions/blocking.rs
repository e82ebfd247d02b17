//! The check of the sessions behind an r2d2 pool.

use diesel::pg::PgConnection;

use super::{Sessions, compare};
use crate::error::{Error, Result};
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::{Blocking, now};
use crate::transaction::{self, Transaction};

/// Tests whether the connections of the pool have their own server sessions.
///
/// Call it when a program starts. The methods of [`AdvisoryLock`](crate::AdvisoryLock) that take a pool run the same test,
/// once per connection, and return [`Error::SharedSessions`].
///
/// It takes two connections from the pool, compares their `pg_backend_pid()`, and compares again while a transaction is open
/// on one of them: six round trips. The transaction is rolled back, at the latest after five seconds
/// (`idle_in_transaction_session_timeout`). A busy pooler can pass this test by chance. In that case a later operation returns
/// [`Error::SessionMoved`].
///
/// # Blocking
///
/// Waits for the first connection as long as the pool's `connection_timeout` allows. The second connection must be idle. But
/// r2d2 tests a connection at its check-out (`test_on_check_out`, on by default). If a NAT or a firewall has silently dropped
/// that connection, the test waits as any other check-out does: as long as the connection string's `tcp_user_timeout` and
/// `keepalives_*` settings allow. Without them this takes minutes, so set them if such a device may be in between.
///
/// # Errors
///
/// - [`Error::TransactionInPool`] if an earlier user had left one of the two connections in a transaction. The connection is
///   discarded, and nothing of that transaction is committed.
/// - [`Error::Pool`] and [`Error::Database`].
///
/// # Examples
///
/// ```
/// use diesel_interlock::{Sessions, probe_sessions};
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// if probe_sessions(&pool)? == Sessions::Shared {
///     eprintln!("connect past the pooler, or use transaction locks and semaphores only");
/// }
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn probe_sessions(pool: &PgPool) -> Result<Sessions> {
    let mut conn = pool::check_out(pool, None)?;
    match pool.try_get() {
        Some(mut other) => compare_now(&mut conn, &mut other),
        None => Ok(Sessions::Unknown),
    }
}

/// Refuses a connection whose session is shared. The result is stored with the connection and with those that were compared
/// with it.
pub(crate) fn require_own(pool: &PgPool, conn: &mut PooledPgConnection) -> Result<()> {
    let sessions = match stored(conn) {
        Some(sessions) => sessions,
        None => find_out(pool, conn)?,
    };
    match sessions {
        Sessions::Shared => Err(Error::SharedSessions),
        Sessions::Own | Sessions::Unknown => Ok(()),
    }
}

/// Returns an error of the connection itself, but none of the connection that it is compared with.
fn find_out(pool: &PgPool, conn: &mut PooledPgConnection) -> Result<Sessions> {
    if pool.max_size() < 2 || transaction::of(conn) != Transaction::None {
        return Ok(Sessions::Unknown);
    }
    let Some(mut other) = pool.try_get() else {
        return Ok(Sessions::Unknown);
    };
    let sessions = match stored(&other) {
        Some(sessions) => sessions,
        None => match compare_now(conn, &mut other) {
            Err(error) if transaction::of(conn) != Transaction::None => return Err(error),
            compared => compared.unwrap_or(Sessions::Unknown),
        },
    };
    if sessions != Sessions::Unknown {
        PooledPgConnection::extensions_mut(conn).insert(sessions);
        PooledPgConnection::extensions_mut(&mut other).insert(sessions);
    }
    Ok(sessions)
}

fn stored(conn: &PooledPgConnection) -> Option<Sessions> {
    PooledPgConnection::extensions(conn).get().copied()
}

fn compare_now(conn: &mut PgConnection, other: &mut PgConnection) -> Result<Sessions> {
    now(compare(
        &mut Blocking::pooled(conn),
        &mut Blocking::pooled(other),
    ))
}
