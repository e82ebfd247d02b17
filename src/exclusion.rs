//! Do session locks exclude on this pool?
//!
//! **No check for each connection.** Whether session locks exclude depends on how a program reaches
//! its server, so `check_exclusion` checks it once per program. It compares the sessions of two
//! connections. It does not try a session lock, because behind a pooler that lock could stay on a
//! session that other clients use.

use std::time::{Duration, Instant};

use diesel::result::{DatabaseErrorKind, Error as DieselError, QueryResult};
use diesel::sql_types::{Bool, Integer, Nullable};

use crate::error::{Error, Result};
use crate::mode::Mode;
use crate::pool::{Checkout, Pool, Reply};
use crate::session::{Session, classify};
use crate::statement::{Statement, is_elsewhere};
use crate::transaction::Own;

/// What was found, and the remedy.
const ONE_SESSION: &str = "two connections have the same server session, so a pooler in \
     transaction mode is in between: connect past it, or use `AdvisoryLock::transaction`, or a \
     semaphore of one slot";
const MOVED: &str = "the statements of one connection run on several server sessions, so a pooler \
     in transaction mode is in between: connect past it, or use `AdvisoryLock::transaction`, or a \
     semaphore of one slot";
const NOT_PREPARED: &str = "the server does not know the statement that the connection has \
     prepared, or has it already, so a pooler in transaction mode without prepared statements is \
     in between: connect past it, or use PgBouncer 1.21 or later with max_prepared_statements, and \
     `AdvisoryLock::transaction` or a semaphore of one slot instead of session locks";
const NO_LOCKS: &str = "two transactions got the same lock, so the advisory locks of this server \
     do nothing: use a semaphore of one slot, or a server where they work";

/// How many questions the two connections are asked in all. Five found PgBouncer 59 or 60 of 60
/// times, and ten always.
const QUESTIONS: usize = 10;

/// How long the second connection is waited for. In a pool without a timeout, two callers that each
/// hold one connection and wait for a second one would otherwise wait for ever.
const PATIENCE: Duration = Duration::from_secs(30);

/// Checks that session locks exclude on this pool.
///
/// First it asks two connections in turn which server session they have: `SELECT pg_backend_pid()`,
/// ten times. If one connection has several sessions, or both have the same, a pooler in
/// transaction mode is in between. Then each connection tries the same lock in a transaction of its
/// own, by `pg_try_advisory_xact_lock`. If neither is refused, the advisory locks of the server do
/// nothing. The check takes no session lock, leaves nothing behind and disturbs nobody.
///
/// Call it once at the start of a program that uses session locks.
/// [`migrations::install`](crate::migrations::install) calls it, too, and logs a warning. The pool
/// must have two connections or more; the check waits for the second one for 30 seconds at most.
/// Sixteen round trips.
///
/// # Errors
///
/// [`Error::NotExclusive`] with what was found and what to do, [`Error::Input`] for a pool of one,
/// [`Error::TimedOut`], [`Error::Standby`], [`Error::Pool`], [`Error::DirtyConnection`],
/// [`Error::NoRuntime`] and [`Error::Database`].
///
/// ```
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// diesel_interlock::check_exclusion(&pool)?;
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn check_exclusion<P: Pool>(pool: &P) -> Reply<'_, P, ()> {
    P::Mode::drive(check(pool, PATIENCE))
}

/// As [`check_exclusion`], but waits for the second connection no longer than `patience`.
pub(crate) async fn check<P: Pool>(pool: &P, patience: Duration) -> Result<()> {
    if pool.max_size() < 2 {
        return Err(Error::input(
            "`check_exclusion` compares two connections: give it a pool of two or more",
        ));
    }
    let mut first = Checkout::new(pool, None).await?;
    let deadline = Some(Instant::now() + patience);
    let second = P::Mode::within(deadline, Checkout::new(pool, deadline)).await;
    let mut second = match second.unwrap_or(Err(Error::TimedOut)) {
        Ok(second) => second,
        Err(error) => {
            first.give_back();
            return Err(error);
        }
    };
    let compared = compare(first.conn(), second.conn()).await;
    first.give_back();
    second.give_back();
    compared
}

async fn compare<S: Session>(first: &mut S, second: &mut S) -> Result<()> {
    // The sessions come first: behind a pooler with a single session, a second transaction would
    // wait for ever.
    let mut pids = [0; 2];
    for question in 0..QUESTIONS {
        // The first connection is asked twice at the beginning, because a pooler with few sessions
        // may hand them out in turn, too.
        let i = usize::from(question >= 2 && question % 2 == 0);
        let conn = if i == 0 { &mut *first } else { &mut *second };
        let pid = backend_pid(conn).await?;
        if pids[i] != 0 && pids[i] != pid {
            return Err(Error::NotExclusive(MOVED));
        }
        pids[i] = pid;
        if pids[0] == pids[1] {
            return Err(Error::NotExclusive(ONE_SESSION));
        }
    }
    let number = fastrand::i64(..);
    let first = Own::begin_pooled(first).await?;
    let is_first = try_lock(first.conn, number).await;
    let both = match is_first {
        Ok(true) => {
            let second = Own::begin_pooled(second).await?;
            let is_second = try_lock(second.conn, number).await;
            second.end(is_second).await
        }
        // `false`: somebody else holds just this number, so locks do exclude.
        is_first => is_first,
    };
    match first.end(both).await {
        Ok(true) => Err(Error::NotExclusive(NO_LOCKS)),
        Ok(false) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The statement is volatile, so that a pooler that reads elsewhere sends it to the server where it
/// sends locks.
async fn backend_pid<S: Session>(conn: &mut S) -> Result<i32> {
    const BACKEND_PID: &str = "SELECT CASE WHEN pg_catalog.clock_timestamp() IS NOT NULL \
         THEN pg_catalog.pg_backend_pid() END AS pid";
    match conn.one(&Statement::<Integer>::new(BACKEND_PID, [])).await {
        Ok(pid) => Ok(pid),
        Err(error) if is_of_a_prepared_statement(&error) => Err(Error::NotExclusive(NOT_PREPARED)),
        Err(error) => Err(classify(conn, error).await),
    }
}

async fn try_lock<S: Session>(conn: &mut S, number: i64) -> Result<bool> {
    const TRY: &str = concat!(
        "SELECT CASE WHEN NOT (",
        is_elsewhere!(),
        ") THEN pg_catalog.pg_try_advisory_xact_lock($1) END AS is_taken"
    );
    let tried = Statement::<(Nullable<Bool>,)>::new(TRY, [number.into()]);
    let reply: QueryResult<(Option<bool>,)> = conn.one(&tried).await;
    match reply {
        Ok((is_taken,)) => is_taken.ok_or(Error::Standby),
        Err(error) => Err(classify(conn, error).await),
    }
}

/// Whether an error is about a prepared statement, for which Diesel has no kind.
fn is_of_a_prepared_statement(error: &DieselError) -> bool {
    let DieselError::DatabaseError(DatabaseErrorKind::Unknown, report) = error else {
        return false;
    };
    let message = report.message();
    // Diesel's and tokio-postgres' names, in a message of any language: "__diesel_stmt_0", "s12".
    let mut quoted = message.split('"').skip(1).step_by(2);
    let is_name = |name: &str| {
        let number = name.strip_prefix('s').unwrap_or_default();
        name.starts_with("__diesel_stmt_")
            || !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    message.contains("prepared statement") || quoted.any(is_name)
}
