//! A pool of the caller's own that panics when it takes a connection back.

use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::deadpool;
use diesel_interlock::asynchronous::{
    AdvisoryLock, Pool, PoolConnection, Semaphore, probe_sessions,
};
use diesel_interlock::{Error, migrations};
use workbench::Database;

use crate::run;

static LOCK: AdvisoryLock = AdvisoryLock::named("x");
static ONE: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(600));

#[derive(Clone)]
struct Panicking {
    pool: deadpool::Pool<AsyncPgConnection>,
    panics: Arc<AtomicU32>,
}

struct Connection {
    conn: deadpool::Object<AsyncPgConnection>,
    panics: Arc<AtomicU32>,
}

impl Panicking {
    fn over(database: &Database) -> Self {
        Self {
            pool: database.deadpool(2),
            panics: Arc::default(),
        }
    }

    fn connection(&self, conn: deadpool::Object<AsyncPgConnection>) -> Connection {
        Connection {
            conn,
            panics: Arc::clone(&self.panics),
        }
    }

    fn panics(&self) -> u32 {
        self.panics.load(Ordering::SeqCst)
    }
}

impl Pool for Panicking {
    type Connection = Connection;

    async fn check_out(&self) -> Result<Connection, Error> {
        Ok(self.connection(self.pool.check_out().await?))
    }

    async fn try_check_out(&self) -> Option<Connection> {
        Some(self.connection(self.pool.try_check_out().await?))
    }

    fn size(&self) -> u32 {
        self.pool.size()
    }
}

impl PoolConnection for Connection {
    fn discard(self) {}
}

impl Deref for Connection {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        &self.conn
    }
}

impl DerefMut for Connection {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        &mut self.conn
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.panics.fetch_add(1, Ordering::SeqCst);
        resume_unwind(Box::new("of the pool"));
    }
}

#[test]
fn an_operation_returns_what_it_did_although_its_connection_is_not_taken_back() {
    run(async {
        let database = Database::new();
        migrations::install(&mut database.connect()).unwrap();
        let pool = Panicking::over(&database);
        let permit = ONE.try_acquire(&pool).await.unwrap().admitted().unwrap();
        assert_eq!(pool.panics(), 1);
        permit.release().await.unwrap();
        assert_eq!(pool.panics(), 2);

        let holder = &mut database.connect_async().await;
        let guard = LOCK.acquire_on(holder).await.unwrap();
        assert!(LOCK.try_acquire(&pool).await.unwrap().is_busy());
        assert_eq!(pool.panics(), 3);
        guard.release().await.unwrap();
    });
}

#[test]
fn a_connection_that_is_not_taken_back_while_a_panic_unwinds_aborts_nothing() {
    run(async {
        let database = Database::new();
        let pool = Panicking::over(&database);
        for polls in 1..12 {
            let probed = tokio::spawn({
                let pool = pool.clone();
                async move {
                    let mut probe = pin!(probe_sessions(&pool));
                    let mut polled = 0;
                    poll_fn(|context| {
                        polled += 1;
                        match probe.as_mut().poll(context) {
                            Poll::Pending if polled < polls => Poll::Pending,
                            Poll::Pending | Poll::Ready(_) => Poll::Ready(()),
                        }
                    })
                    .await;
                    resume_unwind(Box::new("a panic of the caller"));
                }
            });
            let probed: Result<(), _> = probed.await;
            assert!(probed.unwrap_err().is_panic());
        }
        assert!(pool.panics() > 0);
    });
}
