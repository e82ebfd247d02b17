//! How often a release is retried while it fails.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::deadpool;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::*;

/// A pool whose check-outs fail at once while it is down. It sends a message for each.
#[derive(Clone)]
struct Down {
    pool: deadpool::Pool<AsyncPgConnection>,
    is_down: Arc<AtomicBool>,
    failed: UnboundedSender<()>,
}

impl Down {
    fn over(database: &Database) -> (Self, UnboundedReceiver<()>) {
        let (failed, failures) = unbounded_channel();
        let pool = Self {
            pool: database.deadpool(1),
            is_down: Arc::default(),
            failed,
        };
        (pool, failures)
    }

    fn is_down(&self) -> bool {
        self.is_down.load(Ordering::SeqCst)
    }
}

impl Pool for Down {
    type Connection = deadpool::Object<AsyncPgConnection>;

    async fn check_out(&self) -> Result<Self::Connection, Error> {
        if self.is_down() {
            let _ = self.failed.send(());
            return Err(Error::Pool("the server is down".into()));
        }
        self.pool.check_out().await
    }

    async fn try_check_out(&self) -> Option<Self::Connection> {
        if self.is_down() {
            return None;
        }
        self.pool.try_check_out().await
    }

    fn size(&self) -> u32 {
        self.pool.size()
    }
}

#[test]
fn the_pauses_between_the_retries_of_a_release_grow_while_the_server_is_down() {
    run(async {
        let database = database();
        let (pool, mut failures) = Down::over(&database);
        let brief = Semaphore::named("brief", 1, Duration::from_secs(1));
        let held = permit(&brief, &pool).await;
        pool.is_down.store(true, Ordering::SeqCst);
        drop((held, pool));
        // The task that releases the permit has the only pool now. It ends when the permit has timed out.
        let mut times = 0;
        while failures.recv().await.is_some() {
            times += 1;
        }
        // A retry every ten milliseconds would be some ninety.
        assert!((1..30).contains(&times), "{times}");
    });
}

#[test]
fn a_release_is_retried_until_the_server_is_back() {
    run(async {
        let database = database();
        let (pool, mut failures) = Down::over(&database);
        let held = permit(&ONE, &pool).await;
        pool.is_down.store(true, Ordering::SeqCst);
        drop(held);
        for _ in 0..4 {
            failures.recv().await.unwrap();
        }
        pool.is_down.store(false, Ordering::SeqCst);
        taken(&database, 0).await;
    });
}
