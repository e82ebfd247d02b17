//! What depends on the server's clock, tried on a server whose clock is set: `scripts/test_with libfaketime`.
//!
//! Nothing here waits on the server: libfaketime gives signal handlers the true time, so PostgreSQL's own timeouts do not
//! expire there.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use diesel::dsl::sql;
use diesel::pg::PgConnection;
use diesel::prelude::*;
use diesel::sql_types::Double;
use diesel_interlock::{
    AdvisoryLock, Decision, Error, PgPool, Semaphore, Throttle, migrations, sync,
    throttled_resources,
};
use workbench::{Cluster, Database};

const TIMEOUT: Duration = Duration::from_secs(30);
const HOUR: f64 = 3600.0;

static SEMAPHORE: Semaphore = Semaphore::named("server clock", 1, TIMEOUT);
static LOCK: AdvisoryLock = AdvisoryLock::named("server clock");

throttled_resources! {
    /// The throttle.
    enum Resource {
        Report = "report" every Duration::from_secs(15),
    }
}

/// A server whose clock a file sets.
struct Server {
    database: Database,
    _cluster: Cluster,
    clock: PathBuf,
    set_to: f64,
}

impl Server {
    fn start() -> Self {
        let library = std::env::var("LIBFAKETIME")
            .expect("LIBFAKETIME names libfaketime.so.1: scripts/test_with libfaketime");
        let clock = std::env::temp_dir().join(format!("interlock-clock-{}", unique()));
        fs::write(&clock, "+0").unwrap();
        let cluster = Cluster::builder()
            .env("LD_PRELOAD", library)
            .env("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap())
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .start();
        let database = cluster.database();
        let conn = &mut database.connect();
        migrations::install(conn).unwrap();
        let _ = sync::<Resource>(conn).unwrap();
        Self {
            database,
            _cluster: cluster,
            clock,
            set_to: 0.0,
        }
    }

    fn pool(&self) -> PgPool {
        self.database.pool(3)
    }

    fn now(&self) -> f64 {
        diesel::select(sql::<Double>(
            "extract(epoch FROM clock_timestamp())::float8",
        ))
        .get_result(&mut self.database.connect())
        .unwrap()
    }

    /// Sets the clock forward, or back.
    fn step(&mut self, seconds: f64) {
        let before = self.now();
        self.set_to += seconds;
        fs::write(&self.clock, format!("{:+}", self.set_to)).unwrap();
        let stepped = self.now() - before;
        assert!((stepped - seconds).abs() < 60.0, "the clock went {stepped}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.clock);
    }
}

fn unique() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{}-{number}", std::process::id())
}

#[test]
fn a_clock_that_is_set_forward_ends_permits_early_and_the_release_and_the_token_tell() {
    let mut server = Server::start();
    let pool = server.pool();
    let first = SEMAPHORE.try_acquire(&pool).unwrap().admitted().unwrap();
    server.step(HOUR);
    // Nobody has told this machine.
    assert!(first.remaining() > Duration::ZERO);
    let second = SEMAPHORE.try_acquire(&pool).unwrap().admitted().unwrap();
    assert!(second.fencing_token() > first.fencing_token());
    assert!(matches!(first.release(), Err(Error::TimedOut { .. })));
    second.release().unwrap();
}

#[test]
fn a_clock_that_is_set_back_keeps_slots_taken_and_never_gives_one_twice() {
    let mut server = Server::start();
    let pool = server.pool();
    let first = SEMAPHORE.try_acquire(&pool).unwrap().admitted().unwrap();
    server.step(-HOUR);
    assert!(SEMAPHORE.try_acquire(&pool).unwrap().is_full());
    let token = first.fencing_token();
    first.release().unwrap();
    let mut second = SEMAPHORE.try_acquire(&pool).unwrap().admitted().unwrap();
    assert!(second.fencing_token() > token);
    server.step(-HOUR);
    second.renew().unwrap();
    assert!(second.remaining() <= TIMEOUT);
    second.release().unwrap();
}

#[test]
fn a_throttle_follows_the_clock_and_says_until_when() {
    let mut server = Server::start();
    let conn: &mut PgConnection = &mut server.database.connect();
    let throttle = Throttle::of(Resource::Report);
    let mut attempt = || throttle.clone().details("a test").attempt_on(conn).unwrap();
    assert!(matches!(attempt(), Decision::Granted(_)));
    server.step(-HOUR);
    match attempt() {
        Decision::Denied(denial) => {
            assert!(denial.retry_after > Duration::from_secs(3500));
        }
        granted @ Decision::Granted(_) => panic!("{granted:?}"),
    }
    server.step(2.0 * HOUR);
    assert!(matches!(attempt(), Decision::Granted(_)));
}

#[test]
fn locks_and_watches_do_not_depend_on_the_clock() {
    let mut server = Server::start();
    let pool = server.pool();
    let mut guard = LOCK.acquire(&pool).unwrap();
    let watch = guard.watch(&pool, Duration::from_millis(10)).unwrap();
    for step in [HOUR, -2.0 * HOUR] {
        server.step(step);
        assert!(guard.is_held().unwrap());
        let before = std::time::Instant::now();
        while watch.last_confirmed() >= before.elapsed() {
            assert!(before.elapsed() < TIMEOUT, "nothing is confirmed");
            std::thread::yield_now();
        }
        assert!(!watch.is_lost());
        assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
    }
    guard.release().unwrap();
}
