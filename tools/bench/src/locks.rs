//! Session locks, taken and released.

use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod,
};
use diesel_async::{AsyncPgConnection, RunQueryDsl as AsyncRunQueryDsl};
use diesel_interlock::{AdvisoryLock, LockKey, deadpool};
use workbench::Database;

use crate::Bench;
use crate::compare::{Boxed, tasks, threads};
use crate::pgbench::{Mode, pgbench};
use crate::report::Report;
use crate::server::{pool, url};

diesel::define_sql_function!(fn pg_try_advisory_lock(key: BigInt) -> Bool);
diesel::define_sql_function!(fn pg_advisory_unlock(key: BigInt) -> Bool);

const PAIR: &str = "SELECT pg_try_advisory_lock(1000 + :client_id);
SELECT pg_advisory_unlock(1000 + :client_id);
";

/// Beside the two statements by hand through the same pool, and beside libpq, which is `pgbench`.
pub(crate) fn blocking(bench: &Bench, report: &mut Report) {
    let database = bench.server.cluster().database();
    for (number, aim) in [(1, 1.0), (8, 0.95)] {
        let work = "session lock, take and release / by hand with Diesel";
        let (ours, hand) = (pairs(&database, number), by_hand(&database, number));
        report.row(work, number, Some(aim), ours, hand);
        let work = "session lock, take and release / the two statements by libpq";
        let libpq = pgbench(bench, &database, number, Mode::Prepared, "", PAIR);
        report.row(work, number, None, pairs(&database, number), libpq);
    }
}

/// Threads that take and release, each a lock of its own.
pub(crate) fn pairs(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    threads(number, |thread| {
        let pool = pool.clone();
        let lock = AdvisoryLock::new(LockKey::bigint(thread as i64));
        move || {
            let guard = lock.try_acquire(&pool).expect("the lock can be tried");
            let guard = guard.acquired().expect("nobody else wants it");
            guard.release().expect("it is held");
        }
    })
}

/// The same without the crate.
fn by_hand(database: &Database, number: usize) -> Boxed {
    let pool = pool(database, number);
    threads(number, |thread| {
        let (pool, key) = (pool.clone(), 1000 + thread as i64);
        move || {
            let conn = &mut pool.get().expect("the pool has a connection");
            let take = diesel::select(pg_try_advisory_lock(key));
            let is_taken = RunQueryDsl::get_result::<bool>(take, conn);
            assert!(is_taken.expect("the server replies"));
            let release = diesel::select(pg_advisory_unlock(key));
            let is_released = RunQueryDsl::get_result::<bool>(release, conn);
            assert!(is_released.expect("the server replies"));
        }
    })
}

/// The same in tasks, through deadpool.
pub(crate) fn asynchronous(bench: &Bench, report: &mut Report) {
    let database = bench.server.cluster().database();
    for number in [1, 8] {
        let work = "session lock, take and release, async / by hand with diesel-async";
        let ours = async_pairs(&database, number);
        let hand = async_by_hand(&database, number);
        report.row(work, number, Some(0.95), ours, hand);
        let work = "session lock, take and release, async / the two statements by libpq";
        let libpq = pgbench(bench, &database, number, Mode::Prepared, "", PAIR);
        report.row(work, number, None, async_pairs(&database, number), libpq);
    }
}

pub(crate) fn async_pairs(database: &Database, number: usize) -> Boxed {
    let pool = async_pool(database, number);
    let make = |task| {
        let lock = deadpool::AdvisoryLock::new(LockKey::bigint(task as i64));
        (pool.clone(), lock)
    };
    tasks(number, make, async |(pool, lock)| {
        let guard = lock.try_acquire(&pool).await;
        let guard = guard.expect("the lock can be tried").acquired();
        let guard = guard.expect("nobody else wants it");
        guard.release().await.expect("it is held");
        (pool, lock)
    })
}

fn async_by_hand(database: &Database, number: usize) -> Boxed {
    let pool = async_pool(database, number);
    let make = |task| (pool.clone(), 1000 + task as i64);
    tasks(number, make, async |(pool, key)| {
        let mut conn = pool.get().await.expect("the pool has a connection");
        let take = diesel::select(pg_try_advisory_lock(key));
        let is_taken = AsyncRunQueryDsl::get_result::<bool>(take, &mut conn).await;
        assert!(is_taken.expect("the server replies"));
        let release = diesel::select(pg_advisory_unlock(key));
        let is_released = AsyncRunQueryDsl::get_result::<bool>(release, &mut conn).await;
        assert!(is_released.expect("the server replies"));
        drop(conn);
        (pool, key)
    })
}

/// A pool that does not test its connections.
fn async_pool(database: &Database, size: usize) -> deadpool::PgPool {
    let _entered = workbench::runtime().enter();
    let mut config = ManagerConfig::default();
    config.recycling_method = RecyclingMethod::Fast;
    let manager =
        AsyncDieselConnectionManager::<AsyncPgConnection>::new_with_config(url(database), config);
    deadpool::PgPool::builder(manager)
        .max_size(size)
        .build()
        .expect("the settings of the pool are complete")
}
