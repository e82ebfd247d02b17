//! A lock that is lost while its guard exists.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel_async::pooled_connection::deadpool::Pool as DeadPool;
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod,
};
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool};
use diesel_interlock::{Error, LockKey};
use tokio::time::timeout;
use workbench::Database;

use crate::dropping::{KEY, NOBODY, Observer};
use crate::run;
use crate::transactions::count;

static LOCK: AdvisoryLock = AdvisoryLock::new(LockKey::bigint(KEY));

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(150);
const OFTEN: Duration = Duration::from_millis(10);

fn terminate(pid: i32) -> String {
    format!("SELECT pg_terminate_backend({pid})")
}

async fn life_of_a_watch<P: Pool>(database: Database, pool: P) {
    let observer = &mut Observer::of(&database);

    // The end of the session is reported, and nothing else.
    let mut guard = LOCK.acquire(&pool).await.unwrap();
    assert!(timeout(SHORT, guard.lost()).await.is_err());
    let notify = "LISTEN x; NOTIFY x";
    guard.conn().batch_execute(notify).await.unwrap();
    assert!(timeout(SHORT, guard.lost()).await.is_err());
    assert!(guard.is_held().await.unwrap());
    let watch = guard.watch(&pool, OFTEN).await.unwrap();
    assert!(watch.is_held_within(LONG) && !watch.is_lost());
    assert!(timeout(SHORT, watch.lost()).await.is_err());
    let now = Instant::now();
    let confirmed_again = async {
        while watch.last_confirmed() >= now.elapsed() {
            tokio::time::sleep(OFTEN).await;
        }
    };
    timeout(LONG, confirmed_again).await.unwrap();
    observer.execute(&terminate(guard.backend_pid()));
    timeout(LONG, guard.lost()).await.unwrap();
    timeout(LONG, guard.lost()).await.unwrap();
    timeout(LONG, watch.lost()).await.unwrap();
    assert!(watch.is_lost() && !watch.is_held_within(Duration::MAX));
    assert!(matches!(guard.release().await, Err(Error::LockLost { .. })));

    // A watch finds an unlock by other code.
    let mut guard = LOCK.acquire(&pool).await.unwrap();
    let watch = guard.watch(&pool, OFTEN).await.unwrap();
    let unlock = "SELECT pg_advisory_unlock_all()";
    guard.conn().batch_execute(unlock).await.unwrap();
    timeout(LONG, watch.lost()).await.unwrap();
    let late = guard.watch(&pool, OFTEN).await.unwrap();
    assert!(late.is_lost());
    assert!(matches!(guard.release().await, Err(Error::LockLost { .. })));

    // A release is no loss, by whichever way.
    for drops in [false, true] {
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        let watch = guard.watch(&pool, OFTEN).await.unwrap();
        if drops {
            drop(guard);
        } else {
            guard.release().await.unwrap();
        }
        assert!(!watch.is_held_within(Duration::MAX));
        assert!(timeout(SHORT, watch.lost()).await.is_err());
        assert!(!watch.is_lost());
    }

    // The release finds the loss first, because the watch finds no idle connection.
    let mut guard = LOCK.acquire(&pool).await.unwrap();
    let others = (
        pool.check_out().await.unwrap(),
        pool.check_out().await.unwrap(),
    );
    let watch = guard.watch(&pool, LONG).await.unwrap();
    guard.conn().batch_execute(unlock).await.unwrap();
    assert!(!watch.is_lost());
    drop(guard);
    timeout(LONG, watch.lost()).await.unwrap();
    drop(others);
    tokio::task::block_in_place(|| observer.until(NOBODY, LONG));
}

#[test]
fn a_guard_and_its_watch_report_a_loss_with_deadpool() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(3);
        life_of_a_watch(database, pool).await;
    });
}

#[test]
fn a_guard_and_its_watch_report_a_loss_with_bb8() {
    run(async {
        let database = Database::new();
        let pool = database.bb8(3);
        life_of_a_watch(database, pool).await;
    });
}

#[test]
fn a_session_that_ends_during_the_query_holds_nothing() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(1);
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        let pid = guard.backend_pid();
        // The query reads `pg_locks`, and waits.
        let locker = &mut database.connect();
        SimpleConnection::batch_execute(locker, "BEGIN; LOCK TABLE pg_catalog.pg_locks").unwrap();
        let query = tokio::spawn(async move { guard.is_held().await });
        let waits = format!("SELECT count(*) FROM pg_locks WHERE pid = {pid} AND NOT granted");
        while count(locker, &waits) == 0 {
            tokio::time::sleep(OFTEN).await;
        }
        SimpleConnection::batch_execute(locker, &terminate(pid)).unwrap();
        assert!(!query.await.unwrap().unwrap());
    });
}

#[test]
fn the_task_of_a_watch_queries_after_the_first_interval() {
    run(async {
        let database = Database::new();
        let [lock, rare, often] = [(); 3].map(|()| database.deadpool(1));
        let mut guard = LOCK.acquire(&lock).await.unwrap();
        let _rare = guard.watch(&rare, 100 * LONG).await.unwrap();
        let _often = guard.watch(&often, OFTEN).await.unwrap();
        // A pool opens its connection for the first query.
        while often.status().size == 0 {
            tokio::time::sleep(OFTEN).await;
        }
        assert_eq!(rare.status().size, 0);
        guard.release().await.unwrap();
    });
}

#[test]
fn a_connection_made_of_a_bare_client_reports_its_end_within_a_second_or_two() {
    run(async {
        let database = Database::new();
        let url = database.async_url();
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls)
            .await
            .unwrap();
        tokio::spawn(connection);
        let conn = &mut AsyncPgConnection::try_from(client).await.unwrap();
        let mut guard = LOCK.acquire_on(conn).await.unwrap();
        // Inside a transaction a pool would take it for broken.
        use diesel_async::AsyncConnection;
        let transaction = guard
            .conn()
            .transaction(async |conn| conn.batch_execute("SELECT pg_sleep(0.4)").await);
        assert!(timeout(SHORT, transaction).await.is_err());
        let began = Instant::now();
        assert!(
            timeout(Duration::from_millis(1500), guard.lost())
                .await
                .is_err()
        );
        Observer::of(&database).execute(&terminate(guard.backend_pid()));
        timeout(LONG, guard.lost()).await.unwrap();
        assert!(began.elapsed() < LONG);
    });
}

/// Panics as many times as it is told to, when it is asked for an idle connection.
#[derive(Clone)]
struct Panics<P>(P, Arc<AtomicU32>);

impl<P: Pool> Pool for Panics<P> {
    type Connection = P::Connection;

    async fn check_out(&self) -> Result<Self::Connection, Error> {
        self.0.check_out().await
    }

    async fn try_check_out(&self) -> Option<Self::Connection> {
        let left = |left: u32| left.checked_sub(1);
        if self.1.fetch_update(SeqCst, SeqCst, left).is_ok() {
            std::panic::resume_unwind(Box::new("of the pool"));
        }
        self.0.try_check_out().await
    }

    fn size(&self) -> u32 {
        self.0.size()
    }
}

#[test]
fn a_watch_outlives_a_pool_that_panics() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let pool = Panics(database.deadpool(2), Arc::default());
    let panics = Arc::clone(&pool.1);
    run(async move {
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        let watch = guard.watch(&pool, OFTEN).await.unwrap();
        panics.store(1, SeqCst);
        timeout(LONG, async {
            while panics.load(SeqCst) > 0 {
                tokio::time::sleep(OFTEN).await;
            }
        })
        .await
        .unwrap();
        observer.execute(&terminate(guard.backend_pid()));
        timeout(LONG, watch.lost()).await.unwrap();
    });
}

/// A connection takes longer to open than a watch waits in the queue for one.
#[test]
fn a_watch_waits_until_its_connection_is_open() {
    run(async {
        let database = Database::new();
        let mut config = ManagerConfig::default();
        config.recycling_method = RecyclingMethod::Fast;
        config.custom_setup = Box::new(|url| {
            let url = url.to_owned();
            Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(1300)).await;
                AsyncPgConnection::establish(&url).await
            })
        });
        let url = database.async_url();
        let manager = AsyncDieselConnectionManager::new_with_config(url, config);
        let pool = DeadPool::builder(manager).max_size(3).build().unwrap();
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        // Opened for the comparison of sessions.
        let _idle = pool.get().await.unwrap();
        let watch = guard.watch(&pool, OFTEN).await.unwrap();
        let begun = Instant::now();
        timeout(LONG, async {
            while watch.last_confirmed() >= begun.elapsed() {
                tokio::time::sleep(OFTEN).await;
            }
        })
        .await
        .unwrap();
        guard.release().await.unwrap();
    });
}

#[test]
fn a_watch_whose_lock_was_released_takes_no_connection() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(1);
        let mut guard = LOCK.acquire(&pool).await.unwrap();
        let watch = guard.watch(&pool, OFTEN).await.unwrap();
        while pool.status().waiting == 0 {
            tokio::time::sleep(OFTEN).await;
        }
        guard.release().await.unwrap();
        while pool.status().waiting > 0 || pool.status().available == 0 {
            tokio::time::sleep(OFTEN).await;
        }
        // The release is the last that was sent on the only connection.
        let released = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_advisory_unlock%' \
             AND datname = current_database() AND pid <> pg_backend_pid()";
        assert_eq!(count(&mut database.connect(), released), 1);
        assert!(!watch.is_lost());
    });
}
