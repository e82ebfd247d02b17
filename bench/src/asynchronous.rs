//! The asynchronous half: tasks beside threads, and beside what asynchronous applications would use instead.
//!
//! Each task has a lock of its own. All share eight connections, so most of 64 tasks wait for one, as most of 64 threads
//! do.

use std::future::Future;
use std::sync::Arc;

use ::bb8::QueueStrategy;
use ::deadpool::managed::QueueMode;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool};
use diesel_async::pooled_connection::deadpool::Object;
use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod, bb8, deadpool,
};
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use diesel_interlock::asynchronous::{AdvisoryLock, Pool, PooledGuard, Semaphore, Throttle};
use tokio::runtime::{Builder, Runtime};

use crate::Bench;
use crate::cores::Cores;
use crate::harness::{Contender, compare, tasks, threads};
use crate::report::{NO_GOAL, Report, at_least};
use crate::semaphores;
use crate::server::BenchDatabase;
use crate::session_locks::{
    self, Locker, OURS, OURS_CHECKED, RELEASE, SQLX, TAKE, excludes, number, sqlx,
};
use crate::throttles::{self, DETAILS, Resource};

const CONNECTIONS: usize = 8;
const DEADPOOL: &str = "ours, deadpool";
const DEADPOOL_CHECKED: &str = "ours, deadpool that checks connections";
const BB8: &str = "ours, bb8";
const BB8_CHECKED: &str = "ours, bb8 that checks connections";
const STATEMENTS: &str = "tokio-postgres, prepared, no pool";
const STATEMENTS_AGAIN: &str = "tokio-postgres, prepared, no pool, once more";
const BY_HAND: &str = "diesel-async's sql_query, deadpool";
const BY_HAND_CACHED: &str = "diesel-async's cached statements, deadpool";
const AUTUMN: &str = "autumn-web lock, deadpool";
const AUTUMN_CHECKED: &str = "autumn-web lock, deadpool that checks connections";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    let current = Builder::new_current_thread().enable_all().build();
    let current = Arc::new(current.expect("a runtime can be started"));
    verify(bench, &database);
    for (number, cores, runtime, scenario) in [
        (
            1,
            Cores::One,
            &bench.runtime,
            "session lock, asynchronous, take and release",
        ),
        (
            64,
            Cores::All,
            &bench.runtime,
            "session lock, asynchronous, take and release over 8 connections",
        ),
        (
            1,
            Cores::One,
            &current,
            "session lock, asynchronous, on a runtime of one thread",
        ),
        (
            64,
            Cores::All,
            &current,
            "session lock, asynchronous, over 8 connections on a runtime of one thread",
        ),
    ] {
        report.tasks(cores, scenario, number);
        locks(bench, &database, report, runtime, number);
    }
    attempts_and_claims(bench, report);
}

fn locks(
    bench: &Bench,
    database: &BenchDatabase,
    report: &mut Report,
    runtime: &Arc<Runtime>,
    number: usize,
) {
    let pool = |checks| dead_pool(database, checks);
    let mut contenders = vec![
        session_locks::ours(OURS, &database.pool(CONNECTIONS), number),
        session_locks::ours(
            OURS_CHECKED,
            &database.pool_with_checks(CONNECTIONS),
            number,
        ),
        lockers(DEADPOOL, runtime, number, Ours::new(pool(false))),
        lockers(DEADPOOL_CHECKED, runtime, number, Ours::new(pool(true))),
        lockers(
            BB8,
            runtime,
            number,
            Ours::new(bb8_pool(runtime, database, false)),
        ),
        lockers(
            BB8_CHECKED,
            runtime,
            number,
            Ours::new(bb8_pool(runtime, database, true)),
        ),
        lockers(BY_HAND, runtime, number, ByHand(pool(false))),
        lockers(BY_HAND_CACHED, runtime, number, Cached(pool(false))),
        lockers(AUTUMN, runtime, number, Autumn::new(&pool(false))),
        lockers(AUTUMN_CHECKED, runtime, number, Autumn::new(&pool(true))),
        sqlx(SQLX, runtime, database, CONNECTIONS, number, false),
    ];
    if number == 1 {
        for name in [STATEMENTS, STATEMENTS_AGAIN] {
            let statements = Statements::new(runtime, database, number);
            contenders.push(lockers(name, runtime, number, statements));
        }
    }
    let rates = compare(bench.options.plan_of_short_turns(), contenders);
    if number == 1 {
        report.ratio(&rates, DEADPOOL, STATEMENTS, at_least(0.9));
        report.ratio(&rates, BB8, STATEMENTS, NO_GOAL);
        report.ratio(&rates, BY_HAND_CACHED, STATEMENTS, NO_GOAL);
        // How far the same can be from itself.
        report.ratio(&rates, STATEMENTS_AGAIN, STATEMENTS, NO_GOAL);
    }
    let is_ahead = if number > 1 && Arc::ptr_eq(runtime, &bench.runtime) {
        at_least(1.0)
    } else {
        NO_GOAL
    };
    report.ratio(&rates, DEADPOOL, OURS, is_ahead);
    report.ratio(&rates, DEADPOOL_CHECKED, OURS_CHECKED, is_ahead);
    report.ratio(&rates, BY_HAND_CACHED, OURS, NO_GOAL);
    report.ratio(&rates, BB8, OURS, NO_GOAL);
    report.ratio(&rates, BB8_CHECKED, OURS_CHECKED, NO_GOAL);
    report.ratio(&rates, DEADPOOL, BY_HAND, NO_GOAL);
    report.ratio(&rates, DEADPOOL, BY_HAND_CACHED, NO_GOAL);
    report.ratio(&rates, DEADPOOL, AUTUMN, at_least(2.0));
    report.ratio(&rates, DEADPOOL_CHECKED, AUTUMN_CHECKED, NO_GOAL);
    report.ratio(&rates, DEADPOOL, SQLX, NO_GOAL);
}

/// Somebody who takes locks and releases them, for any number of tasks.
trait AsyncLocker: Clone + Send + Sync + 'static {
    type Held: Send;

    /// Returns `None` if the lock of the task is not free.
    fn take(&self, task: usize) -> impl Future<Output = Option<Self::Held>> + Send;

    fn release(&self, task: usize, held: Self::Held) -> impl Future<Output = ()> + Send;
}

fn lockers<L: AsyncLocker>(
    name: &str,
    runtime: &Arc<Runtime>,
    number: usize,
    locker: L,
) -> Box<dyn Contender> {
    tasks(name, number, runtime, move |task| {
        let locker = locker.clone();
        async move {
            let held = locker.take(task).await;
            locker
                .release(task, held.expect("nobody else wants it"))
                .await;
        }
    })
}

#[derive(Clone)]
struct Ours<P> {
    pool: P,
    locks: Arc<[AdvisoryLock]>,
}

impl<P: Pool> Ours<P> {
    fn new(pool: P) -> Self {
        let lock = |task| AdvisoryLock::from(session_locks::lock(task));
        Self {
            pool,
            locks: (0..64).map(lock).collect(),
        }
    }
}

impl<P: Pool> AsyncLocker for Ours<P> {
    type Held = PooledGuard<P>;

    async fn take(&self, task: usize) -> Option<Self::Held> {
        let attempt = self.locks[task].try_acquire(&self.pool).await;
        attempt.unwrap().acquired()
    }

    async fn release(&self, _: usize, held: Self::Held) {
        held.release().await.unwrap();
    }
}

/// The least that an asynchronous client can do: a connection of its own for each task, and two prepared statements.
#[derive(Clone)]
struct Statements(Arc<[Session]>);

struct Session {
    client: tokio_postgres::Client,
    take: tokio_postgres::Statement,
    release: tokio_postgres::Statement,
    key: i64,
}

impl Statements {
    fn new(runtime: &Runtime, database: &BenchDatabase, number: usize) -> Self {
        let sessions = (0..number).map(|task| runtime.block_on(Session::new(database, task)));
        Self(sessions.collect())
    }
}

impl Session {
    async fn new(database: &BenchDatabase, task: usize) -> Self {
        let connected = tokio_postgres::connect(&database.async_url(), tokio_postgres::NoTls).await;
        let (client, connection) = connected.expect("the server accepts connections");
        tokio::spawn(connection);
        Self {
            take: client.prepare(TAKE).await.unwrap(),
            release: client.prepare(RELEASE).await.unwrap(),
            key: number(task),
            client,
        }
    }

    async fn ask(&self, statement: &tokio_postgres::Statement) -> bool {
        let row = self.client.query_one(statement, &[&self.key]).await;
        row.unwrap().get(0)
    }
}

impl AsyncLocker for Statements {
    type Held = ();

    async fn take(&self, task: usize) -> Option<()> {
        let session = &self.0[task];
        session.ask(&session.take).await.then_some(())
    }

    async fn release(&self, task: usize, (): ()) {
        let session = &self.0[task];
        assert!(session.ask(&session.release).await);
    }
}

/// What people write with diesel-async today, when they remember to keep to one connection.
#[derive(Clone)]
struct ByHand(deadpool::Pool<AsyncPgConnection>);

#[derive(QueryableByName)]
struct Done {
    #[diesel(sql_type = Bool)]
    done: bool,
}

impl ByHand {
    async fn ask(conn: &mut AsyncPgConnection, statement: &str, task: usize) -> bool {
        let query = diesel::sql_query(statement).bind::<BigInt, _>(number(task));
        query.get_result::<Done>(conn).await.unwrap().done
    }
}

impl AsyncLocker for ByHand {
    type Held = Object<AsyncPgConnection>;

    async fn take(&self, task: usize) -> Option<Self::Held> {
        let mut conn = self.0.get().await.unwrap();
        let taken = Self::ask(&mut conn, "SELECT pg_try_advisory_lock($1) AS done", task);
        taken.await.then_some(conn)
    }

    async fn release(&self, task: usize, mut conn: Self::Held) {
        let released = Self::ask(&mut conn, "SELECT pg_advisory_unlock($1) AS done", task);
        assert!(released.await);
    }
}

/// The least that anything on diesel-async can do: a connection out of a pool, and two statements that it keeps prepared.
#[derive(Clone)]
struct Cached(deadpool::Pool<AsyncPgConnection>);

#[diesel::declare_sql_function]
extern "SQL" {
    fn pg_try_advisory_lock(key: BigInt) -> Bool;
    fn pg_advisory_unlock(key: BigInt) -> Bool;
}

impl AsyncLocker for Cached {
    type Held = Object<AsyncPgConnection>;

    async fn take(&self, task: usize) -> Option<Self::Held> {
        let mut conn = self.0.get().await.unwrap();
        let take = diesel::select(pg_try_advisory_lock(number(task)));
        let taken = take.get_result::<bool>(&mut conn).await;
        taken.unwrap().then_some(conn)
    }

    async fn release(&self, task: usize, mut conn: Self::Held) {
        let release = diesel::select(pg_advisory_unlock(number(task)));
        let released = release.get_result::<bool>(&mut conn).await;
        assert!(released.unwrap());
    }
}

#[derive(Clone)]
struct Autumn(Arc<[autumn_web::lock::Lock]>);

impl Autumn {
    fn new(pool: &deadpool::Pool<AsyncPgConnection>) -> Self {
        let lock =
            |task| autumn_web::lock::Lock::new(pool.clone(), format!("nightly report {task}"));
        Self((0..64).map(lock).collect())
    }
}

impl AsyncLocker for Autumn {
    type Held = autumn_web::lock::LockGuard;

    async fn take(&self, task: usize) -> Option<Self::Held> {
        self.0[task].try_lock().await.unwrap()
    }

    async fn release(&self, _: usize, held: Self::Held) {
        held.release().await.unwrap();
    }
}

fn manager(
    database: &BenchDatabase,
    checks: bool,
) -> AsyncDieselConnectionManager<AsyncPgConnection> {
    let mut config = ManagerConfig::default();
    config.recycling_method = if checks {
        RecyclingMethod::Verified
    } else {
        RecyclingMethod::Fast
    };
    AsyncDieselConnectionManager::new_with_config(database.async_url(), config)
}

/// It lends the connection that came back last, as r2d2 does. Its connections belong to the runtime that first uses them.
fn dead_pool(database: &BenchDatabase, checks: bool) -> deadpool::Pool<AsyncPgConnection> {
    deadpool::Pool::builder(manager(database, checks))
        .max_size(CONNECTIONS)
        .queue_mode(QueueMode::Lifo)
        .build()
        .expect("a pool can be made")
}

fn bb8_pool(
    runtime: &Runtime,
    database: &BenchDatabase,
    checks: bool,
) -> bb8::Pool<AsyncPgConnection> {
    let builder = bb8::Pool::builder()
        .max_size(CONNECTIONS as u32)
        .min_idle(CONNECTIONS as u32)
        .queue_strategy(QueueStrategy::Lifo)
        .test_on_check_out(checks);
    runtime
        .block_on(builder.build(manager(database, checks)))
        .expect("the server accepts connections")
}

/// One of them, for the check that it excludes.
struct Blocking<L: AsyncLocker> {
    runtime: Arc<Runtime>,
    locker: L,
    task: usize,
    held: Option<L::Held>,
}

impl<L: AsyncLocker> Locker for Blocking<L> {
    fn take(&mut self) -> bool {
        self.held = self.runtime.block_on(self.locker.take(self.task));
        self.held.is_some()
    }

    fn release(&mut self) {
        let held = self.held.take().unwrap();
        self.runtime.block_on(self.locker.release(self.task, held));
    }
}

fn verify(bench: &Bench, database: &BenchDatabase) {
    let runtime = &bench.runtime;
    fn check<L: AsyncLocker>(
        name: &str,
        runtime: &Arc<Runtime>,
        database: &BenchDatabase,
        make: impl Fn() -> L,
    ) {
        excludes(name, Some(&mut database.session()), || Blocking {
            runtime: Arc::clone(runtime),
            locker: make(),
            task: 0,
            held: None,
        });
    }
    for checks in [false, true] {
        let pool = dead_pool(database, checks);
        check(DEADPOOL, runtime, database, || Ours::new(pool.clone()));
        check(AUTUMN, runtime, database, || Autumn::new(&pool));
        let pool = bb8_pool(runtime, database, checks);
        check(BB8, runtime, database, || Ours::new(pool.clone()));
    }
    let pool = dead_pool(database, false);
    check(BY_HAND, runtime, database, || ByHand(pool.clone()));
    check(BY_HAND_CACHED, runtime, database, || Cached(pool.clone()));
    check(STATEMENTS, runtime, database, || {
        Statements::new(runtime, database, 1)
    });
}

/// Throttles and semaphores, beside the same of the blocking half over as many connections.
fn attempts_and_claims(bench: &Bench, report: &mut Report) {
    const THREADS: &str = "ours, r2d2";
    let runtime = &bench.runtime;
    let throttled = throttles::prepared(&bench.server);
    let claimed = bench.server.database();
    for number in [1, CONNECTIONS] {
        let cores = if number == 1 { Cores::One } else { Cores::All };
        report.tasks(cores, "throttle, asynchronous, denied", number);
        let rates = compare(
            bench.options.plan(),
            vec![
                blocking_attempts(THREADS, &throttled, number),
                attempts(DEADPOOL, runtime, number, dead_pool(&throttled, false)),
                attempts(BB8, runtime, number, bb8_pool(runtime, &throttled, false)),
            ],
        );
        report.ratio(&rates, DEADPOOL, THREADS, NO_GOAL);
        report.ratio(&rates, BB8, THREADS, NO_GOAL);

        report.tasks(cores, "semaphore, asynchronous, claim and release", number);
        let rates = compare(
            bench.options.plan(),
            vec![
                semaphores::ours_of(THREADS, &claimed.pool(CONNECTIONS), number),
                claims(DEADPOOL, runtime, number, dead_pool(&claimed, false)),
                claims(BB8, runtime, number, bb8_pool(runtime, &claimed, false)),
            ],
        );
        report.ratio(&rates, DEADPOOL, THREADS, NO_GOAL);
        report.ratio(&rates, BB8, THREADS, NO_GOAL);
    }
}

fn blocking_attempts(name: &str, database: &BenchDatabase, number: usize) -> Box<dyn Contender> {
    let pool = database.pool(CONNECTIONS);
    threads(name, number, |_| {
        let pool = pool.clone();
        move || {
            let throttle = diesel_interlock::Throttle::of(Resource::Hourly).details(DETAILS);
            assert!(throttle.attempt(&pool).unwrap().granted().is_none());
        }
    })
}

fn attempts<P: Pool>(
    name: &str,
    runtime: &Arc<Runtime>,
    number: usize,
    pool: P,
) -> Box<dyn Contender> {
    tasks(name, number, runtime, move |_| {
        let pool = pool.clone();
        async move {
            let throttle = Throttle::of(Resource::Hourly).details(DETAILS);
            assert!(throttle.attempt(&pool).await.unwrap().granted().is_none());
        }
    })
}

fn claims<P: Pool>(
    name: &str,
    runtime: &Arc<Runtime>,
    number: usize,
    pool: P,
) -> Box<dyn Contender> {
    let semaphore: Arc<Semaphore> = Arc::new(semaphores::semaphore().into());
    tasks(name, number, runtime, move |_| {
        let (pool, semaphore) = (pool.clone(), Arc::clone(&semaphore));
        async move {
            let claimed = semaphore.try_acquire(&pool).await.unwrap();
            let permit = claimed.admitted().expect("a slot is free");
            permit.release().await.unwrap();
        }
    })
}
