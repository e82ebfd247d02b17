//! Taking and releasing a session lock that nobody else wants.
//!
//! Each thread has a lock of its own, so that the work is measured and not the waiting. A contender
//! that has a pool takes a connection out of it for each lock, and gives it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use diesel::prelude::*;
use diesel::sql_types::{BigInt, Bool};
use diesel_interlock::{AdvisoryLock, LockId, LockKey, PgPool, PooledGuard};
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockGuard, PgAdvisoryLockKey, PgPoolOptions};
use sqlx::{Either, Postgres};
use tokio::runtime::Runtime;

use crate::Bench;
use crate::cores::Cores;
use crate::harness::{Contender, compare, tasks, threads};
use crate::libpq::{Prepared, Session};
use crate::libpq_pool::{LibpqPool, PooledSession, libpq_pool};
use crate::pgbench::Pgbench;
use crate::redis_server::RedisServer;
use crate::report::{NO_GOAL, Report, at_least};
use crate::server::BenchDatabase;

pub(crate) const OURS: &str = "ours, r2d2";
pub(crate) const OURS_CHECKED: &str = "ours, r2d2 that checks connections";
const LIBPQ: &str = "libpq, prepared";
const LIBPQ_AGAIN: &str = "libpq, prepared, once more";
const LIBPQ_POOLED: &str = "libpq, prepared, r2d2";
const PGBENCH: &str = "pgbench -M prepared";
const SQL_QUERY: &str = "Diesel's sql_query, r2d2";
pub(crate) const SQLX: &str = "sqlx PgAdvisoryLock";
const SQLX_CHECKED: &str = "sqlx whose pool checks connections";
const REDIS: &str = "Redis SET NX PX";

pub(crate) const TAKE: &str = "SELECT pg_try_advisory_lock($1)";
pub(crate) const RELEASE: &str = "SELECT pg_advisory_unlock($1)";

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    verify(bench, &database);
    let alone = "session lock, take and release";
    for (number, cores, scenario) in [
        (1, Cores::One, alone),
        (
            8,
            Cores::One,
            "session lock, take and release, all on one core",
        ),
        (8, Cores::All, alone),
        (32, Cores::All, alone),
    ] {
        report.scenario_on(cores, scenario, number);
        let rates = compare(
            bench.options.plan_of_short_turns(),
            vec![
                ours(OURS, &database.pool(number), number),
                ours(OURS_CHECKED, &database.pool_with_checks(number), number),
                lockers(LIBPQ, number, |thread| Libpq::new(&database, thread)),
                lockers(LIBPQ_AGAIN, number, |thread| Libpq::new(&database, thread)),
                {
                    let pool = libpq_pool(&database, number);
                    lockers(LIBPQ_POOLED, number, move |thread| {
                        LibpqPooled::new(&pool, thread)
                    })
                },
                {
                    let pool = database.pool(number);
                    lockers(SQL_QUERY, number, move |thread| {
                        SqlQuery::new(&pool, thread)
                    })
                },
                sqlx(SQLX, &bench.runtime, &database, number, number, false),
                sqlx(
                    SQLX_CHECKED,
                    &bench.runtime,
                    &database,
                    number,
                    number,
                    true,
                ),
                lockers(REDIS, number, |thread| Redis::new(&bench.redis, thread)),
            ],
        );
        let alone = match cores {
            Cores::One => at_least(0.85).aiming_at(0.95),
            Cores::All => NO_GOAL,
        };
        report.ratio(&rates, OURS, LIBPQ, alone);
        let pooled = if number <= 8 { at_least(0.85) } else { NO_GOAL };
        report.ratio(&rates, OURS, LIBPQ_POOLED, pooled);
        // How far the same can be from itself.
        report.ratio(&rates, LIBPQ_AGAIN, LIBPQ, NO_GOAL);
        report.ratio(&rates, OURS, SQL_QUERY, NO_GOAL);
        report.ratio(&rates, OURS, SQLX, at_least(1.0));
        report.ratio(&rates, OURS_CHECKED, SQLX_CHECKED, NO_GOAL);
        report.ratio(&rates, OURS, REDIS, NO_GOAL);
        let rates = compare(
            bench.options.plan_of_long_turns(),
            vec![
                ours(OURS, &database.pool(number), number),
                pgbench(bench, &database, number),
            ],
        );
        report.ratio(&rates, OURS, PGBENCH, NO_GOAL);
    }
}

/// The lock of a thread, the same for all contenders.
pub(crate) fn lock(thread: usize) -> AdvisoryLock {
    AdvisoryLock::new(LockKey::parts(["nightly report", &thread.to_string()]))
}

/// Its number.
pub(crate) fn number(thread: usize) -> i64 {
    match lock(thread).key().id() {
        Ok(LockId::BigInt(number)) => number,
        other => panic!("not a name: {other:?}"),
    }
}

/// Our side of the comparison, also for other scenarios.
pub(crate) fn ours(name: &str, pool: &PgPool, number: usize) -> Box<dyn Contender> {
    lockers(name, number, |thread| Ours::new(pool, thread))
}

/// Somebody who takes a lock and releases it.
pub(crate) trait Locker: Send {
    /// Returns whether the lock was free.
    fn take(&mut self) -> bool;
    fn release(&mut self);
}

fn lockers<L: Locker + 'static>(
    name: &str,
    number: usize,
    make: impl Fn(usize) -> L,
) -> Box<dyn Contender> {
    threads(name, number, |thread| {
        let mut locker = make(thread);
        move || {
            assert!(locker.take(), "nobody else wants it");
            locker.release();
        }
    })
}

struct Ours {
    pool: PgPool,
    lock: AdvisoryLock,
    guard: Option<PooledGuard>,
}

impl Ours {
    fn new(pool: &PgPool, thread: usize) -> Self {
        Self {
            pool: pool.clone(),
            lock: lock(thread),
            guard: None,
        }
    }
}

impl Locker for Ours {
    fn take(&mut self) -> bool {
        self.guard = self.lock.try_acquire(&self.pool).unwrap().acquired();
        self.guard.is_some()
    }

    fn release(&mut self) {
        self.guard.take().unwrap().release().unwrap();
    }
}

/// The least that a client can do: a connection of its own, and two prepared statements.
struct Libpq {
    session: Session,
    take: Prepared,
    release: Prepared,
    key: i64,
}

impl Libpq {
    fn new(database: &BenchDatabase, thread: usize) -> Self {
        let mut session = database.session();
        Self {
            take: session.prepare("take", TAKE),
            release: session.prepare("release", RELEASE),
            key: number(thread),
            session,
        }
    }
}

impl Locker for Libpq {
    fn take(&mut self) -> bool {
        self.session.run(&self.take, &[self.key]).is_true(0)
    }

    fn release(&mut self) {
        assert!(self.session.run(&self.release, &[self.key]).is_true(0));
    }
}

/// The same two statements with a connection out of a pool for each lock.
struct LibpqPooled {
    pool: LibpqPool,
    held: Option<PooledSession>,
    key: i64,
}

impl LibpqPooled {
    fn new(pool: &LibpqPool, thread: usize) -> Self {
        Self {
            pool: pool.clone(),
            held: None,
            key: number(thread),
        }
    }
}

impl Locker for LibpqPooled {
    fn take(&mut self) -> bool {
        let mut session = self.pool.get().unwrap();
        let taken = session.take(self.key);
        self.held = taken.then_some(session);
        taken
    }

    fn release(&mut self) {
        assert!(self.held.take().unwrap().release(self.key));
    }
}

/// What people write with Diesel today, when they remember to keep to one connection.
struct SqlQuery {
    pool: PgPool,
    held: Option<diesel_interlock::PooledPgConnection>,
    key: i64,
}

#[derive(QueryableByName)]
struct Done {
    #[diesel(sql_type = Bool)]
    done: bool,
}

impl SqlQuery {
    fn new(pool: &PgPool, thread: usize) -> Self {
        Self {
            pool: pool.clone(),
            held: None,
            key: number(thread),
        }
    }

    fn ask(conn: &mut PgConnection, statement: &str, key: i64) -> bool {
        let query = diesel::sql_query(statement).bind::<BigInt, _>(key);
        query.get_result::<Done>(conn).unwrap().done
    }
}

impl Locker for SqlQuery {
    fn take(&mut self) -> bool {
        let mut conn = self.pool.get().unwrap();
        let taken = Self::ask(
            &mut conn,
            "SELECT pg_try_advisory_lock($1) AS done",
            self.key,
        );
        self.held = taken.then_some(conn);
        taken
    }

    fn release(&mut self) {
        let mut conn = self.held.take().unwrap();
        assert!(Self::ask(
            &mut conn,
            "SELECT pg_advisory_unlock($1) AS done",
            self.key
        ));
    }
}

/// sqlx, for the check that it excludes; it is timed as what it is, asynchronous.
struct Sqlx {
    runtime: Arc<Runtime>,
    pool: sqlx::PgPool,
    lock: &'static PgAdvisoryLock,
    guard: Option<PgAdvisoryLockGuard<'static, PoolConnection<Postgres>>>,
}

impl Locker for Sqlx {
    fn take(&mut self) -> bool {
        self.guard = self.runtime.block_on(async {
            // A connection that goes back to the pool does so in the runtime.
            let conn = self.pool.acquire().await.unwrap();
            self.lock.try_acquire(conn).await.unwrap().left()
        });
        self.guard.is_some()
    }

    fn release(&mut self) {
        let guard = self.guard.take().unwrap();
        self.runtime
            .block_on(async { drop(guard.release_now().await.unwrap()) });
    }
}

pub(crate) fn sqlx_pool(
    runtime: &Runtime,
    database: &BenchDatabase,
    size: usize,
    checks: bool,
) -> sqlx::PgPool {
    let options = PgPoolOptions::new()
        .max_connections(size as u32)
        .min_connections(size as u32)
        .test_before_acquire(checks);
    runtime
        .block_on(options.connect(database.url()))
        .expect("the server accepts connections")
}

/// As its documentation has it: the guard takes a connection out of the pool, and `release_now` waits for the unlock.
pub(crate) fn sqlx(
    name: &str,
    runtime: &Arc<Runtime>,
    database: &BenchDatabase,
    connections: usize,
    number: usize,
    checks: bool,
) -> Box<dyn Contender> {
    let pool = sqlx_pool(runtime, database, connections, checks);
    let locks: Vec<_> = (0..number).map(sqlx_lock).collect();
    let locks: Arc<[PgAdvisoryLock]> = locks.into();
    tasks(name, number, runtime, move |task| {
        let (pool, locks) = (pool.clone(), Arc::clone(&locks));
        async move {
            let taken = locks[task]
                .try_acquire(pool.acquire().await.unwrap())
                .await
                .unwrap();
            let Either::Left(guard) = taken else {
                panic!("nobody else wants it")
            };
            drop(guard.release_now().await.unwrap());
        }
    })
}

pub(crate) fn sqlx_lock(thread: usize) -> PgAdvisoryLock {
    PgAdvisoryLock::with_key(PgAdvisoryLockKey::BigInt(number(thread)))
}

/// Redis as its documentation describes a lock: a random value that only its holder knows, and a script that deletes
/// nobody else's.
struct Redis {
    connection: redis::Connection,
    key: String,
    value: String,
    release: redis::Script,
}

impl Redis {
    fn new(server: &RedisServer, thread: usize) -> Self {
        Self {
            connection: server.connect(),
            key: format!("nightly report {thread}"),
            value: String::new(),
            release: redis::Script::new(
                "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end",
            ),
        }
    }
}

impl Locker for Redis {
    fn take(&mut self) -> bool {
        self.value = format!("{:016x}", fastrand::u64(..));
        let mut set = redis::cmd("SET");
        set.arg(&self.key)
            .arg(&self.value)
            .arg("NX")
            .arg("PX")
            .arg(30_000);
        set.query::<Option<String>>(&mut self.connection)
            .unwrap()
            .is_some()
    }

    fn release(&mut self) {
        let mut invocation = self.release.key(&self.key);
        let deleted: i64 = invocation
            .arg(&self.value)
            .invoke(&mut self.connection)
            .unwrap();
        assert_eq!(deleted, 1);
    }
}

fn pgbench(bench: &Bench, database: &BenchDatabase, number: usize) -> Box<dyn Contender> {
    let script =
        "SELECT pg_try_advisory_lock(:client_id);\nSELECT pg_advisory_unlock(:client_id);\n";
    Box::new(Pgbench::new(
        PGBENCH,
        &bench.server,
        database,
        number,
        script,
    ))
}

fn verify(bench: &Bench, database: &BenchDatabase) {
    let observer = &mut database.session();
    let pool = database.pool(8);
    excludes(OURS, Some(&mut *observer), || Ours::new(&pool, 0));
    excludes(LIBPQ, Some(&mut *observer), || Libpq::new(database, 0));
    let libpq_pool = libpq_pool(database, 8);
    excludes(LIBPQ_POOLED, Some(&mut *observer), || {
        LibpqPooled::new(&libpq_pool, 0)
    });
    excludes(SQL_QUERY, Some(&mut *observer), || SqlQuery::new(&pool, 0));
    let sqlx_pool = sqlx_pool(&bench.runtime, database, 8, false);
    let sqlx_lock: &'static _ = Box::leak(Box::new(sqlx_lock(0)));
    excludes(SQLX, Some(observer), || Sqlx {
        runtime: Arc::clone(&bench.runtime),
        pool: sqlx_pool.clone(),
        lock: sqlx_lock,
        guard: None,
    });
    excludes(REDIS, None, || Redis::new(&bench.redis, 0));

    // `pgbench` ignores the result of a statement, so a result that is not true divides by zero here.
    let script = "SELECT 1 / pg_try_advisory_lock(:client_id)::int;\nSELECT 1 / pg_advisory_unlock(:client_id)::int;\n";
    let checked = Pgbench::new(PGBENCH, &bench.server, database, 2, script);
    assert!(
        checked.succeeds_once(),
        "{PGBENCH} takes free locks and releases them"
    );
    observer_holds(database, || {
        assert!(
            !checked.succeeds_once(),
            "{PGBENCH} takes no lock that is held"
        )
    });
}

fn observer_holds(database: &BenchDatabase, work: impl FnOnce()) {
    let mut holder = database.session();
    assert!(holder.query("SELECT pg_try_advisory_lock(1)").is_true(0));
    work();
}

/// Lets two, and then eight, want one lock.
pub(crate) fn excludes<L: Locker>(
    name: &str,
    observer: Option<&mut Session>,
    make: impl Fn() -> L,
) {
    let (mut one, mut other) = (make(), make());
    assert!(
        one.take() && !other.take(),
        "{name}: one has it, the other has not"
    );
    if let Some(observer) = observer {
        let mut held = || {
            let text = "SELECT count(*)::text FROM pg_locks WHERE locktype = 'advisory' AND granted \
                        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            observer.query(text).text(0)
        };
        assert_eq!(held(), "1", "{name}: PostgreSQL shows the lock");
        one.release();
        assert_eq!(held(), "0", "{name}: PostgreSQL shows it released");
    } else {
        one.release();
    }
    assert!(
        other.take() && !one.take(),
        "{name}: the other can take it after the release"
    );
    other.release();
    drop((one, other));

    let lockers: Vec<_> = (0..8).map(|_| make()).collect();
    let inside = &AtomicU32::new(0);
    thread::scope(|scope| {
        for mut locker in lockers {
            scope.spawn(move || {
                let mut taken = 0;
                while taken < 25 {
                    if locker.take() {
                        assert_eq!(
                            inside.fetch_add(1, Ordering::SeqCst),
                            0,
                            "{name}: two are inside"
                        );
                        thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        locker.release();
                        taken += 1;
                    }
                }
            });
        }
    });
}
