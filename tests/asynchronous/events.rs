//! Both halves log the same events, with the same fields, for the same course.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, Once};
use std::time::Duration;

use diesel::prelude::*;
use diesel_async::SimpleAsyncConnection;
use diesel_interlock::{AdvisoryLock, Attempt, Error, LockKey, asynchronous};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use workbench::Database;

use crate::dropping::poll_times;
use crate::run;

type Fields = BTreeMap<&'static str, String>;

/// The events of all threads.
static LOGGED: Mutex<Vec<Fields>> = Mutex::new(Vec::new());

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
        LOGGED.lock().unwrap().push(fields);
    }
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
                "key" => {}
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
