//! Waiting for what somebody else has: how soon it is handed over, how many get through, what the server does meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use diesel_interlock::{PgPool, PooledGuard, Semaphore};
use sqlx::Postgres;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgAdvisoryLock, PgAdvisoryLockGuard};
use tokio::runtime::{Builder, Runtime};
use workbench::RoundTrips;

use crate::Bench;
use crate::harness::{Contender, Plan, compare, median, quantile, tasks, threads};
use crate::libpq::{Prepared, Session};
use crate::report::{NO_GOAL, Report};
use crate::server::{BenchDatabase, pool};
use crate::session_locks::{lock, number, sqlx_lock, sqlx_pool};

const OURS: &str = "ours, acquire";
const LIBPQ: &str = "libpq, pg_advisory_lock";
const SQLX: &str = "sqlx PgAdvisoryLock";
const CROWD: usize = 32;
const LONG: Duration = Duration::from_secs(60);

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    hand_over_of_a_lock(bench, &database, report);
    crowd_for_a_lock(bench, &database, report);
    hand_over_of_a_slot(bench, &database, report);
    crowd_for_slots(bench, &database, report);
    load(bench, &database, report);
}

/// From before the release is sent until the waiter has its reply.
fn hand_over_of_a_lock(bench: &Bench, database: &BenchDatabase, report: &mut Report) {
    report.scenario("session lock, hand-over to a waiter", 2);
    let pool = database.pool(2);
    let ours = || Ours {
        pool: pool.clone(),
        guard: None,
    };
    let rates = compare(
        bench.options.plan(),
        vec![
            HandOver::between(OURS, database, ours),
            HandOver::between(LIBPQ, database, || Libpq::new(database)),
            HandOver::between(SQLX, database, || Sqlx::new(database)),
        ],
    );
    for reference in [LIBPQ, SQLX] {
        let mut ratio = rates.ratio(OURS, reference);
        (ratio.ours, ratio.reference) = (1e6 / ratio.ours, 1e6 / ratio.reference);
        report.add_ratio(
            &format!("{OURS} / {reference}"),
            "µs from release to start",
            &ratio,
            NO_GOAL,
        );
    }
}

/// Somebody who waits for the lock.
trait Waiter: Send {
    fn acquire(&mut self);
    fn release(&mut self);
}

struct HandOver<W> {
    name: &'static str,
    holder: W,
    waiter: W,
    observer: Session,
}

impl<W: Waiter + 'static> HandOver<W> {
    fn between(
        name: &'static str,
        database: &BenchDatabase,
        make: impl Fn() -> W,
    ) -> Box<dyn Contender> {
        Box::new(Self {
            name,
            holder: make(),
            waiter: make(),
            observer: database.session(),
        })
    }
}

const ONE_WAITS: &str = "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                         AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

impl<W: Waiter> Contender for HandOver<W> {
    fn name(&self) -> &str {
        self.name
    }

    /// Returns how many hand-overs a second there would be if nothing else took time, by their median.
    fn run(&mut self, slice: Duration) -> f64 {
        let Self {
            holder,
            waiter,
            observer,
            ..
        } = self;
        let began = Instant::now();
        let mut times = Vec::new();
        holder.acquire();
        while began.elapsed() < slice {
            let (released, started) = thread::scope(|scope| {
                let waiting = scope.spawn(|| {
                    waiter.acquire();
                    Instant::now()
                });
                // That it waits is what shows that this excludes anybody.
                while !observer.query(ONE_WAITS).is_true(0) {
                    assert!(
                        began.elapsed() < LONG,
                        "{}: nobody waits for a lock that is held",
                        self.name
                    );
                }
                let released = Instant::now();
                holder.release();
                (released, waiting.join().expect("a waiter does not panic"))
            });
            times.push((started - released).as_secs_f64());
            std::mem::swap(holder, waiter);
        }
        holder.release();
        1.0 / median(&times)
    }
}

struct Ours {
    pool: PgPool,
    guard: Option<PooledGuard>,
}

impl Waiter for Ours {
    fn acquire(&mut self) {
        self.guard = Some(lock(0).acquire(&self.pool).unwrap());
    }

    fn release(&mut self) {
        self.guard.take().unwrap().release().unwrap();
    }
}

struct Libpq {
    session: Session,
    take: Prepared,
    release: Prepared,
}

impl Libpq {
    fn new(database: &BenchDatabase) -> Self {
        let mut session = database.session();
        Self {
            take: session.prepare("take", "SELECT pg_advisory_lock($1)"),
            release: session.prepare("release", "SELECT pg_advisory_unlock($1)"),
            session,
        }
    }
}

impl Waiter for Libpq {
    fn acquire(&mut self) {
        self.session.run(&self.take, &[number(0)]);
    }

    fn release(&mut self) {
        assert!(self.session.run(&self.release, &[number(0)]).is_true(0));
    }
}

/// With a runtime on its own thread, which is the quickest to wake up.
struct Sqlx {
    guard: Option<PgAdvisoryLockGuard<'static, PoolConnection<Postgres>>>,
    pool: sqlx::PgPool,
    lock: &'static PgAdvisoryLock,
    runtime: Runtime,
}

impl Sqlx {
    fn new(database: &BenchDatabase) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime can be started");
        let options = sqlx::postgres::PgPoolOptions::new()
            .max_connections(1)
            .test_before_acquire(false);
        Self {
            guard: None,
            pool: runtime
                .block_on(options.connect(database.url()))
                .expect("the server accepts connections"),
            lock: Box::leak(Box::new(sqlx_lock(0))),
            runtime,
        }
    }
}

impl Waiter for Sqlx {
    fn acquire(&mut self) {
        let (pool, lock) = (&self.pool, self.lock);
        let acquiring = async { lock.acquire(pool.acquire().await.unwrap()).await.unwrap() };
        self.guard = Some(self.runtime.block_on(acquiring));
    }

    fn release(&mut self) {
        let guard = self.guard.take().unwrap();
        self.runtime
            .block_on(async { drop(guard.release_now().await.unwrap()) });
    }
}

/// Checks, while the waits are timed, that a holder is alone.
#[derive(Default)]
struct Inside(AtomicU32);

impl Inside {
    fn enter(&self) {
        assert_eq!(self.0.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn crowd_for_a_lock(bench: &Bench, database: &BenchDatabase, report: &mut Report) {
    report.scenario("session lock, one for all", CROWD);
    let inside: Arc<Inside> = Arc::default();
    let pool = database.pool(CROWD);
    let waiters = |name: &str, make: &dyn Fn() -> Box<dyn Waiter>| {
        threads(name, CROWD, |_| {
            let (mut waiter, inside) = (make(), Arc::clone(&inside));
            move || {
                waiter.acquire();
                inside.enter();
                inside.leave();
                waiter.release();
            }
        })
    };
    let ours = || {
        let (pool, guard) = (pool.clone(), None);
        Box::new(Ours { pool, guard }) as Box<dyn Waiter>
    };
    let sqlx = {
        let (pool, lock, inside) = (
            sqlx_pool(&bench.runtime, database, CROWD, false),
            Arc::new(sqlx_lock(0)),
            Arc::clone(&inside),
        );
        tasks(SQLX, CROWD, &bench.runtime, move |_| {
            let (pool, lock, inside) = (pool.clone(), Arc::clone(&lock), Arc::clone(&inside));
            async move {
                let guard = lock.acquire(pool.acquire().await.unwrap()).await.unwrap();
                inside.enter();
                inside.leave();
                drop(guard.release_now().await.unwrap());
            }
        })
    };
    let contenders = vec![
        waiters(OURS, &ours),
        waiters(LIBPQ, &|| Box::new(Libpq::new(database))),
        sqlx,
    ];
    let rates = compare(bench.options.plan(), contenders);
    report.ratio(&rates, OURS, LIBPQ, NO_GOAL);
    report.ratio(&rates, OURS, SQLX, NO_GOAL);
}

/// Waiters for a slot ask again after pauses, so it is the pauses that are measured here.
fn hand_over_of_a_slot(bench: &Bench, database: &BenchDatabase, report: &mut Report) {
    report.scenario("semaphore of one slot, hand-over to a waiter", 2);
    let pool = database.pool(2);
    let semaphore = Semaphore::named("one at a time", 1, LONG);
    let claim = || {
        let claimed = semaphore.acquire_timeout(&pool, LONG).unwrap();
        claimed.admitted().expect("it is released soon")
    };
    let mut times = Vec::new();
    let mut permit = claim();
    for _ in 0..if bench.options.quick { 20 } else { 200 } {
        let (released, started, next) = thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let permit = claim();
                (Instant::now(), permit)
            });
            thread::sleep(Duration::from_micros(fastrand::u64(10_000..60_000)));
            let released = Instant::now();
            permit.release().unwrap();
            let (started, permit) = waiting.join().expect("a waiter does not panic");
            (released, started, permit)
        });
        assert!(
            started > released,
            "nobody has the slot before it is released"
        );
        times.push((started - released).as_secs_f64() * 1e3);
        permit = next;
    }
    permit.release().unwrap();
    report.figure(
        "after a wait of 10 to 60 ms, median",
        "ms from release to start",
        median(&times),
    );
    report.figure(
        "after a wait of 10 to 60 ms, 95 of 100",
        "ms from release to start",
        quantile(&times, 0.95),
    );
}

fn crowd_for_slots(bench: &Bench, database: &BenchDatabase, report: &mut Report) {
    report.scenario("semaphore of 4 slots, wait, claim and release", CROWD);
    let pool = database.pool(CROWD);
    let inside = Arc::new(AtomicU32::new(0));
    let ours = threads("ours", CROWD, |_| {
        let semaphore = Semaphore::named("four at a time", 4, LONG);
        let (pool, inside) = (pool.clone(), Arc::clone(&inside));
        move || {
            let permit = semaphore
                .acquire_timeout(&pool, LONG)
                .unwrap()
                .admitted()
                .expect("others release soon");
            assert!(inside.fetch_add(1, Ordering::SeqCst) < 4, "five are inside");
            inside.fetch_sub(1, Ordering::SeqCst);
            permit.release().unwrap();
        }
    });
    let plan = bench.options.plan();
    let plan = Plan {
        rounds: plan.rounds.min(5),
        slice: plan.slice * 2,
        ..plan
    };
    let rates = compare(plan, vec![ours]);
    report.figure(
        "ours, who all want one of four",
        "operations/s",
        rates.median("ours"),
    );
}

/// What waiting costs the server while nothing is released: on the wire, and in processor time.
fn load(bench: &Bench, database: &BenchDatabase, report: &mut Report) {
    let time = Duration::from_secs(if bench.options.quick { 1 } else { 4 });
    report.scenario("load of those who wait in vain", CROWD);
    let proxy = RoundTrips::in_front_of_url(database.url());
    let through = pool(&proxy.url(), CROWD, false);
    let direct = database.pool(1);

    let full = Semaphore::named("full", 1, LONG);
    let permit = full
        .try_acquire(&direct)
        .unwrap()
        .admitted()
        .expect("nobody else is here");
    waits(report, "of a semaphore", database, &proxy, time, || {
        assert!(full.acquire_timeout(&through, time).unwrap().is_full());
    });
    permit.release().unwrap();

    let held = lock(0);
    let guard = held
        .try_acquire(&direct)
        .unwrap()
        .acquired()
        .expect("nobody else is here");
    waits(report, "of a session lock", database, &proxy, time, || {
        assert!(held.acquire_timeout(&through, time).unwrap().is_busy());
    });
    guard.release().unwrap();
}

fn waits(
    report: &mut Report,
    what: &str,
    database: &BenchDatabase,
    proxy: &RoundTrips,
    time: Duration,
    wait: impl Fn() + Sync,
) {
    let before = (proxy.round_trips(), processor_time(database));
    thread::scope(|scope| {
        for _ in 0..CROWD {
            scope.spawn(&wait);
        }
    });
    let seconds = time.as_secs_f64();
    let trips = (proxy.round_trips() - before.0) as f64 / seconds;
    report.figure(
        &format!("waiters {what}: round trips"),
        "per second, all of them",
        trips,
    );
    let busy = (processor_time(database) - before.1) / seconds * 100.0;
    report.figure(
        &format!("waiters {what}: server's processor time"),
        "% of one core",
        busy,
    );
}

/// How many seconds the processes of the database's sessions have worked, where `/proc` says so.
fn processor_time(database: &BenchDatabase) -> f64 {
    const TICKS: f64 = 100.0;
    let pids = "SELECT string_agg(pid::text, ' ') FROM pg_stat_activity WHERE datname = current_database()";
    let pids = database.session().query(pids).text(0);
    let ticks = |pid: &str| -> Option<f64> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = text.rsplit_once(") ")?.1.split(' ').skip(11);
        Some(fields.next()?.parse::<f64>().ok()? + fields.next()?.parse::<f64>().ok()?)
    };
    pids.split(' ').filter_map(ticks).sum::<f64>() / TICKS
}
