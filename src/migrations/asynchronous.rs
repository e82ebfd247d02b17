//! Migrations over a pool and on a connection, asynchronous.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use diesel::migration::{MigrationSource, MigrationVersion};
use diesel::pg::Pg;
use diesel_async::AsyncPgConnection;
use diesel_async::async_connection_wrapper::AsyncConnectionWrapper;

use super::diesels_table;
use super::install::run_missing;
use super::ours::{LOCK, Recorded};
use super::run_each::run_each;
use super::uninstall::revert_all;
use crate::advisory::asynchronous::{
    AdvisoryLock, AdvisoryLockGuard, GuardConnection, PooledGuard,
};
use crate::error::{Error, Result};
use crate::pool::asynchronous::{self as pool, Pool};
use crate::runtime;
use crate::session::{Asynchronous, Session};
use crate::transaction;

type Versions = Vec<MigrationVersion<'static>>;

/// Installs this crate's schema `resource_control`, or updates it, through a connection from the pool. Returns the versions
/// that it ran or recorded.
///
/// As `install` of the blocking half. Call it at every start of a program.
///
/// # Errors
///
/// As in the blocking half, and those of [`AdvisoryLock::acquire`].
///
/// # Examples
///
/// ```
/// use diesel_interlock::asynchronous::migrations;
///
/// # let database = workbench::Database::new();
/// # let pool = database.deadpool(2);
/// # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// migrations::install(&pool).await?; // at start-up, before anything is throttled or claimed
/// # assert!(migrations::install(&pool).await?.is_empty());
/// # Ok::<(), diesel_interlock::Error>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub async fn install<P: Pool>(pool: &P) -> Result<Versions> {
    runtime::current()?;
    let mut conn = pool::check_out(pool, None).await?;
    let is_installed = is_installed(&mut Asynchronous::pooled(&mut conn)).await?;
    drop(conn);
    if is_installed {
        return Ok(Vec::new());
    }
    let mut guard = lock().acquire_without_snapshot(pool).await?;
    let ran = run_missing(&mut Asynchronous::lent(guard.conn())).await;
    released(guard, ran).await
}

/// As [`install`], on the given connection.
///
/// # Errors
///
/// As [`install`].
pub async fn install_on(conn: &mut AsyncPgConnection) -> Result<Versions> {
    if is_installed(&mut Asynchronous::lent(conn)).await? {
        return Ok(Vec::new());
    }
    let mut guard = lock().acquire_without_snapshot_on(conn).await?;
    let ran = run_missing(&mut Asynchronous::lent(guard.conn())).await;
    released(guard, ran).await
}

/// Drops this crate's schema `resource_control` with all of this crate's objects, through a connection from the pool. Returns
/// the versions that it reverted, the newest first.
///
/// As `uninstall` of the blocking half.
///
/// # Errors
///
/// As in the blocking half, and those of [`AdvisoryLock::acquire`].
pub async fn uninstall<P: Pool>(pool: &P) -> Result<Versions> {
    let mut guard = lock().acquire_without_snapshot(pool).await?;
    let reverted = revert(guard.conn()).await;
    released(guard, reverted).await
}

/// As [`uninstall`], on the given connection.
///
/// # Errors
///
/// As [`uninstall`].
pub async fn uninstall_on(conn: &mut AsyncPgConnection) -> Result<Versions> {
    transaction::refuse_any(Asynchronous::lent(conn).transaction())?;
    let mut guard = lock().acquire_without_snapshot_on(conn).await?;
    let reverted = revert(guard.conn()).await;
    released(guard, reverted).await
}

/// Changes from copied files to [`install`], through a connection from the pool. Returns the versions that it removed.
///
/// As `take_over` of the blocking half.
///
/// # Errors
///
/// As in the blocking half, and those of [`AdvisoryLock::acquire`].
pub async fn take_over<P: Pool>(pool: &P) -> Result<Versions> {
    let mut guard = lock().acquire_without_snapshot(pool).await?;
    let forgotten = forget(guard.conn()).await;
    released(guard, forgotten).await
}

/// As [`take_over`], on the given connection.
///
/// # Errors
///
/// As [`take_over`].
pub async fn take_over_on(conn: &mut AsyncPgConnection) -> Result<Versions> {
    transaction::refuse_any(Asynchronous::lent(conn).transaction())?;
    let mut guard = lock().acquire_without_snapshot_on(conn).await?;
    let forgotten = forget(guard.conn()).await;
    released(guard, forgotten).await
}

/// Runs the application's pending migrations, on one instance at a time. Returns the versions that it ran.
///
/// As `run_pending` of the blocking half. If nothing is pending, it sends no DDL. Otherwise it takes the session lock [`LOCK`]
/// on a connection from the pool, and Diesel's harness runs the migrations on that connection, on a thread of tokio's
/// `spawn_blocking`. It works in every kind of runtime.
///
/// # Dropped futures
///
/// Migrations that have begun go on if the future is dropped, until all are run or one fails. Then the lock is released.
///
/// # Errors
///
/// As in the blocking half, and those of [`AdvisoryLock::acquire`]. The lock is released after an error, too.
///
/// # Panics
///
/// If a migration panics. The lock has been released.
///
/// # Examples
///
/// ```
/// use diesel_interlock::asynchronous::migrations;
/// use diesel_migrations::FileBasedMigrations;
///
/// # let database = workbench::Database::new();
/// # let pool = database.deadpool(2);
/// # let directory = std::env::temp_dir().join(format!("async-migrations-{}", std::process::id()));
/// # let one = directory.join("2026-01-01-000000_create_users");
/// # std::fs::create_dir_all(&one)?;
/// # std::fs::write(one.join("up.sql"), "CREATE TABLE users (id int)")?;
/// # std::fs::write(one.join("down.sql"), "DROP TABLE users")?;
/// # let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
/// # runtime.block_on(async {
/// let source = FileBasedMigrations::from_path(&directory)?; // or embed_migrations!()
/// let ran = migrations::run_pending(&pool, source).await?;
/// # assert_eq!(ran.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// # })?;
/// # std::fs::remove_dir_all(&directory)?;
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub async fn run_pending<P, S>(pool: &P, source: S) -> Result<Versions>
where
    P: Pool,
    S: MigrationSource<Pg> + Send + 'static,
{
    let runtime = runtime::current()?;
    let reading = runtime.spawn_blocking(move || {
        let all = versions(&source);
        (source, all)
    });
    let (source, all) = finished(reading.await)?;
    let all = all?;
    let mut conn = pool::check_out(pool, None).await?;
    let ran = recorded(&mut Asynchronous::pooled(&mut conn)).await?;
    drop(conn);
    if ran.is_some_and(|ran| all.is_subset(&ran)) {
        return Ok(Vec::new());
    }
    let guard = lock().acquire_without_snapshot(pool).await?;
    let running = runtime.spawn_blocking(move || {
        let mut conn = AsyncConnectionWrapper::<_>::from(Guarded::<P>(guard));
        let ran = catch_unwind(AssertUnwindSafe(|| run_each(&mut conn, source)));
        (conn.into_inner().0, ran)
    });
    let (guard, ran) = finished(running.await)?;
    match ran {
        Ok(ran) => released(guard, ran).await,
        Err(panic) => {
            // The panic counts. What is left in doubt is settled by the release.
            let _ = guard.release().await;
            resume_unwind(panic)
        }
    }
}

/// The connection of a guard, for Diesel's harness, which needs a connection that it owns.
struct Guarded<P: Pool>(PooledGuard<P>);

impl<P: Pool> Deref for Guarded<P> {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        self.0.conn_ref()
    }
}

impl<P: Pool> DerefMut for Guarded<P> {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        self.0.conn()
    }
}

/// Returns what a blocking task returned. Its panic goes on here.
fn finished<T>(joined: std::result::Result<T, tokio::task::JoinError>) -> Result<T> {
    joined.map_err(|error| match error.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        // The runtime is shutting down.
        Err(_) => Error::NoRuntime,
    })
}

fn versions(source: &impl MigrationSource<Pg>) -> Result<BTreeSet<String>> {
    let all = source.migrations().map_err(Error::Migration)?;
    Ok(all
        .iter()
        .map(|migration| migration.name().version().to_string())
        .collect())
}

/// Returns the versions in Diesel's table, or `None` if there is no such table.
async fn recorded<S: Session>(session: &mut S) -> Result<Option<BTreeSet<String>>> {
    transaction::refuse_any(session.transaction())?;
    let Some(table) = diesels_table::find(session).await? else {
        return Ok(None);
    };
    let versions = diesels_table::versions(session, &table).await?;
    Ok(Some(versions.into_iter().collect()))
}

async fn is_installed<S: Session>(session: &mut S) -> Result<bool> {
    transaction::refuse_any(session.transaction())?;
    let recorded = Recorded::of(session).await?;
    let is_pending = recorded.pending().next().is_some();
    Ok(!is_pending)
}

async fn revert(conn: &mut AsyncPgConnection) -> Result<Versions> {
    let session = &mut Asynchronous::lent(conn);
    transaction::refuse_any(session.transaction())?;
    revert_all(session).await
}

async fn forget(conn: &mut AsyncPgConnection) -> Result<Versions> {
    let session = &mut Asynchronous::lent(conn);
    transaction::refuse_any(session.transaction())?;
    diesels_table::forget_ours(session).await
}

/// Releases the lock, after an error too.
async fn released<C: GuardConnection, T>(
    guard: AdvisoryLockGuard<C>,
    outcome: Result<T>,
) -> Result<T> {
    let released = guard.release().await;
    let value = outcome?;
    released?;
    Ok(value)
}

fn lock() -> AdvisoryLock {
    LOCK.clone().into()
}
