//! Watching over a session lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};

use diesel::connection::{InstrumentationEvent, SimpleConnection};

use crate::half::{
    AdvisoryLock, Database, Error, LockKey, PooledGuard, RoundTrips, Watch, instrumented_pool,
    silent_pool,
};
use crate::support::{Expect, Observer, assert_matches, eventually, foreign_session_holding};

const OFTEN: Duration = Duration::from_millis(10);
const LONG: Duration = Duration::from_secs(600);

fn lock() -> AdvisoryLock {
    AdvisoryLock::new(LockKey::pair(7, -7))
}

#[test]
fn a_killed_session_is_noticed_without_a_call() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    assert!(watch.is_held_within(LONG) && !watch.is_lost());
    Observer::of(&database).kill(guard.backend_pid());
    eventually("the loss is noticed", || watch.is_lost());
    assert!(!watch.is_held_within(LONG));
}

#[test]
fn a_lock_that_another_session_has_taken_since_is_lost_too() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    guard
        .conn()
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    let _other = foreign_session_holding(&database, lock().key().id().unwrap());
    eventually("the loss is noticed", || watch.is_lost());
}

#[test]
fn a_lock_that_is_held_is_confirmed_again_and_again() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock()
        .shared()
        .try_acquire(&pool)
        .unwrap()
        .expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    for _ in 0..3 {
        await_confirmation(&watch);
    }
    assert!(!watch.is_lost());
}

/// Waits until the lock is confirmed once more.
#[track_caller]
fn await_confirmation(watch: &Watch) {
    let mut before = watch.last_confirmed();
    eventually("the last word is younger than it was", || {
        let now = watch.last_confirmed();
        std::mem::replace(&mut before, now) > now
    });
}

#[test]
fn a_watch_queries_no_more_often_than_its_interval() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let other_pool = database.pool(2);
    let other = AdvisoryLock::new(LockKey::pair(7, -8));
    let mut other = other.try_acquire(&other_pool).unwrap().expect_acquired();
    // While the thread queries another lock repeatedly, it queries this one once.
    let asked = proxy.count(|| {
        let watch = guard.watch(&pool, LONG).unwrap();
        let often = other.watch(&other_pool, OFTEN).unwrap();
        for _ in 0..30 {
            await_confirmation(&often);
        }
        assert!(watch.is_held_within(LONG));
    });
    assert!(asked < 20, "{asked} questions");
    guard.release().unwrap();
}

/// The users of a busy pool leave no connection idle: deadpool even hands one that comes back to the next user who waits.
#[test]
fn a_lock_is_confirmed_while_others_wait_for_each_connection_of_the_pool() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let busy = AdvisoryLock::named("busy").shared();
                while !is_over.load(SeqCst) {
                    busy.with(&pool, |conn| conn.batch_execute("SELECT pg_sleep(0.005)"))
                        .unwrap();
                }
            });
        }
        let began = Instant::now();
        let confirmed = catch_unwind(AssertUnwindSafe(|| {
            for _ in 0..3 {
                await_confirmation(&watch);
            }
            // Without a turn it would be confirmed only before the others began.
            eventually("it is confirmed meanwhile", || {
                began.elapsed() > Duration::from_secs(2)
                    && watch.last_confirmed() < Duration::from_secs(1)
            });
        }));
        is_over.store(true, SeqCst);
        confirmed.unwrap();
    });
}

#[test]
fn while_the_pool_is_exhausted_nothing_is_confirmed_and_nothing_lost() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    eventually("the last word is old", || {
        watch.last_confirmed() > 10 * OFTEN
    });
    assert!(!watch.is_lost());
    assert!(!watch.is_held_within(OFTEN));
    guard.release().unwrap();
    assert!(!watch.is_held_within(LONG) && !watch.is_lost());
}

#[test]
fn without_a_watch_nothing_is_queried() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let pool = silent_pool(&proxy, 2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    let clone = watch.clone();
    drop(watch);
    let mut asked = 0;
    eventually("a clone keeps it going", || {
        asked += proxy.count(|| std::thread::sleep(OFTEN));
        asked > 3
    });
    drop(clone);
    eventually("no more questions", || {
        proxy.count(|| std::thread::sleep(10 * OFTEN)) == 0
    });
    guard.release().unwrap();
}

#[test]
fn a_lock_that_is_released_is_neither_held_nor_lost() {
    let database = Database::new();
    let pool = database.pool(2);
    let other = AdvisoryLock::new(LockKey::pair(7, -9));
    let mut other = other.try_acquire(&pool).unwrap().expect_acquired();
    let still_held = other.watch(&pool, OFTEN).unwrap();
    for is_dropped in [false, true] {
        let mut guard = lock()
            .try_acquire(&database.pool(1))
            .unwrap()
            .expect_acquired();
        let watch = guard.watch(&pool, OFTEN).unwrap();
        assert!(watch.is_held_within(LONG));
        if is_dropped {
            drop(guard);
        } else {
            guard.release().unwrap();
        }
        assert!(!watch.is_held_within(Duration::MAX));
        // Enough time for a query.
        for _ in 0..5 {
            await_confirmation(&still_held);
        }
        assert!(!watch.is_lost());
    }
}

#[test]
fn a_release_that_reports_a_loss_ends_the_watch_as_lost() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    // The pool has no second connection, so only the release can report the loss.
    let watch = guard.watch(&pool, LONG).unwrap();
    guard
        .conn()
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    assert_matches!(guard.release(), Err(Error::LockLost { .. }));
    assert!(watch.is_lost() && !watch.is_held_within(LONG));
}

#[test]
fn a_lock_that_is_gone_already_is_lost_from_the_beginning() {
    let database = Database::new();
    // The pool has no second connection for the query.
    let pool = database.pool(1);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    guard
        .conn()
        .batch_execute("SELECT pg_advisory_unlock_all()")
        .unwrap();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    assert!(watch.is_lost() && !watch.is_held_within(Duration::MAX));
    drop(guard);

    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    Observer::of(&database).kill(guard.backend_pid());
    let watch = guard.watch(&pool, OFTEN).unwrap();
    assert!(watch.is_lost() && !watch.is_held_within(Duration::MAX));
}

#[test]
fn an_absurd_interval_ends_no_watch() {
    let database = Database::new();
    let pool = database.pool(3);
    let mut never = lock().try_acquire(&pool).unwrap().expect_acquired();
    let never = never.watch(&pool, Duration::MAX).unwrap();
    // By now the thread has queried it.
    let other = AdvisoryLock::new(LockKey::pair(7, -10));
    for _ in 0..2 {
        let mut guard = other.try_acquire(&pool).unwrap().expect_acquired();
        let watch = guard.watch(&pool, OFTEN).unwrap();
        await_confirmation(&watch);
        Observer::of(&database).kill(guard.backend_pid());
        eventually("the loss is noticed", || watch.is_lost());
    }
    assert!(!never.is_lost());
}

#[test]
fn a_server_that_hangs_delays_no_watch_over_another() {
    let hanging = Database::new();
    let proxy = RoundTrips::in_front_of(&hanging);
    let hanging_pool = silent_pool(&proxy, 4);
    let watched = |number| {
        let lock = AdvisoryLock::new(LockKey::pair(8, number));
        let mut guard = lock.try_acquire(&hanging_pool).unwrap().expect_acquired();
        let watch = guard.watch(&hanging_pool, OFTEN).unwrap();
        (guard, watch)
    };
    let hung: [(PooledGuard, Watch); 2] = [watched(1), watched(2)];
    hung.iter().for_each(|(_, watch)| await_confirmation(watch));
    let _cut = Cut::of(&proxy);
    eventually("nothing is confirmed any more", || {
        hung.iter()
            .all(|(_, watch)| watch.last_confirmed() > 20 * OFTEN)
    });

    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    await_confirmation(&watch);
    Observer::of(&database).kill(guard.backend_pid());
    eventually("the loss is noticed", || watch.is_lost());

    assert!(hung.iter().all(|(_, watch)| !watch.is_lost()));
}

/// A network that loses all packets until this is dropped. A test that fails must not wait for it.
struct Cut<'a>(&'a RoundTrips);

impl<'a> Cut<'a> {
    fn of(network: &'a RoundTrips) -> Self {
        network.cut();
        Self(network)
    }
}

impl Drop for Cut<'_> {
    fn drop(&mut self) {
        self.0.restore();
    }
}

#[test]
fn a_panic_in_the_instrumentation_ends_no_watch() {
    static PANICS_LEFT: AtomicU32 = AtomicU32::new(3);

    fn panic_at_questions(event: InstrumentationEvent<'_>) {
        let is_question = matches!(event, InstrumentationEvent::StartQuery { query, .. }
            if query.to_string().contains("pg_stat_activity AS a"));
        let left = |left: u32| left.checked_sub(1);
        if is_question && PANICS_LEFT.fetch_update(SeqCst, SeqCst, left).is_ok() {
            panic!("in the instrumentation");
        }
    }

    let database = Database::new();
    let pool = instrumented_pool(&database, 4, panic_at_questions);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    let other = AdvisoryLock::new(LockKey::pair(7, -11));
    let mut other = other.try_acquire(&pool).unwrap().expect_acquired();
    let other = other.watch(&pool, OFTEN).unwrap();
    eventually("it has panicked", || PANICS_LEFT.load(SeqCst) == 0);
    await_confirmation(&watch);
    await_confirmation(&other);
    Observer::of(&database).kill(guard.backend_pid());
    eventually("the loss is noticed", || watch.is_lost());
}

/// As a proxy does that closes idle connections: the pool finds only closed ones, and replaces them.
#[test]
fn a_watch_sees_a_loss_where_idle_connections_are_closed_sooner_than_its_interval() {
    let every = Duration::from_millis(600);
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let setting = format!(
        "DO $$ BEGIN IF current_setting('server_version_num')::int >= 140000 THEN \
         ALTER DATABASE {} SET idle_session_timeout = '300ms'; END IF; END $$",
        database.name()
    );
    observer.conn().batch_execute(&setting).unwrap();
    let pool = database.pool(4);
    let mut guard = lock().acquire(&pool).unwrap();
    let watch = guard.watch(&pool, every).unwrap();
    await_confirmation(&watch);
    observer.kill(guard.backend_pid());
    eventually("the loss is noticed", || watch.is_lost());
}

#[test]
fn a_watch_whose_lock_was_released_keeps_no_pool() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    // Queried once, and then not for a year.
    let watch = guard.watch(&pool, Duration::MAX).unwrap();
    drop(pool);
    guard.release().unwrap();
    eventually("its connections are closed", || observer.sessions() == 0);
    assert!(!watch.is_lost());
}

#[test]
fn a_leaked_guard_is_watched_until_its_watch_is_dropped() {
    let database = Database::new();
    let pool = database.pool(2);
    let mut guard = lock().try_acquire(&pool).unwrap().expect_acquired();
    let watch = guard.watch(&pool, OFTEN).unwrap();
    let pid = guard.backend_pid();
    std::mem::forget(guard);
    await_confirmation(&watch);
    Observer::of(&database).kill(pid);
    eventually("the loss is noticed", || watch.is_lost());
}
