//! Session locks over both pools and on a connection.

use std::sync::Arc;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel_async::SimpleAsyncConnection;
use diesel_async::pooled_connection::{RecyclingMethod, deadpool};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool, Semaphore};
use diesel_interlock::error::Misplaced;
use diesel_interlock::{Attempt, Error, migrations, monitor};
use tokio::task::JoinHandle;
use workbench::Database;

use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::named("x");
const LONG: Duration = Duration::from_secs(60);

fn holders(database: &Database) -> usize {
    let holders = monitor::holders().load::<monitor::Holder>(&mut database.connect());
    holders.unwrap().len()
}

async fn freed(database: &Database) {
    for _ in 0..1000 {
        if holders(database) == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("still held");
}

/// A wait ends with the error of its pool.
async fn assert_refused(wait: JoinHandle<Result<(), Error>>) {
    let ended = tokio::time::timeout(LONG, wait).await.unwrap();
    assert!(matches!(ended.unwrap(), Err(Error::Pool(_))));
}

#[test]
fn a_wait_for_a_slot_ends_when_its_pool_is_closed() {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let (pool, other) = (database.deadpool(1), database.deadpool(1));
    run(async move {
        let one = Semaphore::named("one", 1, Duration::from_secs(600));
        let _permit = one.acquire(&other).await.unwrap();
        let only = pool.get().await.unwrap();
        let slot = tokio::spawn({
            let pool = pool.clone();
            async move { one.acquire(&pool).await.map(drop) }
        });
        while pool.status().waiting == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        drop(only);
        // It has tried once, and tries again.
        while pool.status().available == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        pool.close();
        assert_refused(slot).await;
    });
}

#[test]
fn a_wait_for_a_lock_ends_when_its_pool_is_closed() {
    let database = Database::new();
    let (pool, other) = (database.deadpool(1), database.deadpool(1));
    run(async move {
        let _guard = LOCK.acquire(&other).await.unwrap();
        let waiter = tokio::spawn({
            let pool = pool.clone();
            async move { LOCK.acquire(&pool).await.map(drop) }
        });
        while pool.status().size == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        pool.close();
        assert_refused(waiter).await;
    });
}

#[test]
fn a_crowd_of_waiters_ends_when_its_pool_is_closed() {
    let database = Database::new();
    let (pool, other) = (database.deadpool(2), database.deadpool(1));
    run(async move {
        let _guard = LOCK.acquire(&other).await.unwrap();
        // One waits on the server, and the others have no connection.
        let waiters: Vec<_> = (0..8)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move { LOCK.acquire(&pool).await.map(drop) })
            })
            .collect();
        tokio::time::sleep(Duration::from_millis(300)).await;
        pool.close();
        for waiter in waiters {
            assert_refused(waiter).await;
        }
    });
}

#[test]
fn a_timeout_of_zero_costs_a_pool_that_checks_its_connections_none() {
    let database = Database::new();
    let manager = database.async_manager(RecyclingMethod::Verified);
    let pool = deadpool::Pool::builder(manager)
        .max_size(1)
        .build()
        .unwrap();
    run(async move {
        drop(pool.get().await.unwrap());
        let acquired = LOCK.acquire_timeout(&pool, Duration::ZERO).await.unwrap();
        let Attempt::Acquired(guard) = acquired else {
            panic!("nobody else is here");
        };
        guard.release().await.unwrap();
        assert_eq!(pool.status().size, 1);
    });
}

async fn life_of_a_lock<P: Pool>(database: Database, pool: P) {
    let Attempt::Acquired(mut guard) = LOCK.try_acquire(&pool).await.unwrap() else {
        panic!("nobody else is here");
    };
    assert_eq!(holders(&database), 1);
    assert!(guard.is_held().await.unwrap());
    assert!(LOCK.try_acquire(&pool).await.unwrap().is_busy());
    let timeout = Duration::from_millis(300);
    assert!(
        LOCK.acquire_timeout(&pool, timeout)
            .await
            .unwrap()
            .is_busy()
    );
    guard.release().await.unwrap();
    assert_eq!(holders(&database), 0);

    let guard = LOCK.acquire(&pool).await.unwrap();
    let waiting = tokio::spawn({
        let pool = pool.clone();
        async move { LOCK.acquire(&pool).await.unwrap().release().await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(guard);
    waiting.await.unwrap().unwrap();
    freed(&database).await;

    let one = LOCK.with(&pool, async |conn| {
        conn.batch_execute("SELECT 1").await?;
        Ok::<_, Error>(1)
    });
    assert_eq!(one.await.unwrap(), 1);
    assert_eq!(holders(&database), 0);

    let guard = LOCK.acquire(&pool).await.unwrap();
    let killed = format!("SELECT pg_terminate_backend({})", guard.backend_pid());
    diesel::sql_query(killed)
        .execute(&mut database.connect())
        .unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(matches!(guard.release().await, Err(Error::LockLost { .. })));
    LOCK.acquire(&pool).await.unwrap().release().await.unwrap();

    // A raw BEGIN is found.
    let mut guard = LOCK.acquire(&pool).await.unwrap();
    guard.conn().batch_execute("BEGIN").await.unwrap();
    assert!(matches!(
        guard.release().await,
        Err(Error::TransactionLeftOpen { .. })
    ));
    freed(&database).await;
}

#[test]
fn deadpool_lends_a_lock_a_connection() {
    run(async {
        let database = Database::new();
        let pool = database.deadpool(3);
        life_of_a_lock(database, pool).await;
    });
}

#[test]
fn bb8_lends_a_lock_a_connection() {
    run(async {
        let database = Database::new();
        let pool = database.bb8(3);
        life_of_a_lock(database, pool).await;
    });
}

#[test]
fn a_borrowed_connection_is_released_by_a_drop() {
    run(async {
        let database = Database::new();
        let conn = &mut database.connect_async().await;
        let mut outer = LOCK.acquire_on(conn).await.unwrap();
        let inner = LOCK.try_acquire_on(outer.conn()).await.unwrap();
        drop(inner);
        assert!(outer.is_held().await.unwrap());
        drop(outer);
        freed(&database).await;
        conn.batch_execute("BEGIN").await.unwrap();
        assert!(matches!(
            LOCK.try_acquire_on(conn).await,
            Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
        ));
        conn.batch_execute("COMMIT").await.unwrap();
        LOCK.acquire_on(conn)
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        assert_eq!(holders(&database), 0);
    });
}

#[test]
fn outside_a_runtime_an_operation_is_an_error() {
    let database = Database::new();
    let pool = database.deadpool(1);
    let mut future = std::pin::pin!(LOCK.try_acquire(&pool));
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(Err(Error::NoRuntime)) => {}
        other => panic!("{other:?}"),
    }
}

/// Awaits on this thread, without a runtime.
fn awaited_elsewhere<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);

    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn a_guard_works_and_reports_its_loss_outside_a_runtime() {
    let database = Database::new();
    let pool = database.deadpool(2);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let acquire = || runtime.block_on(LOCK.acquire(&pool)).unwrap();
    let failed = acquire().run(async |_| Err::<(), _>(Error::Standby));
    assert!(matches!(awaited_elsewhere(failed), Err(Error::Standby)));
    assert_eq!(holders(&database), 0);
    let mut guard = acquire();
    let end = format!("SELECT pg_terminate_backend({})", guard.backend_pid());
    SimpleConnection::batch_execute(&mut database.connect(), &end).unwrap();
    awaited_elsewhere(guard.lost());
}
