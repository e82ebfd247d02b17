//! The half of the crate under test: the blocking one, over r2d2. Which manager, the crate's `pool`
//! says.
//!
//! A file of the suite takes from here what differs between the halves: the handles and their pool,
//! [`wait`], the macros `reply!` and `work!`, and [`execute`].
#![allow(dead_code, unused_imports)] // each crate uses a part

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::r2d2::Pool;
// Everything but the handles, which are those of the pool.
#[cfg(feature = "metrics")]
pub(crate) use diesel_interlock::describe_metrics;
#[cfg(feature = "testing")]
pub(crate) use diesel_interlock::testing;
pub(crate) use diesel_interlock::{
    Admission, Attempt, Blocking, Check, ConnectionOf, Decision, DeclaredResources, Done, Error,
    Full, LocalCheck, LockId, LockKey, Mode, PoolConnection, Quota, Reply, Result, Stop,
    ThrottledResource, advisory, check_exclusion, drain, fence, leader, migrations, monitor, once,
    prune, rate_limit, schedule, schema, semaphore, throttle, throttled_resources,
};
use workbench::Database;

pub(crate) use crate::pool::*;

pub(crate) type Conn = PgConnection;

/// Whether the release of a dropped guard or permit is left to a task, so it may come a moment
/// later.
pub(crate) const IS_ASYNC: bool = false;

/// The result of an operation.
pub(crate) fn wait<T>(reply: T) -> T {
    reply
}

/// The result of an operation inside `work!`.
#[macro_export]
macro_rules! reply {
    ($reply:expr) => {
        $reply
    };
}

/// The work of a tick that records its token.
#[macro_export]
macro_rules! work_of_tick {
    ($token:expr) => {
        |tick: &$crate::half::Tick| {
            *$token.lock().unwrap() = tick.fencing_token();
            Ok::<_, $crate::half::Error>(())
        }
    };
}

/// A closure for `with`, `transaction`, `run`: `work!(|conn| { reply!(execute(conn, "…"))?; Ok(())
/// })`.
#[macro_export]
macro_rules! work {
    (|| $body:expr) => {
        || $body
    };
    (|$($argument:pat_param),*| $body:expr) => {
        |$($argument),*| $body
    };
}

pub(crate) fn make_pool(url: &str, size: u32, patience: Duration) -> PgPool {
    Pool::builder()
        .max_size(size)
        .min_idle(Some(0))
        .connection_timeout(patience)
        .build_unchecked(manager(url))
}

/// A pool of at most `size` connections.
pub(crate) fn pool(database: &Database, size: u32) -> PgPool {
    make_pool(&database.url(), size, Duration::from_secs(20))
}

/// Runs SQL on a connection.
pub(crate) fn execute(conn: &mut Conn, sql: &str) -> QueryResult<()> {
    conn.batch_execute(sql)
}

/// Takes a connection.
fn get(pool: &PgPool) -> impl std::ops::DerefMut<Target = Conn> + use<> {
    crate::support::patiently(|| pool.get().map_err(|error| Error::Pool(error.into())))
}

/// Checks all connections of the pool out, and runs SQL on each.
pub(crate) fn on_all(pool: &PgPool, sql: &str) -> QueryResult<()> {
    let mut all: Vec<_> = (0..pool.max_size()).map(|_| get(pool)).collect();
    all.iter_mut().try_for_each(|conn| conn.batch_execute(sql))
}

/// Checks one connection out, and runs `work` with it.
pub(crate) fn on_one<T>(pool: &PgPool, work: impl FnOnce(&mut Conn) -> T) -> T {
    work(&mut get(pool))
}

/// Runs the pending migrations of an application on a connection of its own.
pub(crate) fn run_pending(url: &str, own: crate::support::Own) -> Result<Vec<String>> {
    migrations::run_pending(&mut PgConnection::establish(url).unwrap(), own)
}

/// Checks one connection out, and runs SQL on it.
pub(crate) fn on_first(pool: &PgPool, sql: &str) -> QueryResult<()> {
    get(pool).batch_execute(sql)
}

/// A pool that does not test its connections, unless nothing else notices that they are broken.
pub(crate) fn unchecked_pool(database: &workbench::Endpoint, size: u32) -> PgPool {
    Pool::builder()
        .max_size(size)
        .test_on_check_out(!NOTICES_BROKEN)
        .build(manager(&database.url()))
        .unwrap()
}

/// Opens a transaction through Diesel.
pub(crate) fn begin(conn: &mut Conn) {
    use diesel::connection::{AnsiTransactionManager, TransactionManager};
    AnsiTransactionManager::begin_transaction(conn).unwrap();
}

/// As [`begin`], inside `work!`.
pub(crate) fn begin_inside(conn: &mut Conn) -> QueryResult<()> {
    use diesel::connection::{AnsiTransactionManager, TransactionManager};
    AnsiTransactionManager::begin_transaction(conn)
}

pub(crate) fn begin_test(conn: &mut Conn) {
    use diesel::Connection;
    conn.begin_test_transaction().unwrap();
}

/// Rolls back a transaction that Diesel has opened.
pub(crate) fn end(conn: &mut Conn) {
    use diesel::connection::{AnsiTransactionManager, TransactionManager};
    AnsiTransactionManager::rollback_transaction(conn).unwrap();
}

/// Ends the loops of a test, also after a panic.
struct Ends(Stop);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Is a candidate during `meanwhile`. Each election calls `elected` with the token, and each term
/// lasts until it is lost.
pub(crate) fn while_it_leads<T>(
    leader: &Leader,
    pool: &PgPool,
    elected: impl Fn(u64) + Sync,
    meanwhile: impl FnOnce() -> T,
) -> T {
    let stop = Stop::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let led = leader.lead(pool, &stop, |term| {
                elected(term.fencing_token() as u64);
                term.pause(Duration::MAX);
            });
            led.unwrap();
        });
        let _ends = Ends(stop.clone());
        meanwhile()
    })
}

/// Runs the ticks of a schedule during `meanwhile`. A run gets its attempt, and returns whether it
/// lasts until it is lost.
pub(crate) fn while_it_runs<T>(
    schedule: &Schedule,
    pool: &PgPool,
    next: &(impl Fn(chrono::DateTime<chrono::Utc>) -> Option<chrono::DateTime<chrono::Utc>> + Sync),
    work: &(impl Fn(usize) -> bool + Sync),
    meanwhile: impl FnOnce() -> T,
) -> T {
    let stop = Stop::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ran = schedule.run(pool, &stop, next, |tick| {
                if work(tick.attempt() as usize) {
                    tick.wait_for_loss(Duration::MAX);
                }
                Ok::<_, Error>(())
            });
            ran.unwrap();
        });
        let _ends = Ends(stop.clone());
        meanwhile()
    })
}
