//! Synchronization over a pool and on a connection, asynchronous.

use diesel_async::AsyncPgConnection;

use super::{LOCK, Synced, add_missing, compare, log, overwrite};
use crate::advisory::asynchronous::AdvisoryLock;
use crate::error::Result;
use crate::pool::asynchronous::{self as pool, Pool};
use crate::runtime;
use crate::session::{Asynchronous, Session};
use crate::throttle::DeclaredResources;
use crate::throttle::rules::{self, Declared};
use crate::transaction;

/// Inserts the declared resources that the database does not have, through a connection from the pool. Returns what it
/// inserted, and which intervals differ.
///
/// As `sync` of the blocking half. Call it at every start of a program. If the future is dropped, each resource that was
/// inserted stays.
///
/// # Errors
///
/// As in the blocking half, and those of [`AdvisoryLock::acquire`](crate::asynchronous::AdvisoryLock::acquire).
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{asynchronous, throttled_resources};
///
/// throttled_resources! {
///     enum Resource {
///         CacheRebuild = "cache rebuild" every Duration::from_secs(15),
///     }
/// }
///
/// # let database = workbench::Database::new();
/// # let pool = database.deadpool(2);
/// # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// # asynchronous::migrations::install(&pool).await?;
/// let synced = asynchronous::sync::<Resource>(&pool).await?;
/// assert_eq!(synced.added, ["cache rebuild"]);
/// # Ok::<(), diesel_interlock::Error>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub async fn sync<R: DeclaredResources>(pool: &impl Pool) -> Result<Synced> {
    let synced = insert_missing::<R>(pool).await?;
    log(&synced.different);
    Ok(synced)
}

/// As [`sync`], on the given connection.
///
/// # Errors
///
/// As [`sync`].
pub async fn sync_on<R: DeclaredResources>(conn: &mut AsyncPgConnection) -> Result<Synced> {
    let synced = insert_missing_on::<R>(conn).await?;
    log(&synced.different);
    Ok(synced)
}

/// Does the same as [`sync`], and then overwrites the intervals that differ with the declared ones. It returns those as
/// `different` and does not log them.
///
/// # Errors
///
/// As [`sync`].
pub async fn sync_intervals<R: DeclaredResources>(pool: &impl Pool) -> Result<Synced> {
    let synced = insert_missing::<R>(pool).await?;
    if !synced.different.is_empty() {
        // Under the lock, because its acquisition refuses a connection on which an earlier user left a transaction open.
        let mut guard = lock().acquire(pool).await?;
        overwrite(&mut Asynchronous::lent(guard.conn()), &synced.different).await?;
        guard.release().await?;
    }
    Ok(synced)
}

/// As [`sync_intervals`], on the given connection.
///
/// # Errors
///
/// As [`sync`].
pub async fn sync_intervals_on<R: DeclaredResources>(
    conn: &mut AsyncPgConnection,
) -> Result<Synced> {
    let synced = insert_missing_on::<R>(conn).await?;
    overwrite(&mut Asynchronous::lent(conn), &synced.different).await?;
    Ok(synced)
}

async fn insert_missing<R: DeclaredResources>(pool: &impl Pool) -> Result<Synced> {
    let declared = rules::declared::<R>()?;
    runtime::current()?;
    let mut conn = pool::check_out(pool, None).await?;
    let (is_complete, synced) = look(&mut Asynchronous::pooled(&mut conn), &declared).await?;
    drop(conn);
    if is_complete {
        return Ok(synced);
    }
    let mut guard = lock().acquire(pool).await?;
    let synced = add_missing(&mut Asynchronous::lent(guard.conn()), &declared).await?;
    guard.release().await?;
    Ok(synced)
}

async fn insert_missing_on<R: DeclaredResources>(conn: &mut AsyncPgConnection) -> Result<Synced> {
    let declared = rules::declared::<R>()?;
    let (is_complete, synced) = look(&mut Asynchronous::lent(conn), &declared).await?;
    if is_complete {
        return Ok(synced);
    }
    let mut guard = lock().acquire_on(conn).await?;
    let synced = add_missing(&mut Asynchronous::lent(guard.conn()), &declared).await?;
    guard.release().await?;
    Ok(synced)
}

/// Returns whether the database has all declared resources, and what differs.
async fn look<S: Session>(session: &mut S, declared: &[Declared]) -> Result<(bool, Synced)> {
    transaction::refuse_any(session.transaction())?;
    let (missing, synced) = compare(session, declared).await?;
    Ok((missing.is_empty(), synced))
}

fn lock() -> AdvisoryLock {
    LOCK.clone().into()
}
