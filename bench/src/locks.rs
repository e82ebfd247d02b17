//! Session locks, taken and released.

use diesel::sql_types::BigInt;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};
use diesel_interlock::{AdvisoryLock, LockKey, deadpool};

use crate::Bench;
use crate::compare::{tasks, threads};
use crate::pgbench::{Mode, pgbench};
use crate::report::Report;
use crate::server::pool;

const PAIR: &str = "SELECT pg_try_advisory_lock(1000 + :client_id);\nSELECT pg_advisory_unlock(1000 + :client_id);\n";

/// Beside the two statements of bare libpq, which is `pgbench`.
pub(crate) fn blocking(bench: &Bench, report: &mut Report) {
    let database = bench.server.cluster().database();
    for number in [1, 8] {
        let pool = pool(&database, number);
        let ours = threads(number, |thread| {
            let (pool, lock) = (
                pool.clone(),
                AdvisoryLock::new(LockKey::bigint(thread as i64)),
            );
            move || {
                let guard = lock.try_acquire(&pool).expect("the lock can be tried");
                let guard = guard.acquired().expect("nobody else wants it");
                guard.release().expect("it is held");
            }
        });
        let libpq = pgbench(bench, &database, number, Mode::Prepared, "", PAIR);
        let work = "session lock, take and release / the two statements by libpq";
        report.row(work, number, Some(0.85), ours, libpq);
    }
}

diesel::define_sql_function!(fn pg_try_advisory_lock(key: BigInt) -> Bool);
diesel::define_sql_function!(fn pg_advisory_unlock(key: BigInt) -> Bool);

/// Beside the same two statements by diesel-async, on a connection without a pool.
pub(crate) fn asynchronous(bench: &Bench, report: &mut Report) {
    let database = bench.server.cluster().database();
    for number in [1, 8] {
        let _entered = workbench::runtime().enter();
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(database.url());
        let pool = deadpool::PgPool::builder(manager)
            .max_size(number)
            .build()
            .expect("the settings of the pool are complete");
        let make = |task| {
            (
                pool.clone(),
                deadpool::AdvisoryLock::new(LockKey::bigint(task as i64)),
            )
        };
        let ours = tasks(number, make, async |(pool, lock)| {
            let guard = lock
                .try_acquire(&pool)
                .await
                .expect("the lock can be tried");
            let guard = guard.acquired().expect("nobody else wants it");
            guard.release().await.expect("it is held");
            (pool, lock)
        });
        let connect = |task| {
            let conn = workbench::block_on(AsyncPgConnection::establish(&database.url()));
            (
                conn.expect("the server accepts connections"),
                1000 + task as i64,
            )
        };
        let by_hand = tasks(number, connect, async |(mut conn, key)| {
            let take = diesel::select(pg_try_advisory_lock(key));
            assert!(
                take.get_result::<bool>(&mut conn)
                    .await
                    .expect("it can be tried")
            );
            let release = diesel::select(pg_advisory_unlock(key));
            assert!(
                release
                    .get_result::<bool>(&mut conn)
                    .await
                    .expect("it is held")
            );
            (conn, key)
        });
        let work = "session lock, take and release, async / the two statements by diesel-async";
        report.row(work, number, Some(0.9), ours, by_hand);
    }
}
