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
    AdvisoryLock, Decision, Error, PgPool, Quota, RateLimit, Semaphore, Throttle, migrations, sync,
    throttled_resources,
};
use workbench::{Cluster, Database};

const TIMEOUT: Duration = Duration::from_secs(30);
const HOUR: f64 = 3600.0;

static SEMAPHORE: Semaphore = Semaphore::named("server clock", 1, TIMEOUT);
static LOCK: AdvisoryLock = AdvisoryLock::named("server clock");
/// A unit comes back after twelve minutes, which no test takes.
static LIMIT: RateLimit = RateLimit::named("server clock", Quota::per_hour(5));
const MINUTE: f64 = 60.0;

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
    let mut attempt = || throttle.details("a test").attempt_on(conn).unwrap();
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

/// How many calls are allowed until one is limited, and how long that one is to wait.
fn spend_all(conn: &mut PgConnection) -> (u32, Duration) {
    let mut allowed = 0;
    loop {
        match LIMIT.key(7).check_on(conn).unwrap().limited() {
            None => allowed += 1,
            Some(limited) => return (allowed, limited.retry_after.unwrap()),
        }
        assert!(allowed <= 5, "more than the burst at once");
    }
}

#[test]
fn after_a_clock_that_is_set_back_a_limited_key_waits_no_longer_than_before() {
    let mut server = Server::start();
    let conn = &mut server.database.connect();
    let unit = Duration::from_secs(12 * 60);
    let (allowed, before) = spend_all(conn);
    assert!(allowed == 5 && before <= unit);

    server.step(-HOUR);
    let state = LIMIT.key(7).peek_on(conn).unwrap();
    assert!(state.remaining == 0 && state.full_in <= 5 * unit);
    let (allowed, retry_after) = spend_all(conn);
    assert_eq!(allowed, 0, "no time has passed");
    assert!(retry_after <= unit, "{retry_after:?}");
    // From that call on, the time counts by the new clock, although that shows the old times.
    server.step(12.0 * MINUTE);
    assert_eq!(spend_all(conn).0, 1);
    server.step(48.0 * MINUTE);
    assert_eq!(spend_all(conn).0, 4);
    server.step(4.0 * MINUTE);
    assert_eq!(spend_all(conn).0, 0);
}

#[test]
fn time_that_passes_unseen_while_the_clock_shows_old_times_does_not_count() {
    let mut server = Server::start();
    let conn = &mut server.database.connect();
    assert_eq!(spend_all(conn).0, 5);
    server.step(-HOUR);
    server.step(59.0 * MINUTE);
    let (allowed, retry_after) = spend_all(conn);
    assert_eq!(allowed, 0);
    assert!(
        retry_after <= Duration::from_secs(12 * 60),
        "{retry_after:?}"
    );
    // A full key is full by every clock.
    server.step(2.0 * HOUR);
    assert_eq!(LIMIT.key(7).peek_on(conn).unwrap().remaining, 5);
    server.step(-HOUR);
    assert_eq!(LIMIT.key(7).peek_on(conn).unwrap().remaining, 5);
    assert_eq!(RateLimit::prune_on(conn).unwrap(), 1);
    assert_eq!(spend_all(conn).0, 5);
}

#[test]
fn a_clock_that_is_set_forward_fills_the_keys_and_not_above_the_burst() {
    let mut server = Server::start();
    let conn = &mut server.database.connect();
    assert_eq!(spend_all(conn).0, 5);
    server.step(HOUR);
    let state = LIMIT.key(7).peek_on(conn).unwrap();
    assert_eq!((state.remaining, state.full_in), (5, Duration::ZERO));
    assert_eq!(spend_all(conn).0, 5);
    server.step(100.0 * HOUR);
    assert_eq!(spend_all(conn).0, 5);
}

#[test]
fn whatever_the_clock_does_no_more_is_allowed_than_the_burst_and_the_time_that_it_went_forward() {
    let mut server = Server::start();
    let conn = &mut server.database.connect();
    let (mut allowed, mut forward) = (spend_all(conn).0, 0.0);
    for minutes in [
        -60.0, 30.0, -20.0, 7.0, 7.0, -90.0, 45.0, -1.0, 1.0, 13.0, -300.0, 24.0, 240.0, -5.0, 36.0,
    ] {
        server.step(minutes * MINUTE);
        forward += f64::max(minutes, 0.0);
        // Not after every step, so that steps back and forth are also taken together.
        if minutes != 45.0 && minutes != -5.0 {
            allowed += spend_all(conn).0;
        }
        let promised = 5.0 + forward / 12.0;
        assert!(f64::from(allowed) <= promised, "{allowed} of {promised}");
    }
    assert!(allowed > 5);
}

#[test]
fn units_are_not_given_back_twice_by_a_clock_that_is_set_back() {
    let mut server = Server::start();
    let conn = &mut server.database.connect();
    let spent = LIMIT.key(7).cost(5).check_on(conn).unwrap();
    let spent = spent.allowed().unwrap();
    server.step(30.0 * MINUTE);
    // Two units and a half of the five have come back.
    assert_eq!(spend_all(conn).0, 2);
    server.step(-HOUR);
    let state = LIMIT.key(7).peek_on(conn).unwrap();
    assert_eq!(state.remaining, 0);
    // So as many are left to give back, although the clock shows a time before they were spent. With the half that was left
    // before, they are three.
    assert_eq!(spent.give_back_on(conn, 5).unwrap(), 3);
    assert_eq!(spend_all(conn).0, 3);
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
