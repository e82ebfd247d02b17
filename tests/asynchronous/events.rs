//! Both halves log the same events, with the same fields, for the same course.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use diesel::connection::InstrumentationEvent;
use diesel::prelude::*;
use diesel_async::{AsyncConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::{RateLimit, Semaphore, Throttle};
use diesel_interlock::{
    AdvisoryLock, Attempt, CheckAll, Error, LockKey, Quota, asynchronous, throttled_resources,
};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use workbench::Database;

use crate::dropping::{KEY, ONE_HOLDER, Observer, Requests, poll_times};
use crate::run;

type Fields = BTreeMap<&'static str, String>;

/// The events of all threads.
static LOGGED: Mutex<Vec<Fields>> = Mutex::new(Vec::new());

thread_local! {
    /// Whether the subscriber panics at each event of this thread that tells of a dropped future.
    static PANICS: Cell<bool> = const { Cell::new(false) };
}

struct Collector;

struct Visitor(Fields);

impl Visit for Visitor {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() != "diesel_interlock" {
            return;
        }
        let mut visitor = Visitor(Fields::new());
        event.record(&mut visitor);
        let mut fields = visitor.0;
        fields.insert("level", event.metadata().level().to_string());
        if let Some(span) = context.event_span(event) {
            fields.insert("span", span.name().to_owned());
        }
        fields.insert("thread", this_thread());
        let is_dropped = fields["outcome"] == "\"dropped\"";
        LOGGED.lock().unwrap().push(fields);
        if PANICS.get() && is_dropped {
            panic!("in the subscriber");
        }
    }
}

fn this_thread() -> String {
    format!("{:?}", thread::current().id())
}

fn collect() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let subscriber = tracing_subscriber::registry().with(Collector);
        tracing::subscriber::set_global_default(subscriber).unwrap();
    });
}

/// The events of a lock, without the values that differ from run to run.
fn logged(key: &LockKey) -> Vec<Fields> {
    let of_key = |fields: &&Fields| fields.get("key") == Some(&key.to_string());
    let mut events: Vec<_> = LOGGED
        .lock()
        .unwrap()
        .iter()
        .filter(of_key)
        .cloned()
        .collect();
    for fields in &mut events {
        for (field, value) in fields.iter_mut() {
            match *field {
                "waited_ms" | "held_ms" => assert!(value.parse::<u64>().is_ok(), "{value}"),
                "key" | "thread" => {}
                "error" => {
                    *value = value.replace(&key.to_string(), "");
                    continue;
                }
                _ => continue,
            }
            value.clear();
        }
    }
    events
}

fn end_session(database: &Database, pid: i32) {
    let end = format!("SELECT pg_terminate_backend({pid}, 1000)");
    diesel::sql_query(end)
        .execute(&mut database.connect())
        .unwrap();
}

const SHORT: Duration = Duration::from_millis(20);

fn blocking(lock: &AdvisoryLock) {
    let database = Database::new();
    let (pool, conn) = (database.pool(2), &mut database.connect());
    let guard = lock.acquire(&pool).unwrap();
    assert!(lock.try_acquire(&pool).unwrap().is_busy());
    assert!(lock.acquire_timeout(&pool, SHORT).unwrap().is_busy());
    assert!(
        lock.try_transaction(conn, |_| Ok::<_, Error>(()))
            .unwrap()
            .is_busy()
    );
    guard.release().unwrap();
    lock.transaction(conn, |_| Ok::<_, Error>(())).unwrap();
    lock.acquire_xact(conn).unwrap_err();
    let busy = [pool.get().unwrap(), pool.get().unwrap()];
    let tried = lock.acquire_timeout(&pool, SHORT);
    assert!(matches!(tried, Err(Error::Pool(_))));
    drop(busy);
    let Attempt::Acquired(guard) = lock.try_acquire_on(conn).unwrap() else {
        panic!("it is free");
    };
    guard.release().unwrap();
    let guard = lock.acquire(&pool).unwrap();
    end_session(&database, guard.backend_pid());
    assert!(matches!(guard.release(), Err(Error::LockLost { .. })));
}

async fn awaited(lock: &asynchronous::AdvisoryLock) {
    let database = Database::new();
    let (pool, conn) = (database.deadpool(2), &mut database.connect_async().await);
    let guard = lock.acquire(&pool).await.unwrap();
    assert!(lock.try_acquire(&pool).await.unwrap().is_busy());
    assert!(lock.acquire_timeout(&pool, SHORT).await.unwrap().is_busy());
    let tried = lock
        .try_transaction(conn, async |_| Ok::<_, Error>(()))
        .await;
    assert!(tried.unwrap().is_busy());
    guard.release().await.unwrap();
    lock.transaction(conn, async |_| Ok::<_, Error>(()))
        .await
        .unwrap();
    lock.acquire_xact(conn).await.unwrap_err();
    let busy = [pool.get().await.unwrap(), pool.get().await.unwrap()];
    let tried = lock.acquire_timeout(&pool, SHORT).await;
    assert!(matches!(tried, Err(Error::Pool(_))));
    drop(busy);
    let Attempt::Acquired(guard) = lock.try_acquire_on(conn).await.unwrap() else {
        panic!("it is free");
    };
    guard.release().await.unwrap();
    let guard = lock.acquire(&pool).await.unwrap();
    end_session(&database, guard.backend_pid());
    assert!(matches!(guard.release().await, Err(Error::LockLost { .. })));
}

#[test]
fn a_guard_on_a_lent_connection_logs_its_release_when_it_is_dropped() {
    collect();
    let lock = asynchronous::AdvisoryLock::named("dropped on a lent connection");
    run({
        let lock = lock.clone();
        async move {
            let database = Database::new();
            let conn = &mut database.connect_async().await;
            drop(lock.try_acquire_on(conn).await.unwrap());
        }
    });
    let events = logged(lock.key());
    let last = events.last().unwrap();
    let expected = [
        ("operation", "\"release\""),
        ("outcome", "\"deferred\""),
        ("held_ms", ""),
    ];
    for (field, value) in expected {
        assert_eq!(last.get(field).map(String::as_str), Some(value), "{last:?}");
    }
}

#[test]
fn a_guard_that_is_dropped_behind_a_statement_logs_its_release() {
    collect();
    let lock = asynchronous::AdvisoryLock::named("dropped behind a statement");
    let database = Database::new();
    run({
        let (lock, pool) = (lock.clone(), database.deadpool(1));
        async move {
            let mut guard = lock.acquire(&pool).await.unwrap();
            let sleep = guard.conn().batch_execute("SELECT pg_sleep(600)");
            tokio::time::timeout(SHORT, sleep).await.unwrap_err();
            drop(guard);
            // The connection is discarded, and another one is there.
            lock.acquire(&pool).await.unwrap().release().await.unwrap();
        }
    });
    let releases = logged(lock.key());
    let mut releases = releases
        .iter()
        .filter(|it| it["operation"].contains("release"));
    assert_eq!(releases.next().unwrap()["outcome"], "\"deferred\"");
    assert_eq!(releases.next().unwrap()["outcome"], "\"released\"");
}

#[test]
fn both_halves_log_the_same_course_alike() {
    collect();
    let lock = AdvisoryLock::named("logged by the blocking half");
    blocking(&lock);
    let expected = logged(lock.key());
    assert_eq!(expected.len(), 12, "{expected:#?}");
    let lock = asynchronous::AdvisoryLock::named("logged by the asynchronous half");
    run({
        let lock = lock.clone();
        async move { awaited(&lock).await }
    });
    let mut found = logged(lock.key());
    // The causes of a lost session are worded by libpq, and by tokio-postgres.
    let mut expected = expected;
    for events in [&mut found, &mut expected] {
        let lost = events.last_mut().unwrap().get_mut("error").unwrap();
        lost.truncate(lost.find(": ").unwrap_or(lost.len()));
    }
    assert_eq!(found, expected);
}

#[test]
fn a_release_whose_future_was_dropped_is_told() {
    collect();
    run(async {
        let database = Database::new();
        let (pool, conn) = (database.deadpool(1), &mut database.connect_async().await);
        for (number, is_lent) in [(1, false), (2, true)] {
            let key = LockKey::pair(4242, number);
            let lock = asynchronous::AdvisoryLock::new(key.clone());
            if is_lent {
                let guard = lock.acquire_on(conn).await.unwrap();
                assert!(poll_times(guard.release(), 1).await.is_none());
            } else {
                let guard = lock.acquire(&pool).await.unwrap();
                assert!(poll_times(guard.release(), 1).await.is_none());
            }
            let outcomes: Vec<_> = logged(&key)
                .into_iter()
                .map(|fields| (fields["operation"].clone(), fields["outcome"].clone()))
                .collect();
            let told =
                |operation: &str, outcome: &str| (format!("{operation:?}"), format!("{outcome:?}"));
            assert_eq!(
                outcomes,
                [told("acquire", "acquired"), told("release", "deferred")]
            );
        }
    });
}

/// Runs a test and all its tasks on this thread, and returns the events of this thread: level, operation and outcome.
fn logged_here(test: impl Future<Output = ()>) -> Vec<String> {
    collect();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(test);
    let here = this_thread();
    let logged = LOGGED.lock().unwrap();
    let events = logged.iter().filter(|fields| fields["thread"] == here);
    let brief = |fields: &Fields| {
        let names = ["level", "operation", "outcome"].map(|field| fields[field].trim_matches('"'));
        names.join(" ")
    };
    events.map(brief).collect()
}

/// Installs on another thread, because an installation takes a lock.
fn installed() -> Database {
    let install = || {
        let database = Database::new();
        diesel_interlock::migrations::install(&mut database.connect()).unwrap();
        database
    };
    thread::spawn(install).join().unwrap()
}

fn here(field: &str) -> Vec<Option<String>> {
    let here = this_thread();
    let logged = LOGGED.lock().unwrap();
    let events = logged.iter().filter(|fields| fields["thread"] == here);
    events.map(|fields| fields.get(field).cloned()).collect()
}

#[test]
fn a_dropped_wait_is_logged_and_its_connection_is_a_warning_only_after_a_panic() {
    let lock = asynchronous::AdvisoryLock::new(LockKey::bigint(KEY));
    let events = logged_here(async {
        let database = Database::new();
        let pool = database.deadpool(2);
        for panics in [false, true] {
            let mut observer = Observer::of(&database);
            let guard = lock.acquire(&pool).await.unwrap();
            let one_waits = Requests {
                waiting: 1,
                ..ONE_HOLDER
            };
            let mut waits = tokio::task::spawn_blocking(move || {
                observer.until(one_waits, Duration::from_secs(60));
            });
            let mut acquire = Box::pin(lock.acquire(&pool));
            tokio::select! {
                _ = &mut acquire => panic!("another guard holds it"),
                waits = &mut waits => waits.unwrap(),
            }
            let dropped = catch_unwind(AssertUnwindSafe(move || {
                let _acquire = acquire;
                assert!(!panics, "in the protected work");
            }));
            assert_eq!(dropped.is_err(), panics);
            // The pool has room again when the connection of the wait is discarded.
            drop(pool.get().await.unwrap());
            guard.release().await.unwrap();
        }
    });
    assert_eq!(
        events,
        [
            "DEBUG acquire acquired",
            "DEBUG acquire dropped",
            "DEBUG discard discarded",
            "DEBUG release released",
            "DEBUG acquire acquired",
            "DEBUG acquire dropped",
            "WARN discard discarded",
            "DEBUG release released",
        ]
    );
    assert_eq!(here("span")[1].as_deref(), Some("acquire"));
    let waited = here("waited_ms")[1].clone();
    assert!(waited.unwrap().parse::<u64>().is_ok());
}

throttled_resources! {
    enum Resource {
        Import = "import" every Duration::from_secs(60),
    }
}

#[test]
fn each_operation_that_is_dropped_is_logged_once_and_one_that_never_began_is_not() {
    let events = logged_here(async {
        let database = installed();
        let pool = database.deadpool(1);
        let only = pool.get().await.unwrap();
        let lock = asynchronous::AdvisoryLock::named("dropped");
        let semaphore = Semaphore::named("dropped", 1, Duration::from_secs(60));
        let limit = RateLimit::named("dropped", Quota::per_hour(1));
        let import = Throttle::of(Resource::Import).details("me");
        macro_rules! dropped {
            ($operation:expr) => {
                drop($operation);
                assert!(poll_times($operation, 1).await.is_none());
            };
        }
        dropped!(lock.try_acquire(&pool));
        dropped!(lock.acquire(&pool));
        dropped!(lock.acquire_timeout(&pool, Duration::from_secs(60)));
        dropped!(semaphore.try_acquire(&pool));
        dropped!(semaphore.acquire(&pool));
        dropped!(semaphore.acquire_timeout(&pool, Duration::from_secs(60)));
        dropped!(limit.check(&pool));
        dropped!(RateLimit::check_all(&pool, &[&limit]));
        dropped!(limit.reserve(&pool, Duration::ZERO));
        dropped!(limit.acquire_timeout(&pool, Duration::from_secs(60)));
        dropped!(import.attempt(&pool));
        dropped!(lock.acquire_on(&mut database.connect_async().await));
        dropped!(semaphore.claim_on(&mut database.connect_async().await));
        dropped!(limit.check_on(&mut database.connect_async().await));
        dropped!(import.attempt_on(&mut database.connect_async().await));
        drop(only);
    });
    let expected = [
        [("acquire", 6), ("check", 2), ("reserve", 2), ("attempt", 1)].as_slice(),
        &[("acquire", 2), ("check", 1), ("attempt", 1)],
    ];
    let expected: Vec<_> = expected
        .concat()
        .into_iter()
        .flat_map(|(operation, times)| vec![format!("DEBUG {operation} dropped"); times])
        .collect();
    assert_eq!(events, expected);
}

#[test]
fn an_operation_that_panics_was_not_dropped() {
    let events = logged_here(async {
        let database = Database::new();
        let lock = asynchronous::AdvisoryLock::named("panics");
        let mut conn = database.connect_async().await;
        conn.set_instrumentation(|event: InstrumentationEvent<'_>| {
            if matches!(event, InstrumentationEvent::StartQuery { .. }) {
                panic!("in the instrumentation");
            }
        });
        let mut acquire = Box::pin(lock.acquire_on(&mut conn));
        let panicked = poll_fn(|context| {
            let polled = catch_unwind(AssertUnwindSafe(|| {
                acquire.as_mut().poll(context).is_ready()
            }));
            Poll::Ready(polled.is_err())
        });
        assert!(panicked.await);
    });
    assert_eq!(events, [""; 0]);
}

#[test]
fn a_subscriber_that_panics_at_a_drop_ends_nothing() {
    let events = logged_here(async {
        let database = Database::new();
        let pool = database.deadpool(1);
        let only = pool.get().await.unwrap();
        let lock = asynchronous::AdvisoryLock::named("dropped while a panic unwinds");
        PANICS.set(true);
        for while_unwinding in [false, true] {
            let mut acquire = Box::pin(lock.acquire(&pool));
            poll_fn(|context| {
                assert!(acquire.as_mut().poll(context).is_pending());
                Poll::Ready(())
            })
            .await;
            let caught = catch_unwind(AssertUnwindSafe(move || {
                let _acquire = acquire;
                assert!(!while_unwinding, "in the protected work");
            }));
            assert_eq!(caught.is_err(), while_unwinding);
        }
        PANICS.set(false);
        drop(only);
    });
    assert_eq!(events, ["DEBUG acquire dropped"; 2]);
}

#[test]
fn a_slot_and_several_limits_are_logged_as_in_the_blocking_half() {
    logged_here(async {
        let database = installed();
        let (pool, conn) = (database.deadpool(1), &mut database.connect_async().await);
        let semaphore = Semaphore::named("slots", 1, Duration::from_secs(60));
        semaphore
            .acquire(&pool)
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        let waited = semaphore.acquire_timeout(&pool, SHORT).await.unwrap();
        waited.admitted().unwrap().release().await.unwrap();
        let tried = semaphore.try_acquire(&pool).await.unwrap();
        tried.admitted().unwrap().release().await.unwrap();
        let _claim = semaphore.claim_on(conn).await.unwrap();

        let [api, login] = [("api", 100), ("login", 1)]
            .map(|(name, units)| RateLimit::named(name, Quota::per_hour(units)));
        assert!(login.check_on(conn).await.unwrap().is_allowed());
        let limited = RateLimit::check_all(&pool, &[&api, &login]).await;
        assert!(matches!(limited, Ok(CheckAll::Limited { by: 1, .. })));
        let limited = RateLimit::check_all_on(conn, &[&api, &login]).await;
        assert!(matches!(limited, Ok(CheckAll::Limited { by: 1, .. })));
        let invalid = RateLimit::check_all(&pool, &[&api, &login.key("")]).await;
        assert!(matches!(invalid, Err(Error::Input(_))));
    });
    let ids: Vec<_> = here("id").into_iter().flatten().collect();
    assert_eq!(ids, ["1", "1", "2", "2", "3", "3", "4"]);
    let limits: Vec<_> = here("limit").into_iter().flatten().collect();
    assert_eq!(limits, ["\"login\""; 4]);
}

/// The prefix is not entered when the future is dropped.
#[test]
#[cfg(feature = "testing")]
fn a_dropped_wait_shows_the_number_that_it_waited_for() {
    use diesel_interlock::testing::KeyPrefix;

    let prefix = KeyPrefix::new("a test");
    let key = LockKey::named("dropped in a scope");
    logged_here(async {
        let database = Database::new();
        let pool = database.deadpool(1);
        let only = pool.get().await.unwrap();
        let lock = asynchronous::AdvisoryLock::new(key.clone());
        let acquire = prefix.scope(lock.acquire(&pool));
        assert!(poll_times(acquire, 1).await.is_none());
        drop(only);
    });
    let _prefix = prefix.enter();
    assert_eq!(here("key"), [Some(key.to_string())]);
}
