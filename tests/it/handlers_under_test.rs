//! An application's handlers, tried inside a test transaction on a pool of one, and side by side on
//! threads that are not the tests' own.

use std::env;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use diesel::connection::{
    InstrumentationEvent, SimpleConnection, get_default_instrumentation,
    set_default_instrumentation,
};
use diesel::prelude::*;
use diesel::r2d2::{CustomizeConnection, NopConnectionCustomizer, Pool, TestCustomizer};
use diesel_interlock::error::Misplaced;
use diesel_interlock::testing::{self, KeyPrefix};
use diesel_interlock::{
    AdvisoryLock, Attempt, Error, Fence, PgPool, Quota, RateLimit, Semaphore, Throttle, migrations,
    monitor, sync, throttled_resources,
};
use workbench::Database;

use crate::migrations::directory;
use crate::support::{
    Expect, Observer, assert_matches, attempt, backend_pid, foreign_holder, setting,
};

static LOCK: AdvisoryLock = AdvisoryLock::named("handler");

fn pool_of_one(database: &Database) -> PgPool {
    Pool::builder()
        .max_size(1)
        .connection_customizer(Box::new(TestCustomizer))
        .build(database.manager())
        .unwrap()
}

/// As it would be in an application: a session lock around work that has transactions of its own.
fn nightly(pool: &PgPool) -> Result<bool, Error> {
    let Attempt::Acquired(mut guard) = LOCK.try_acquire(pool)? else {
        return Ok(false);
    };
    guard.conn().transaction(|conn| {
        conn.batch_execute(
            "CREATE TABLE IF NOT EXISTS report (id int); INSERT INTO report VALUES (1)",
        )
    })?;
    guard.release()?;
    Ok(true)
}

fn book(conn: &mut PgConnection) -> QueryResult<()> {
    LOCK.transaction(conn, |conn| {
        conn.batch_execute("CREATE TABLE booking (id int)")
    })
}

#[test]
fn session_locks_work_inside_a_test_transaction() {
    let database = Database::new();
    let pool = pool_of_one(&database);
    let pid = backend_pid(&mut pool.get().unwrap());
    for _ in 0..3 {
        assert!(nightly(&pool).unwrap());
    }
    assert_eq!(
        backend_pid(&mut pool.get().unwrap()),
        pid,
        "nothing was discarded"
    );
    let mut observer = Observer::of(&database);
    assert_eq!(observer.all_held(), 0);

    let holder = foreign_holder(&database, &LOCK);
    assert!(!nightly(&pool).unwrap());
    drop(holder);
    observer.assert_free(LOCK.key());
    assert!(nightly(&pool).unwrap());
    assert_eq!(
        observer.in_transaction(),
        1,
        "the test transaction is still open"
    );
}

#[test]
fn a_timed_out_wait_does_not_abort_the_test() {
    let database = Database::new();
    let pool = pool_of_one(&database);
    let conn = &mut pool.get().unwrap();
    conn.batch_execute("CREATE TABLE t (id int); SET LOCAL lock_timeout = '3s'")
        .unwrap();
    let holder = foreign_holder(&database, &LOCK);
    let timeout = Duration::from_millis(20);
    assert!(LOCK.acquire_timeout_on(conn, timeout).unwrap().is_busy());
    assert!(
        LOCK.transaction_timeout(conn, timeout, |_| Ok::<_, Error>(()))
            .unwrap()
            .is_busy()
    );
    conn.batch_execute("INSERT INTO t VALUES (1)").unwrap();
    assert_eq!(setting(conn, "lock_timeout"), "3s");

    let mut observer = Observer::of(&database);
    thread::scope(|scope| {
        let waiter = scope.spawn(|| LOCK.acquire_on(conn).unwrap().release().unwrap());
        while observer.waiters(LOCK.key()) == 0 {}
        drop(holder);
        waiter.join().unwrap();
    });
    assert_eq!(setting(conn, "lock_timeout"), "3s");
    assert_eq!(setting(conn, "statement_timeout"), "0");
    conn.batch_execute("INSERT INTO t VALUES (2)").unwrap();
}

#[test]
fn lock_transaction_is_a_savepoint_there() {
    let database = Database::new();
    let pool = pool_of_one(&database);
    let conn = &mut pool.get().unwrap();
    book(conn).unwrap();
    book(conn).unwrap_err(); // the table exists: only the savepoint is rolled back
    conn.batch_execute("INSERT INTO booking VALUES (1)")
        .unwrap();
    let tried = LOCK.try_transaction(conn, |_| Ok::<_, Error>(7)).unwrap();
    assert_eq!(tried, Attempt::Acquired(7));
    assert_eq!(Observer::of(&database).in_transaction(), 1);
}

#[test]
fn what_would_be_refused_in_production_is_refused_there_too() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    conn.transaction(|conn| {
        assert_matches!(
            LOCK.acquire_on(conn),
            Err(Error::Misplaced(Misplaced::SessionLockInTransaction))
        );
        let nested = LOCK.transaction(conn, |_| Ok::<_, Error>(()));
        assert_matches!(nested, Err(Error::Misplaced(Misplaced::NestedTransaction)));
        LOCK.acquire_xact(conn)
    })
    .unwrap();
}

#[test]
fn migrations_are_refused_there() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    let source = directory("refused", &[]);
    let refused = migrations::run_pending(&mut conn, source.migrations());
    assert_matches!(
        refused,
        Err(Error::Misplaced(Misplaced::CommitsInTransaction))
    );
}

#[test]
fn a_lost_lock_is_noticed_there_too() {
    let database = Database::new();
    let mut conn = database.connect();
    conn.begin_test_transaction().unwrap();
    let mut guard = LOCK.try_acquire_on(&mut conn).unwrap().expect_acquired();
    guard
        .conn()
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    assert_matches!(guard.release(), Err(Error::LockLost { .. }));
    conn.batch_execute("SELECT 1").unwrap();
}

static EXPORT: AdvisoryLock = AdvisoryLock::named("export");
static BOOKING: AdvisoryLock = AdvisoryLock::named("booking");
static LENT: AdvisoryLock = AdvisoryLock::named("lent");
static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(300));
static MAILER: Semaphore = Semaphore::named("mailer", 1, Duration::from_secs(300));
static LEDGER: Fence = Fence::named("ledger");

throttled_resources! {
    enum Resource {
        TenantImport = "tenant import" every Duration::from_secs(3600),
    }
}

const TESTS: usize = 5;

/// The threads on which a web framework lets handlers block, such as those of tokio's `spawn_blocking`:
/// the test does not own them.
struct BlockingThreads {
    work: Option<Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl BlockingThreads {
    fn start() -> Self {
        let (work, inbox) = channel::<Box<dyn FnOnce() + Send>>();
        let thread = thread::spawn(move || inbox.into_iter().for_each(|work| work()));
        Self {
            work: Some(work),
            thread: Some(thread),
        }
    }

    fn spawn_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, result) = channel();
        let work = move || sender.send(work()).unwrap();
        self.work.as_ref().unwrap().send(Box::new(work)).unwrap();
        result.recv().expect("the handler panicked")
    }
}

impl Drop for BlockingThreads {
    fn drop(&mut self) {
        self.work = None;
        let _ = self.thread.take().unwrap().join();
    }
}

/// A handler that takes one of each, and keeps it until every test's handler has tried. Returns what it
/// got, and nothing that it must wait for, so that tests which meet do not hang.
fn handler(pool: &PgPool, test: usize, together: &Barrier) -> Vec<(&'static str, bool)> {
    let lock = LOCK.try_acquire(pool).unwrap();
    let waited = EXPORT
        .acquire_timeout(pool, Duration::from_millis(50))
        .unwrap();
    let permit = GEOCODER.try_acquire(pool).unwrap();

    let conn = &mut pool.get().unwrap();
    let claim = MAILER.claim_on(conn).unwrap();
    let import = Throttle::of(Resource::TenantImport).key(7);
    let decision = attempt(conn, &import, "a handler");
    let mut passed = false;
    for turn in 0..TESTS {
        if turn == test {
            // The last to come has the smallest token.
            let token = i64::try_from(TESTS - turn).unwrap();
            passed = conn.transaction(|conn| LEDGER.pass(conn, token)).is_ok();
        }
        together.wait();
    }
    let booking = conn.transaction(|conn| {
        let booking = BOOKING.try_acquire_xact(conn);
        together.wait();
        booking
    });
    let lent = LENT.try_acquire_on(conn).unwrap();
    together.wait();
    vec![
        ("a lock", !lock.is_busy()),
        ("a lock within a time", !waited.is_busy()),
        ("a slot", !permit.is_full()),
        ("a claim", !claim.is_full()),
        ("a throttle", decision.granted().is_some()),
        ("a fence", passed),
        ("a transaction lock", !booking.unwrap().is_busy()),
        ("a lock on a borrowed connection", !lent.is_busy()),
    ]
}

/// Runs the handler in five tests side by side, each with a pool and blocking threads of its own, on one
/// database. Returns what they did not get.
fn side_by_side(in_test: impl Fn(&KeyPrefix) -> Customizer + Sync) -> Vec<&'static str> {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let _ = sync::<Resource>(&mut database.connect()).unwrap();
    let together = Arc::new(Barrier::new(TESTS));
    let test = |number: usize| {
        let prefix = KeyPrefix::new(format!("test {number}"));
        let _of_this_thread = prefix.enter();
        let pool: PgPool = Pool::builder()
            .max_size(4)
            .connection_customizer(in_test(&prefix))
            .build(database.manager())
            .unwrap();
        let threads = BlockingThreads::start();
        let (of_handler, together) = (pool.clone(), Arc::clone(&together));
        let got = threads.spawn_blocking(move || handler(&of_handler, number, &together));
        let conn = &mut pool.get().unwrap();
        testing::assert_not_held(conn, &LOCK);
        testing::assert_none_in_flight(conn, &GEOCODER);
        got.into_iter()
            .filter(|(_, got)| !got)
            .map(|(what, _)| what)
            .collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let tests: Vec<_> = (0..TESTS)
            .map(|number| scope.spawn(move || test(number)))
            .collect();
        let missed = tests.into_iter().map(|test| test.join().unwrap());
        missed.flatten().collect()
    })
}

type Customizer = Box<dyn CustomizeConnection<PgConnection, diesel::r2d2::Error>>;

#[test]
fn five_tests_whose_pools_carry_a_prefix_do_not_meet_in_their_handlers() {
    assert_eq!(
        side_by_side(|prefix| Box::new(prefix.clone())),
        Vec::<&str>::new()
    );
}

#[test]
fn a_prefix_of_the_tests_own_threads_does_not_reach_their_handlers() {
    let missed = side_by_side(|_| Box::new(NopConnectionCustomizer));
    // Each is had by one of the five.
    assert_eq!(missed.len(), 8 * (TESTS - 1), "{missed:?}");
}

#[test]
fn a_connections_prefix_comes_before_the_threads() {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let (conn, plain) = (&mut database.connect(), &mut database.connect());
    KeyPrefix::new("one").carry_on(conn);
    let _of_this_thread = testing::key_prefix("two");
    let carried = LOCK.try_acquire_on(conn).unwrap().expect_acquired();
    assert!(!LOCK.try_acquire_on(plain).unwrap().is_busy());
    assert!(monitor::holders_of(plain, LOCK.key()).unwrap().is_empty());
    let _of_this_thread = testing::key_prefix("one");
    assert!(LOCK.try_acquire_on(plain).unwrap().is_busy());
    assert_eq!(monitor::holders_of(plain, LOCK.key()).unwrap().len(), 1);
    assert_eq!(carried.key(), LOCK.key());
    carried.release().unwrap();

    let _of_this_thread = testing::key_prefix("two");
    let _claim = GEOCODER.claim_on(conn).unwrap().expect_acquired();
    testing::assert_none_in_flight(plain, &GEOCODER);
    assert_eq!(testing::expire(conn, &GEOCODER).unwrap(), 1);
    assert_eq!(testing::prefixed("geocoder"), "two geocoder");
}

#[test]
fn units_go_back_to_the_prefix_of_the_connection_that_took_them() {
    static API: RateLimit = RateLimit::named("api", Quota::per_day(24).burst(20));
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let (conn, plain) = (&mut database.connect(), &mut database.connect());
    let prefix = KeyPrefix::new("one");
    prefix.carry_on(conn);
    let taken = API.cost(9).check_on(conn).unwrap().allowed().unwrap();
    let beside = API.cost(5).check_on(plain).unwrap().allowed().unwrap();
    assert_eq!(taken.give_back_on(plain, 9).unwrap(), 9);
    assert_eq!(beside.give_back_on(conn, 2).unwrap(), 2);
    assert_eq!(API.peek_on(conn).unwrap().remaining, 20);
    assert_eq!(API.peek_on(plain).unwrap().remaining, 17);

    // The connection tells which units a local limit has.
    let pool = Pool::builder().max_size(1);
    let pool = pool.connection_customizer(Box::new(prefix.clone()));
    let local = API.local(&pool.build(database.manager()).unwrap(), 10);
    assert!(local.unwrap().check("", 4).unwrap().is_allowed());
    assert_eq!(API.peek_on(conn).unwrap().remaining, 16);
    assert_eq!(API.peek_on(plain).unwrap().remaining, 17);
}

#[test]
fn a_guard_keeps_its_prefix_where_the_thread_has_another() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = {
        let _prefix = testing::key_prefix("one");
        LOCK.acquire(&pool).unwrap()
    };
    let watch = guard.watch(&pool, Duration::from_millis(10)).unwrap();
    // Until the server has confirmed the lock once more, which turns the clock back.
    let mut before = watch.last_confirmed();
    while !watch.is_lost() && watch.last_confirmed() >= before {
        before = watch.last_confirmed();
    }
    assert!(guard.is_held().unwrap() && !watch.is_lost());
    guard.release().unwrap();
}

#[test]
fn a_prefix_leaves_the_default_instrumentation_in_place() {
    static EVENTS: AtomicUsize = AtomicUsize::new(0);
    static MARK: &str = "SELECT 'a prefix leaves the default instrumentation in place'";
    fn count(event: InstrumentationEvent<'_>) {
        if matches!(event, InstrumentationEvent::StartQuery { query, .. } if query.to_string() == MARK)
        {
            EVENTS.fetch_add(1, Ordering::Relaxed);
        }
    }
    assert!(
        get_default_instrumentation().is_none(),
        "nobody else sets it"
    );
    set_default_instrumentation(|| Some(Box::new(count))).unwrap();
    let database = Database::new();
    let conn = &mut database.connect();
    KeyPrefix::new("one").carry_on(conn);
    set_default_instrumentation(|| None).unwrap();
    conn.batch_execute(MARK).unwrap();
    assert_eq!(EVENTS.load(Ordering::Relaxed), 1);
}

/// Run in a process of its own, with a prefix in its environment.
#[test]
#[ignore = "run by another test, in a process of its own"]
fn in_a_process_with_a_prefix() {
    assert_eq!(testing::prefixed("geocoder"), r"all\ of\ it geocoder");
    let elsewhere = thread::spawn(|| LOCK.key().id().unwrap()).join().unwrap();
    assert_eq!(LOCK.key().id().unwrap(), elsewhere);
    let _more = testing::key_prefix("one");
    assert_eq!(testing::prefixed("geocoder"), "one geocoder");
    println!("all of it is prefixed");
}

#[test]
fn a_process_carries_the_prefix_of_its_environment() {
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "handlers_under_test::in_a_process_with_a_prefix"])
        .args(["--ignored", "--nocapture"])
        .env(testing::KEY_PREFIX_VARIABLE, "all of it")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains("all of it is prefixed"), "{child:?}");
    assert!(child.status.success(), "{child:?}");
}
