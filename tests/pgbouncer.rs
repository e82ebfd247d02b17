//! Behind PgBouncer: which of our primitives hold, and how the others are refused.
//!
//! Needs PgBouncer: `scripts/test_with pgbouncer` installs it and runs this.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use diesel::connection::{CacheSize, InstrumentationEvent, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, CustomizeConnection, Pool};
use diesel_interlock::{
    Admission, AdvisoryLock, Attempt, Error, PgPool, Quota, RateLimit, Semaphore, Sessions,
    Throttle, migrations, probe_sessions, sync, throttled_resources,
};
use workbench::{Cluster, PgBouncer, PoolMode};

throttled_resources! {
    enum Resource {
        Import = "import" every Duration::from_secs(3600),
    }
}

static LOCK: AdvisoryLock = AdvisoryLock::named("pooled");
static GEOCODER: Semaphore = Semaphore::named("geocoder", 4, Duration::from_secs(30));

/// PgBouncer before 1.21 knows nothing of prepared statements.
#[derive(Debug)]
struct NoStatementCache;

impl<E> CustomizeConnection<PgConnection, E> for NoStatementCache {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), E> {
        conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        Ok(())
    }
}

/// A server with our schema, and a pooler in front of it.
fn pooled(mode: PoolMode, sessions: u32) -> (Cluster, PgBouncer) {
    let cluster = Cluster::start();
    let conn = &mut PgConnection::establish(&cluster.url("postgres")).unwrap();
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    let pooler = PgBouncer::in_front_of(&cluster, mode, sessions);
    (cluster, pooler)
}

fn pool(pooler: &PgBouncer, size: u32) -> PgPool {
    Pool::builder()
        .max_size(size)
        .connection_customizer(Box::new(NoStatementCache))
        .build(ConnectionManager::new(pooler.url("postgres")))
        .unwrap()
}

#[test]
fn a_pooler_that_crashes_takes_the_session_locks_with_it() {
    let (_cluster, mut pooler) = pooled(PoolMode::Session, 4);
    let pool = pool(&pooler, 2);
    let guard = LOCK.acquire(&pool).unwrap();
    pooler.crash();
    assert!(matches!(guard.release(), Err(Error::LockLost { .. })));
    let again = LOCK.acquire_timeout(&pool, Duration::from_secs(60));
    assert!(matches!(again, Ok(Attempt::Acquired(_))), "{again:?}");
}

#[test]
fn a_pooler_that_is_paused_or_reloaded_takes_nothing_away() {
    let (_cluster, mut pooler) = pooled(PoolMode::Transaction, 2);
    let pool = pool(&pooler, 2);
    let permit = GEOCODER.try_acquire(&pool).unwrap().admitted().unwrap();
    pooler.pause();
    pooler.reload();
    std::thread::scope(|scope| {
        let released = scope.spawn(|| permit.release());
        pooler.resume();
        released.join().unwrap().unwrap();
    });
}

#[test]
fn in_transaction_mode_session_locks_are_refused() {
    for sessions in [1, 2, 8] {
        let (_cluster, pooler) = pooled(PoolMode::Transaction, sessions);
        let pool = pool(&pooler, 4);
        assert_eq!(probe_sessions(&pool).unwrap(), Sessions::Shared);
        for _ in 0..2 {
            let refused = LOCK.try_acquire(&pool);
            assert!(matches!(refused, Err(Error::SharedSessions)), "{refused:?}");
        }
        let refused = LOCK.acquire_timeout(&pool, Duration::from_secs(1));
        assert!(matches!(refused, Err(Error::SharedSessions)), "{refused:?}");
    }
}

#[test]
fn in_transaction_mode_the_first_lock_of_a_pool_without_idle_connections_is_refused() {
    let (_cluster, pooler) = pooled(PoolMode::Transaction, 4);
    for _ in 0..3 {
        let pool = Pool::builder()
            .max_size(4)
            .min_idle(Some(0))
            .connection_customizer(Box::new(NoStatementCache))
            .build(ConnectionManager::new(pooler.url("postgres")))
            .unwrap();
        let refused = LOCK.try_acquire(&pool);
        assert!(matches!(refused, Err(Error::SharedSessions)), "{refused:?}");
    }
}

/// Over a pooler with two sessions, the one that was not used last becomes the next one.
fn use_both_sessions(url: &str) {
    let [mut last, mut next] = [(); 2].map(|()| PgConnection::establish(url).unwrap());
    last.batch_execute("BEGIN").unwrap();
    next.batch_execute("BEGIN").unwrap();
    last.batch_execute("COMMIT").unwrap();
    next.batch_execute("COMMIT").unwrap();
}

/// Makes the pooler use another session next, just before the second connection of a pool is asked for its session. A session
/// that the pooler has just opened does the same.
#[derive(Debug, Clone)]
struct AnotherSessionNext {
    url: String,
    asked: Arc<AtomicUsize>,
}

impl<E> CustomizeConnection<PgConnection, E> for AnotherSessionNext {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), E> {
        conn.set_prepared_statement_cache_size(CacheSize::Disabled);
        let Self { url, asked } = self.clone();
        conn.set_instrumentation(move |event: InstrumentationEvent<'_>| {
            let InstrumentationEvent::StartQuery { query, .. } = event else {
                return;
            };
            let asks = query.to_string().contains("pg_backend_pid");
            if asks && asked.fetch_add(1, Ordering::SeqCst) == 1 {
                use_both_sessions(&url);
            }
        });
        Ok(())
    }
}

#[test]
fn a_pooler_that_opens_a_session_meanwhile_is_detected() {
    let (_cluster, pooler) = pooled(PoolMode::Transaction, 2);
    // From now on both sessions are open, so that nothing else changes their order.
    use_both_sessions(&pooler.url("postgres"));
    let another = AnotherSessionNext {
        url: pooler.url("postgres"),
        asked: Arc::default(),
    };
    let pool = Pool::builder()
        .max_size(2)
        .connection_customizer(Box::new(another.clone()))
        .build(ConnectionManager::new(&another.url))
        .unwrap();
    assert_eq!(probe_sessions(&pool).unwrap(), Sessions::Shared);
    // The first comparisons told its sessions apart.
    assert_eq!(another.asked.load(Ordering::SeqCst), 5);
}

#[test]
fn in_session_mode_and_without_a_pooler_session_locks_are_taken() {
    let (cluster, pooler) = pooled(PoolMode::Session, 8);
    let direct = Pool::builder()
        .max_size(4)
        .build(ConnectionManager::new(cluster.url("postgres")))
        .unwrap();
    for pool in [pool(&pooler, 4), direct] {
        assert_eq!(probe_sessions(&pool).unwrap(), Sessions::Own);
        let Attempt::Acquired(guard) = LOCK.try_acquire(&pool).unwrap() else {
            panic!("the lock is taken");
        };
        assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
        guard.release().unwrap();
    }
}

#[test]
fn in_a_pool_of_one_a_pooler_is_not_detected() {
    let (_cluster, pooler) = pooled(PoolMode::Transaction, 4);
    assert_eq!(
        probe_sessions(&pool(&pooler, 1)).unwrap(),
        Sessions::Unknown
    );
}

#[test]
fn a_busy_pooler_is_detected_too() {
    let (_cluster, pooler) = pooled(PoolMode::Transaction, 8);
    let done = AtomicUsize::new(0);
    let busy = pool(&pooler, 4);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let conn = &mut busy.get().unwrap();
                while done.load(Ordering::Relaxed) == 0 {
                    conn.batch_execute("SELECT 1").unwrap();
                }
            });
        }
        let pool = pool(&pooler, 4);
        let shared = (0..20).filter(|_| probe_sessions(&pool).unwrap() == Sessions::Shared);
        assert!(shared.count() > 0);
        done.store(1, Ordering::Relaxed);
    });
}

#[test]
fn in_transaction_mode_transaction_locks_throttles_rate_limits_and_semaphores_hold() {
    let (_cluster, pooler) = pooled(PoolMode::Transaction, 4);
    all_but_session_locks_hold(&pool(&pooler, CLIENTS as u32));
}

#[test]
fn prepared_statements_work_where_the_pooler_follows_them_and_fail_loudly_where_not() {
    let (_cluster, pooler) = pooled(PoolMode::Transaction, 4);
    if PgBouncer::follows_prepared_statements() {
        let pool = Pool::builder()
            .max_size(CLIENTS as u32)
            .build(ConnectionManager::new(pooler.url("postgres")))
            .unwrap();
        all_but_session_locks_hold(&pool);
        return;
    }
    eprintln!("this PgBouncer is older than 1.21");
    // Sooner or later a client meets a session that knows no statement of its name, or another client's of the same one.
    let connect = |_| PgConnection::establish(&pooler.url("postgres")).unwrap();
    let mut clients: Vec<_> = (0..CLIENTS).map(connect).collect();
    let start = Barrier::new(CLIENTS);
    let failed = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for conn in &mut clients {
            scope.spawn(|| {
                start.wait();
                for round in 0..ROUNDS {
                    let import = Throttle::of(Resource::Import).key(round);
                    match import.details("me").attempt_on(conn) {
                        Ok(_) => {}
                        Err(error) => {
                            assert!(causes(&error).contains("prepared statement"), "{error:?}");
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    assert!(failed.into_inner() > 0);
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

const CLIENTS: usize = 8;
const ROUNDS: usize = 50;

fn all_but_session_locks_hold(pool: &PgPool) {
    pool.get()
        .unwrap()
        .batch_execute("CREATE TABLE counter AS SELECT 0 AS n")
        .unwrap();
    let start = Barrier::new(CLIENTS);
    let [granted, allowed, in_flight, most] = [const { AtomicUsize::new(0) }; 4];
    // Nothing is refilled while the test runs.
    let api = RateLimit::named("api", Quota::per_day(24).burst(100));
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                start.wait();
                for round in 0..ROUNDS {
                    let conn = &mut pool.get().unwrap();
                    LOCK.transaction(conn, |conn| {
                        // Lost if two read it at once.
                        conn.batch_execute(
                            "CREATE TEMP TABLE before ON COMMIT DROP AS SELECT n FROM counter; \
                             UPDATE counter SET n = (SELECT n + 1 FROM before)",
                        )
                    })
                    .unwrap();
                    let import = Throttle::of(Resource::Import).key(round);
                    if import
                        .details("me")
                        .attempt_on(conn)
                        .unwrap()
                        .granted()
                        .is_some()
                    {
                        granted.fetch_add(1, Ordering::Relaxed);
                    }
                    if api.check_on(conn).unwrap().is_allowed() {
                        allowed.fetch_add(1, Ordering::Relaxed);
                    }
                    let claim = GEOCODER.claim_on(conn).unwrap();
                    if let Admission::Admitted(claim) = claim {
                        let now = in_flight.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        in_flight.fetch_sub(1, Ordering::SeqCst);
                        assert!(GEOCODER.complete_on(conn, claim.id).unwrap());
                    }
                }
            });
        }
    });
    let counted = diesel::sql_query("SELECT 1 FROM counter WHERE n = 400");
    assert_eq!(counted.execute(&mut pool.get().unwrap()), Ok(1));
    assert_eq!(granted.into_inner(), ROUNDS);
    assert_eq!(allowed.into_inner(), 100);
    assert!((1..=4).contains(&most.into_inner()));
}
