//! Futures that are dropped after so many polls, and the observer that looks for what they left.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_async::SimpleAsyncConnection;
use diesel_interlock::asynchronous::Pool;
use workbench::Database;

/// The key of the lock whose futures are dropped.
pub(crate) const KEY: i64 = 4711;

/// Polls a future so many times and drops it. Returns its output if it completed.
pub(crate) async fn poll_times<F: Future>(future: F, times: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut polls = 0;
    poll_fn(|context| {
        if polls == times {
            return Poll::Ready(None);
        }
        polls += 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == times => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// How many futures to drop of each kind.
pub(crate) fn drops() -> usize {
    let drops = std::env::var("DIESEL_INTERLOCK_DROPS");
    drops.map_or(100, |drops| drops.parse().unwrap())
}

#[derive(QueryableByName, Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Requests {
    #[diesel(sql_type = BigInt)]
    pub(crate) granted: i64,
    #[diesel(sql_type = BigInt)]
    pub(crate) waiting: i64,
}

pub(crate) const NOBODY: Requests = Requests {
    granted: 0,
    waiting: 0,
};
pub(crate) const ONE_HOLDER: Requests = Requests {
    granted: 1,
    waiting: 0,
};

/// A session of its own, which looks at `pg_locks`.
pub(crate) struct Observer(PgConnection);

impl Observer {
    pub(crate) fn of(database: &Database) -> Self {
        Self(database.connect())
    }

    pub(crate) fn requests(&mut self) -> Requests {
        let query = format!(
            "SELECT count(*) FILTER (WHERE granted) AS granted, \
             count(*) FILTER (WHERE NOT granted) AS waiting FROM pg_locks \
             WHERE locktype = 'advisory' AND objid = {KEY} AND database = \
             (SELECT oid FROM pg_database WHERE datname = current_database())"
        );
        diesel::sql_query(query).get_result(&mut self.0).unwrap()
    }

    /// Waits until the requests are as expected. Returns how long that took.
    ///
    /// What was sent last may not have arrived yet. A lock that it leaves is found by the next look, because it stays, or by the
    /// next statement on the same connection. So the last look of a test comes when all connections have been used again.
    #[track_caller]
    pub(crate) fn until(&mut self, expected: Requests, limit: Duration) -> Duration {
        let began = Instant::now();
        loop {
            let (seen, took) = (self.requests(), began.elapsed());
            if seen == expected {
                return took;
            }
            assert!(
                took < limit,
                "{seen:?} after {limit:?}, and not {expected:?}"
            );
            // The pause between two looks, so that they do not occupy the server.
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    pub(crate) fn execute(&mut self, sql: &str) {
        diesel::sql_query(sql).execute(&mut self.0).unwrap();
    }
}

/// Takes all connections of a pool at once, each of which works.
pub(crate) async fn assert_full_strength<P: Pool>(pool: &P, size: usize) {
    let mut conns = Vec::new();
    for _ in 0..size {
        let conn = tokio::time::timeout(Duration::from_secs(60), pool.check_out()).await;
        let mut conn = conn.expect("the pool is at full strength").unwrap();
        conn.batch_execute("SAVEPOINT s").await.unwrap_err();
        conn.batch_execute("SELECT 1").await.unwrap();
        conns.push(conn);
    }
}
