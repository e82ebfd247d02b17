//! Whether the connections of a pool have their own server sessions, or share them behind a pooler in transaction mode,
//! where session locks are unsafe.
//!
//! No reply of the server shows this, so the behaviour is tested. An idle pooler gives every connection the session that was
//! used last. Only a transaction that is open on another connection prevents that, or a session that the pooler has just opened.

#[cfg(feature = "async")]
pub(crate) mod asynchronous;
#[cfg(feature = "r2d2")]
mod blocking;

use diesel::prelude::*;
use diesel::sql_types::Integer;

#[cfg(feature = "r2d2")]
pub use self::blocking::probe_sessions;
#[cfg(feature = "r2d2")]
pub(crate) use self::blocking::require_own;
use crate::error::Result;
use crate::session::{OwnTransaction, Probe, Session, Statement, one_outside_leftovers};
use crate::transaction::Transaction;

/// What is known of the server sessions behind the connections of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[must_use = "only the value says whether connections share sessions"]
#[non_exhaustive]
pub enum Sessions {
    /// Each connection has its own session, as far as two of them show.
    Own,
    /// The connections share sessions: a pooler in transaction mode is in between.
    Shared,
    /// Nothing was compared: the pool had no second connection, none could be opened in time, or it was in a transaction.
    Unknown,
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
    let mut transaction = OwnTransaction::begin(other).await?;
    let compared = compare_in_transaction(session, transaction.session(), before.pid).await;
    let rolled_back = transaction.roll_back().await;
    let sessions = compared?;
    rolled_back?;
    if sessions != Sessions::Own {
        return Ok(sessions);
    }
    // If the pooler opened a session meanwhile, the two connections may have been told apart by chance, because a new session
    // is the next one to be used. Now the next one is the session that the transaction had.
    let last: Pid = session.one(backend_pid()).await?;
    Ok(own_if(last.pid == before.pid))
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
    Ok(own_if(after.pid == before))
}

fn own_if(is_unchanged: bool) -> Sessions {
    if is_unchanged {
        Sessions::Own
    } else {
        Sessions::Shared
    }
}

#[derive(Debug, QueryableByName)]
struct Pid {
    #[diesel(sql_type = Integer)]
    pid: i32,
}

// Neither statement is prepared, because a pooler may prepare it on one session and execute it on another.

fn backend_pid() -> impl Probe<Pid> {
    diesel::sql_query("SELECT pg_catalog.pg_backend_pid() AS pid")
}

/// If this is the only session of a pooler, a connection that waits for it gets it when this transaction has ended.
fn occupy_session() -> impl Statement<Pid> {
    diesel::sql_query(
        "SELECT pg_catalog.pg_backend_pid() AS pid, \
         pg_catalog.set_config('idle_in_transaction_session_timeout', '5s', true)",
    )
}
