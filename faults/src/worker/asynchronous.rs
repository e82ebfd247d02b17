//! Workers of the asynchronous half: tasks over deadpool or bb8, whose futures are often dropped.

mod drops;
mod fenced_writes;
mod lender;
mod pools;
mod rate_limits;
mod second_server;
mod semaphores;
mod session_locks;
mod throttles;
mod transaction_locks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use diesel::result::{DatabaseErrorKind, Error as DieselError};
use diesel_async::SimpleAsyncConnection;
use diesel_interlock::Error;
use diesel_interlock::asynchronous::Pool;
use fastrand::Rng;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use self::pools::{AnyConnection, AnyPool};
use super::instructions::{is_due_once, is_resting};
use super::report::{report, violation};
use super::sections::Holder;
use super::{CONNECTIONS, LOOK, Settings, WHOLE, errors, is_deliberate};
use crate::chance::Chance;
use crate::clock::{self, Micros};
use crate::fault::Fault;
use crate::record::{Outcome, Primitive, Record};

/// More tasks than connections, so that the pool is often exhausted.
const TASKS: u64 = 6;

/// How often a worker looks whether it is to rest, or to shut its runtime down.
const LOOKING: Duration = Duration::from_millis(10);

/// Works until the worker is to rest, and checks its pool. The connections stay open.
pub(super) fn run(settings: Settings) -> ! {
    let mut random = Rng::with_seed(settings.seed);
    let settings = Arc::new(settings);
    loop {
        let runtime = any_runtime(&mut random);
        let rests = runtime.block_on(work_on_a_runtime(&settings, &mut random));
        let Some(pool) = rests else {
            shut_down(runtime, &mut random);
            continue;
        };
        runtime.block_on(async {
            report(&check_pool(&pool).await);
            std::future::pending::<()>().await;
        });
    }
}

fn any_runtime(random: &mut Rng) -> Runtime {
    let mut builder = if random.one_in(3) {
        tokio::runtime::Builder::new_current_thread()
    } else {
        tokio::runtime::Builder::new_multi_thread()
    };
    let builder = builder.worker_threads(2).enable_all();
    builder.build().expect("a runtime can be made")
}

/// Ends a runtime while its tasks are at work, with their pool.
fn shut_down(runtime: Runtime, random: &mut Rng) {
    match random.u64(..3) {
        0 => drop(runtime),
        1 => runtime.shutdown_timeout(random.millis(0, 50)),
        _ => runtime.shutdown_background(),
    }
    report(&Record::Fault {
        kind: Fault::ShutDownRuntime,
    });
}

/// Returns the pool once all tasks rest. Returns `None` if the runtime is to be shut down.
async fn work_on_a_runtime(settings: &Arc<Settings>, random: &mut Rng) -> Option<AnyPool> {
    let pool = AnyPool::new(settings, &settings.url);
    // For the queries of the watches, which must always find a connection.
    let watch_pool = AnyPool::new(settings, &settings.url);
    let is_shutting_down = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    if !settings.shared_sessions {
        let pool = AnyPool::new(settings, &settings.second_server);
        tasks.spawn(second_server::work(pool));
    }
    for _ in 0..TASKS {
        let mut worker = WorkerTask {
            pool: pool.clone(),
            watch_pool: watch_pool.clone(),
            settings: Arc::clone(settings),
            is_shutting_down: Arc::clone(&is_shutting_down),
            random: random.fork(),
        };
        tasks.spawn(async move {
            while !is_resting() {
                worker.work().await;
            }
        });
    }
    while !is_resting() {
        if is_due_once(Fault::ShutDownRuntime) {
            is_shutting_down.store(true, Ordering::Relaxed);
            return None;
        }
        tokio::time::sleep(LOOKING).await;
    }
    while let Some(ended) = tasks.join_next().await {
        if let Err(error) = ended {
            violation(format!("a task of the worker ended: {error}"));
        }
    }
    Some(pool)
}

/// One task of a worker.
struct WorkerTask {
    pool: AnyPool,
    watch_pool: AnyPool,
    settings: Arc<Settings>,
    /// Whether the connections of the runtime are being closed, while some of its tasks still run.
    is_shutting_down: Arc<AtomicBool>,
    random: Rng,
}

impl WorkerTask {
    /// Pauses a little, and performs one operation in a task of its own, which ends early in some cases.
    async fn work(&mut self) {
        tokio::time::sleep(self.random.millis(0, 30)).await;
        let what = match self.random.u64(..12) {
            0..=3 if !self.settings.shared_sessions => Primitive::SessionLock,
            0..=5 => Primitive::TransactionLock,
            6..=7 => Primitive::Throttle,
            8..=9 => Primitive::Semaphore,
            _ => Primitive::RateLimit,
        };
        let began = clock::now();
        let operation = self.fork().operation(what);
        let Some(done) = drops::perform(&mut self.random, operation).await else {
            return; // It was dropped, which is reported as a fault.
        };
        if self.is_shutting_down.load(Ordering::Relaxed) {
            return;
        }
        let outcome = match done {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => {
                errors::examine(what, &error);
                Outcome::Failed
            }
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) if is_deliberate(&*panic) => Outcome::Done,
                _ => {
                    violation(format!("a panic in {}", what.name()));
                    Outcome::Failed
                }
            },
        };
        report(&Record::Did {
            what,
            outcome,
            began,
        });
    }

    fn fork(&mut self) -> Self {
        Self {
            pool: self.pool.clone(),
            watch_pool: self.watch_pool.clone(),
            settings: Arc::clone(&self.settings),
            is_shutting_down: Arc::clone(&self.is_shutting_down),
            random: self.random.fork(),
        }
    }

    async fn operation(mut self, what: Primitive) -> Result<Outcome, Error> {
        match what {
            Primitive::SessionLock => session_locks::work(&mut self).await,
            Primitive::TransactionLock => transaction_locks::work(&mut self).await,
            Primitive::Throttle => throttles::work(&mut self).await,
            // A fence is passed under a session lock.
            Primitive::Semaphore | Primitive::Fence => semaphores::work(&mut self).await,
            Primitive::RateLimit => rate_limits::work(&mut self).await,
        }
    }

    /// A query that was sent at `asked` returned that the lock was lost. A shut-down is a cause.
    fn lost(&self, holder: Holder, asked: Micros) {
        if !self.is_shutting_down.load(Ordering::Relaxed) {
            holder.lost(&self.settings, asked);
        }
    }

    /// Checks out all connections of the pool for a while.
    async fn exhaust_pool(&mut self) {
        let mut taken = Vec::new();
        let take_all = async {
            while (taken.len() as u32) < CONNECTIONS
                && let Ok(conn) = self.pool.check_out().await
            {
                taken.push(conn);
            }
            std::future::pending::<()>().await;
        };
        let _ = tokio::time::timeout(self.random.millis(100, 400), take_all).await;
    }

    /// Checks out a connection, and checks that its last user left neither a lock nor an open transaction.
    async fn connection(&self) -> Result<AnyConnection, Error> {
        let mut conn = self.pool.check_out().await?;
        match conn.batch_execute(LOOK).await {
            Err(DieselError::DatabaseError(DatabaseErrorKind::CheckViolation, found)) => {
                violation(format!("the pool gave a connection {}", found.message()));
            }
            looked => looked?,
        }
        Ok(conn)
    }
}

/// Reports whether the pool gives all its connections at once, and whether each of them works.
async fn check_pool(pool: &AnyPool) -> Record {
    let end = Instant::now() + WHOLE;
    let mut given = Vec::new();
    while (given.len() as u32) < CONNECTIONS && Instant::now() < end {
        let Ok(mut conn) = pool.check_out().await else {
            continue;
        };
        if conn.batch_execute("SELECT 1").await.is_ok() {
            given.push(conn);
        }
    }
    Record::Rested {
        given: given.len() as u32,
        of: CONNECTIONS,
    }
}
