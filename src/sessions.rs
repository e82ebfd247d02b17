//! Whether the connections of a pool have server sessions of their own, or share them behind a pooler
//! in transaction mode, where session locks are unsafe.
//!
//! Nothing in an answer tells, so it is found out by behaviour. A quiet pooler gives every connection
//! the session that was used last; only a transaction that is open on another connection keeps it
//! from that.

use diesel::connection::Connection;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::result::Error as DieselError;
use diesel::sql_types::Integer;

use crate::error::{Error, Result};
use crate::pool::{PgPool, PooledPgConnection};
use crate::session::sent as send;
use crate::transaction::{self, Transaction};

/// What is known of the server sessions behind the connections of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Sessions {
    /// Nothing speaks against it that each connection has one of its own.
    Own,
    /// The connections share them: a pooler in transaction mode is in between.
    Shared,
    /// It takes two connections to find out, and the pool had no second one to give.
    Unknown,
}

/// Finds out whether the connections of the pool have server sessions of their own.
///
/// For the start of a program. The forms of [`AdvisoryLock`](crate::AdvisoryLock) that take a pool ask
/// by themselves, once per connection, and answer [`Error::SharedSessions`].
///
/// Takes two connections out of the pool, compares `pg_backend_pid()`, and compares again while a
/// transaction is open on one of them: six round trips. The transaction is rolled back, at the latest after
/// five seconds (`idle_in_transaction_session_timeout`). A busy pooler may hide itself from that by chance;
/// [`Error::SessionMoved`] is what tells then.
///
/// # Blocking
///
/// Waits for the first connection as long as the pool is set to wait. Of the second, it only takes one that
/// is idle; but r2d2 tests a connection as it hands it out (`test_on_check_out`, on by default). On an idle
/// connection that a NAT or a firewall has dropped silently, that test waits as any other check-out does: as
/// long as `tcp_user_timeout` and the `keepalives_*` settings of the connection string allow. Without them
/// this takes minutes, so set them where such a device may be in between.
///
/// # Errors
///
/// - [`Error::TransactionInPool`] if somebody had left one of the two connections in a transaction. The
///   connection is discarded, and nothing of that transaction is committed.
/// - [`Error::Pool`], [`Error::Database`].
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
    let mut conn = crate::pool::check_out(pool, None)?;
    match pool.try_get() {
        Some(mut other) => compare(&mut conn, &mut other),
        None => Ok(Sessions::Unknown),
    }
}

/// Refuses a connection whose session is shared. What was found out is kept with the connection, and
/// handed on to those that are compared with it.
pub(crate) fn require_own(pool: &PgPool, conn: &mut PooledPgConnection) -> Result<()> {
    let known = recall(conn);
    let sessions = match known {
        Some(sessions) => sessions,
        None => find_out(pool, conn)?,
    };
    match sessions {
        Sessions::Shared => Err(Error::SharedSessions),
        Sessions::Own | Sessions::Unknown => Ok(()),
    }
}

/// Fails only for the connection itself, not for the one that it is compared with.
fn find_out(pool: &PgPool, conn: &mut PooledPgConnection) -> Result<Sessions> {
    if pool.max_size() < 2 || transaction::of(conn) != Transaction::None {
        return Ok(Sessions::Unknown);
    }
    let Some(mut other) = pool.try_get() else {
        return Ok(Sessions::Unknown);
    };
    let sessions = match recall(&other) {
        Some(sessions) => sessions,
        None => match compare(conn, &mut other) {
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

fn recall(conn: &PooledPgConnection) -> Option<Sessions> {
    PooledPgConnection::extensions(conn).get().copied()
}

/// A connection that somebody left in a transaction stays marked, so that the pool discards it.
fn compare(conn: &mut PgConnection, other: &mut PgConnection) -> Result<Sessions> {
    if transaction::of(other) != Transaction::None {
        return Ok(Sessions::Unknown);
    }
    let before = transaction::refuse_left_open(conn, backend_pid)?;
    if transaction::refuse_left_open(other, backend_pid)? == before {
        return Ok(Sessions::Shared);
    }
    let mut sessions = Sessions::Unknown;
    let ended = other.transaction(|other| -> Result<()> {
        let occupied = occupy_session(other)?;
        // Were it the same, the second question would wait for this transaction to end.
        let moved = occupied == before || backend_pid(conn)? != before;
        sessions = if moved {
            Sessions::Shared
        } else {
            Sessions::Own
        };
        Err(DieselError::RollbackTransaction.into())
    });
    match ended {
        Err(Error::Database(DieselError::RollbackTransaction)) => Ok(sessions),
        Err(error) => Err(error),
        Ok(()) => Ok(sessions),
    }
}

#[derive(QueryableByName)]
struct Session {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

// Neither is prepared: a pooler may have it prepared on one session and executed on another.

fn backend_pid(conn: &mut PgConnection) -> Result<i32> {
    let session: Session = send(conn, |conn| {
        diesel::sql_query("SELECT pg_catalog.pg_backend_pid() AS pid").get_result(conn)
    })?;
    Ok(session.pid)
}

/// Were this the pooler's only session, whoever waits for it would get it when this has ended.
fn occupy_session(conn: &mut PgConnection) -> QueryResult<i32> {
    let session: Session = diesel::sql_query(
        "SELECT pg_catalog.pg_backend_pid() AS pid, \
         pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)",
    )
    .get_result(conn)?;
    Ok(session.pid)
}
