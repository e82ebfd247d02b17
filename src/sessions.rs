//! Whether the connections of a pool have their own server sessions, or share them behind a pooler in transaction mode,
//! where session locks are unsafe.
//!
//! No reply of the server shows this, so the behaviour is tested. An idle pooler gives every connection the session that was
//! used last. Only a transaction that is open on another connection prevents that.

use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::Integer;

use crate::error::{Error, Result};
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::{Blocking, Session, Statement, now, one_outside_leftovers};
use crate::transaction::{self, Transaction};

/// What is known of the server sessions behind the connections of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sessions {
    /// Each connection has its own session, as far as two of them show.
    Own,
    /// The connections share sessions: a pooler in transaction mode is in between.
    Shared,
    /// The test needs two connections, and the pool had no second one.
    Unknown,
}

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

/// A connection that an earlier user left in a transaction stays marked, so that the pool discards it.
async fn compare<S: Session>(session: &mut S, other: &mut S) -> Result<Sessions> {
    if other.transaction() != Transaction::None {
        return Ok(Sessions::Unknown);
    }
    let before: Pid = one_outside_leftovers(session, backend_pid()).await?;
    let others: Pid = one_outside_leftovers(other, backend_pid()).await?;
    if others.pid == before.pid {
        return Ok(Sessions::Shared);
    }
    other.begin().await?;
    let compared = compare_in_transaction(session, other, before.pid).await;
    let rolled_back = other.rollback().await;
    let sessions = compared?;
    rolled_back?;
    Ok(sessions)
}

async fn compare_in_transaction<S: Session>(
    session: &mut S,
    other: &mut S,
    before: i32,
) -> Result<Sessions> {
    let occupied: Pid = other.one(occupy_session()).await?;
    // If the other has the same session now, a query here would wait for its transaction to end.
    if occupied.pid == before {
        return Ok(Sessions::Shared);
    }
    let after: Pid = session.one(backend_pid()).await?;
    Ok(if after.pid == before {
        Sessions::Own
    } else {
        Sessions::Shared
    })
}

#[derive(Debug, QueryableByName)]
struct Pid {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

// Neither statement is prepared, because a pooler may prepare it on one session and execute it on another.

fn backend_pid() -> impl Statement<Pid> {
    diesel::sql_query("SELECT pg_catalog.pg_backend_pid() AS pid")
}

/// If this is the only session of a pooler, a connection that waits for it gets it when this transaction has ended.
fn occupy_session() -> impl Statement<Pid> {
    diesel::sql_query(
        "SELECT pg_catalog.pg_backend_pid() AS pid, \
         pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)",
    )
}
