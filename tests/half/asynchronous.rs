//! The half of the crate under test: the asynchronous one, over the pool that the test program's
//! module `pool` chooses.
//!
//! A file of the suite takes from here what differs between the halves: the handles and their pool,
//! [`wait`], the macros `reply!` and `work!`, and [`execute`]. Tests stay plain functions: each
//! operation is driven from the thread of the test, on one runtime of the process.
#![allow(dead_code, unused_imports)] // each crate uses a part

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
// Without the handles, which come from the pool's module.
pub(crate) use diesel_interlock::{
    Admission, Attempt, Check, Decision, DeclaredResources, Done, Error, Full, LocalCheck, LockId,
    LockKey, Pool, Quota, Result, Stop, ThrottledResource, check_exclusion, migrations, monitor,
    prune, schedule, schema, throttled_resources,
};
use workbench::Database;
pub(crate) use workbench::block_on;

pub(crate) use crate::pool::*;

pub(crate) type Conn = AsyncPgConnection;

/// Whether the release of a dropped guard or permit is left to a task, so it may come a moment
/// later.
pub(crate) const IS_ASYNC: bool = true;

/// The result of an operation.
pub(crate) fn wait<T>(reply: impl Future<Output = T>) -> T {
    block_on(reply)
}

/// The result of an operation inside `work!`.
#[macro_export]
macro_rules! reply {
    ($reply:expr) => {
        $reply.await
    };
}

/// The work of a tick that records its token.
#[macro_export]
macro_rules! work_of_tick {
    ($token:expr) => {
        |tick: $crate::half::Tick| {
            *$token.lock().unwrap() = tick.fencing_token();
            async { Ok::<_, $crate::half::Error>(()) }
        }
    };
}

/// A closure for `with`, `transaction`, `run`: `work!(|conn| { reply!(execute(conn, "…"))?; Ok(())
/// })`.
#[macro_export]
macro_rules! work {
    (|| $body:expr) => {
        async || $body
    };
    (|$($argument:pat_param),*| $body:expr) => {
        async |$($argument),*| $body
    };
}

pub(crate) fn make_pool(url: &str, size: u32, patience: Duration) -> PgPool {
    let _entered = workbench::runtime().enter();
    make(url, size, patience)
}

/// A pool of at most `size` connections.
pub(crate) fn pool(database: &Database, size: u32) -> PgPool {
    make_pool(&database.url(), size, Duration::from_secs(20))
}

/// Runs SQL on a connection.
pub(crate) async fn execute(conn: &mut Conn, sql: &str) -> QueryResult<()> {
    conn.batch_execute(sql).await
}

/// Checks all connections of the pool out, and runs SQL on each.
pub(crate) async fn on_all(pool: &PgPool, sql: &str) -> QueryResult<()> {
    let mut all = Vec::new();
    for _ in 0..max_size(pool) {
        all.push(get(pool).await);
    }
    for conn in &mut all {
        conn.batch_execute(sql).await?;
    }
    Ok(())
}

/// Runs the pending migrations of an application on a connection of its own.
pub(crate) fn run_pending(url: &str, own: crate::support::Own) -> Result<Vec<String>> {
    block_on(async {
        let conn = Conn::establish(url).await.unwrap();
        migrations::run_pending(conn, own).await
    })
}

/// Checks one connection out, and runs `work` with it, on the thread of the test.
pub(crate) fn on_one<T>(pool: &PgPool, work: impl FnOnce(&mut Conn) -> T) -> T {
    let mut conn = block_on(get(pool));
    let worked = work(&mut conn);
    let _entered = workbench::runtime().enter();
    drop(conn);
    worked
}

/// Checks one connection out, and runs SQL on it.
pub(crate) async fn on_first(pool: &PgPool, sql: &str) -> QueryResult<()> {
    get(pool).await.batch_execute(sql).await
}

/// A pool that does not test its connections.
pub(crate) fn unchecked_pool(database: &workbench::Endpoint, size: u32) -> PgPool {
    let _entered = workbench::runtime().enter();
    unchecked(database, size)
}

/// Opens a transaction through Diesel.
pub(crate) fn begin(conn: &mut Conn) {
    use diesel_async::{AnsiTransactionManager, TransactionManager};
    block_on(AnsiTransactionManager::begin_transaction(conn)).unwrap();
}

/// As [`begin`], inside `work!`.
pub(crate) async fn begin_inside(conn: &mut Conn) -> QueryResult<()> {
    use diesel_async::{AnsiTransactionManager, TransactionManager};
    AnsiTransactionManager::begin_transaction(conn).await
}

pub(crate) fn begin_test(conn: &mut Conn) {
    block_on(AsyncConnection::begin_test_transaction(conn)).unwrap();
}

/// Rolls back a transaction that Diesel has opened.
pub(crate) fn end(conn: &mut Conn) {
    use diesel_async::{AnsiTransactionManager, TransactionManager};
    block_on(AnsiTransactionManager::rollback_transaction(conn)).unwrap();
}

/// Polls a future up to `times` times, then drops it if it is not ready.
pub(crate) async fn polled<T>(times: usize, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut polls) = (pin!(future), 0);
    poll_fn(|context| {
        if polls == times {
            return Poll::Ready(None);
        }
        polls += 1;
        match future.as_mut().poll(context) {
            Poll::Pending if polls == times => Poll::Ready(None),
            reply => reply.map(Some),
        }
    })
    .await
}

/// Runs a future in a runtime of one thread, where no reply arrives within a poll, however the
/// threads are scheduled.
pub(crate) fn block_on_one_thread<F: Future>(future: F) -> F::Output {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.enable_all().build().unwrap().block_on(future)
}

/// Drives a loop on a thread during `meanwhile`, then drops it.
fn beside<T>(looping: impl Future<Output = ()> + Send, meanwhile: impl FnOnce() -> T) -> T {
    let (ends, ended) = tokio::sync::oneshot::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            block_on(async {
                tokio::select! {
                    () = looping => panic!("the loop has ended"),
                    _ = ended => {}
                }
            });
        });
        let _ends = ends;
        meanwhile()
    })
}

/// Is a candidate during `meanwhile`. Each election calls `elected` with the token, and each term
/// lasts until it is lost.
pub(crate) fn while_it_leads<T>(
    leader: &Leader,
    pool: &PgPool,
    elected: impl Fn(u64) + Send + Sync,
    meanwhile: impl FnOnce() -> T,
) -> T {
    let leads = async {
        let led = leader.lead(pool, |term| {
            elected(term.fencing_token() as u64);
            std::future::pending()
        });
        match led.await.unwrap() {}
    };
    beside(leads, meanwhile)
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
    let runs = async {
        let work = |tick: Tick| async move {
            if work(tick.attempt() as usize) {
                std::future::pending::<()>().await;
            }
            Ok::<_, Error>(())
        };
        schedule.run(pool, next, work).await.unwrap();
    };
    beside(runs, meanwhile)
}
