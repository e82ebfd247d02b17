//! The pool under test as a blocking one.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use diesel::connection::{InstrumentationEvent, SimpleConnection};
use diesel_interlock::asynchronous::{Pool, PoolConnection};
use diesel_interlock::{Error, Result};
use ref_cast::RefCast;
use workbench::RoundTrips;

use super::{Database, PgConnection, block_on, runtime};
use crate::{AsyncPool, make_pool};

/// How long a checkout waits, as in the pools of the blocking half.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a pool does with a connection.
#[derive(Debug, Clone)]
pub(super) enum Setup {
    /// It is lent as it is.
    Unchecked,
    /// It is lent after a round trip, if its session has not ended.
    Checked,
    /// As [`Checked`](Self::Checked), and it runs this when it is opened.
    Runs(String),
    /// As [`Checked`](Self::Checked), and it has this instrumentation.
    Instrumented(fn(InstrumentationEvent<'_>)),
    /// As [`Checked`](Self::Checked), and it is in a test transaction.
    InTestTransaction,
}

#[derive(Clone)]
pub(crate) struct PgPool {
    pub(super) pool: AsyncPool,
    size: u32,
    patience: Duration,
    is_checked: bool,
}

impl PgPool {
    pub(super) fn of(database: &Database, size: u32) -> Self {
        pool_with_patience(database, size, PATIENCE)
    }

    fn new(url: &str, size: u32, patience: Duration, setup: Setup) -> Self {
        let _entered = runtime().enter();
        let is_checked = !matches!(setup, Setup::Unchecked);
        let manager = super::database::manager(url, setup);
        Self {
            pool: make_pool(manager, size, patience, is_checked),
            size,
            patience,
            is_checked,
        }
    }

    pub(crate) fn max_size(&self) -> u32 {
        self.size
    }

    pub(crate) fn get(&self) -> Result<PooledPgConnection> {
        self.get_timeout(self.patience)
    }

    /// As r2d2 does, discards the connections whose sessions have ended.
    pub(crate) fn get_timeout(&self, timeout: Duration) -> Result<PooledPgConnection> {
        let end = Instant::now() + timeout;
        loop {
            let remaining = end.saturating_duration_since(Instant::now());
            let conn = block_on(async {
                match tokio::time::timeout(remaining, self.pool.check_out()).await {
                    Ok(checked_out) => checked_out,
                    Err(elapsed) => Err(Error::Pool(elapsed.into())),
                }
            });
            let conn = match conn {
                // The pool's own patience is shorter.
                Err(Error::Pool(_)) if Instant::now() < end => continue,
                conn => conn?,
            };
            let mut conn = PooledPgConnection(Some(conn));
            if !self.is_checked || conn.batch_execute("").is_ok() {
                return Ok(conn);
            }
            conn.discard();
        }
    }
}

impl fmt::Debug for PgPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgPool").finish_non_exhaustive()
    }
}

/// A connection out of the pool, to which it goes back when it is dropped.
pub(crate) struct PooledPgConnection(Option<<AsyncPool as Pool>::Connection>);

impl PooledPgConnection {
    fn discard(mut self) {
        let _entered = runtime().enter();
        if let Some(conn) = self.0.take() {
            conn.discard();
        }
    }
}

impl Deref for PooledPgConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        PgConnection::ref_cast(self.0.as_ref().expect("only a drop takes it"))
    }
}

impl DerefMut for PooledPgConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        PgConnection::ref_cast_mut(self.0.as_mut().expect("only a drop takes it"))
    }
}

impl Drop for PooledPgConnection {
    fn drop(&mut self) {
        // A pool may spawn a task when it takes a connection back.
        let _entered = runtime().enter();
        drop(self.0.take());
    }
}

impl fmt::Debug for PooledPgConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledPgConnection").finish_non_exhaustive()
    }
}

/// A pool over the proxy whose checkout sends nothing, so that only the round trips of the crate are counted.
pub(crate) fn silent_pool(proxy: &RoundTrips, size: u32) -> PgPool {
    unchecked_pool(&proxy.url(), size, PATIENCE)
}

/// A pool whose connections are not checked, and from which a checkout waits for at most `patience`.
pub(crate) fn unchecked_pool(url: &str, size: u32, patience: Duration) -> PgPool {
    PgPool::new(url, size, patience, Setup::Unchecked)
}

/// As [`unchecked_pool`], and tells how often it had no connection to give in time, if somebody always asks.
pub(crate) fn unchecked_pool_and_timeouts(
    url: &str,
    size: u32,
    patience: Duration,
) -> (PgPool, impl Fn() -> u32 + Send + Sync + use<>) {
    let began = Instant::now();
    let timeouts = move || (began.elapsed().as_secs_f64() / patience.as_secs_f64()) as u32;
    (unchecked_pool(url, size, patience), timeouts)
}

/// A pool from which a checkout waits for at most `patience`.
pub(crate) fn pool_with_patience(database: &Database, size: u32, patience: Duration) -> PgPool {
    PgPool::new(&database.url(), size, patience, Setup::Checked)
}

/// A pool each of whose connections runs `sql` when it is opened.
pub(crate) fn pool_that_runs(database: &Database, size: u32, sql: &str) -> PgPool {
    PgPool::new(&database.url(), size, PATIENCE, Setup::Runs(sql.to_owned()))
}

/// A pool each of whose connections has this instrumentation.
pub(crate) fn instrumented_pool(
    database: &Database,
    size: u32,
    instrumentation: fn(InstrumentationEvent<'_>),
) -> PgPool {
    let setup = Setup::Instrumented(instrumentation);
    PgPool::new(&database.url(), size, PATIENCE, setup)
}

/// A pool each of whose connections is in a test transaction.
pub(crate) fn pool_in_test_transactions(database: &Database, size: u32) -> PgPool {
    PgPool::new(&database.url(), size, PATIENCE, Setup::InTestTransaction)
}

/// How many connections of the pool are not in use.
pub(crate) fn idle_connections(pool: &PgPool) -> u32 {
    crate::idle_connections(&pool.pool)
}
