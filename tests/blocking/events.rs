//! Each operation logs one event.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use diesel_interlock::migrations;
use tracing::field::{Field, Visit};
use tracing::subscriber::with_default;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::half::{
    AdvisoryLock, Error, Fence, Once, Quota, RateLimit, Semaphore, Throttle, begin, pool,
};
use crate::support::log::Log;
use crate::support::{Observer, Own, Step, eventually, impatient_pool, installed, number, run};

type Fields = HashMap<&'static str, String>;

#[derive(Clone, Default)]
struct Collect(Arc<Mutex<Vec<(Level, Fields)>>>);

struct Visitor<'a>(&'a mut Fields);

impl Visit for Visitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(
            field.name(),
            format!("{value:?}").trim_matches('"').to_owned(),
        );
    }
}

impl<S: Subscriber> Layer<S> for Collect {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if event.metadata().target() == "diesel_interlock" {
            let mut fields = Fields::new();
            event.record(&mut Visitor(&mut fields));
            // On a slow machine a wait for a connection may be a long one.
            if fields["primitive"] == "pool" {
                return;
            }
            self.0
                .lock()
                .unwrap()
                .push((*event.metadata().level(), fields));
        }
    }
}

impl Collect {
    /// Calls `work` with this collector as the subscriber of the thread.
    ///
    /// A second, global subscriber is needed. As long as there is only one, tracing asks only the
    /// thread that reaches a call site first, and caches for all threads that nobody listens:
    /// <https://github.com/tokio-rs/tracing/issues/3611>.
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        Log::of("any");
        with_default(tracing_subscriber::registry().with(self.clone()), work)
    }
}

/// The events that `work` logs on this thread.
fn events(work: impl FnOnce()) -> Vec<(Level, Fields)> {
    let collected = Collect::default();
    collected.during(work);
    std::mem::take(&mut *collected.0.lock().unwrap())
}

/// The events that `work` logs on this thread, each as `primitive name operation: outcome`.
fn event_lines(work: impl FnOnce()) -> Vec<String> {
    let line = |(_, event): &(Level, Fields)| {
        format!(
            "{} {} {}: {}",
            event["primitive"], event["name"], event["operation"], event["outcome"]
        )
    };
    events(work).iter().map(line).collect()
}

#[test]
fn an_operation_logs_its_outcome() {
    let database = installed();
    let pool = pool(&database, 2);
    let lock = AdvisoryLock::named("report");
    assert_eq!(
        event_lines(|| {
            let guard = lock.acquire(&pool).unwrap();
            let _ = lock.try_acquire(&pool).unwrap();
            guard.release().unwrap();
            drop(lock.key("a secret").acquire(&pool).unwrap());
        }),
        [
            "lock report acquire: acquired",
            "lock report try_acquire: busy",
            "lock report release: released",
            "lock report acquire: acquired",
            "lock report drop: released",
        ]
    );
    let (throttle, limit) = (
        Throttle::named("t", Duration::from_secs(60)),
        RateLimit::named("l", Quota::per_day(1)),
    );
    assert_eq!(
        event_lines(|| {
            for _ in 0..2 {
                let _ = throttle.attempt(&pool).unwrap();
                let _ = limit.check(&pool).unwrap();
            }
        }),
        [
            "throttle t attempt: granted",
            "rate limit l check: allowed",
            "throttle t attempt: denied",
            "rate limit l check: limited"
        ]
    );
    let once = Once::named("o");
    assert_eq!(
        event_lines(|| {
            let conn = &mut pool.get().unwrap();
            for key in ["a", "a", ""] {
                let _ = once.key(key).run(conn, |_conn| Ok::<_, Error>("a secret"));
            }
        }),
        [
            "once o run: first",
            "once o run: before",
            "once o run: failed"
        ]
    );
    let semaphore = Semaphore::named("s", 1, Duration::from_secs(60));
    assert_eq!(
        event_lines(|| {
            let permit = semaphore.try_acquire(&pool).unwrap().admitted().unwrap();
            let _ = semaphore.try_acquire(&pool).unwrap();
            permit.release().unwrap();
        }),
        [
            "semaphore s try_acquire: admitted",
            "semaphore s try_acquire: full",
            "semaphore s release: released"
        ]
    );
}

#[test]
fn a_release_that_fails_is_logged() {
    let database = installed();
    let pool = impatient_pool(&database, Duration::from_millis(50));
    let semaphore = Semaphore::named("s", 1, Duration::from_secs(60));
    let mut other = None;
    assert_eq!(
        event_lines(|| {
            let permit = semaphore.acquire(&pool).unwrap();
            other = Some(pool.get().unwrap());
            permit.release().unwrap_err();
        }),
        [
            "semaphore s acquire: admitted",
            "semaphore s release: failed"
        ]
    );
}

#[test]
fn a_drop_that_cannot_release_a_lock_is_a_warning() {
    let database = installed();
    let conn = &mut database.connect();
    let events = events(|| {
        let work = |conn: &mut diesel::PgConnection| -> Result<(), Error> {
            begin(conn);
            panic!("in the work")
        };
        let with = || AdvisoryLock::named("scope").with_on(conn, work);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(with)).unwrap_err();
    });
    let (level, dropped) = events.last().unwrap();
    assert_eq!(*level, Level::WARN);
    assert_eq!(dropped["outcome"], "failed");
    assert!(dropped.contains_key("error"));
}

#[test]
fn outcomes_that_need_attention_are_warnings_with_their_errors() {
    let database = installed();
    let pool = pool(&database, 2);
    let lock = AdvisoryLock::named("report");
    let events = events(|| {
        let guard = lock.acquire(&pool).unwrap();
        Observer::of(&database).kill(guard.backend_pid());
        guard.release().unwrap_err();
        let fence = Fence::named("f");
        fence.pass(&mut pool.get().unwrap(), 1).unwrap_err();
    });
    let [(first, acquired), (second, lost), (third, refused)] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        [*first, *second, *third],
        [Level::DEBUG, Level::WARN, Level::DEBUG]
    );
    assert!(!acquired.contains_key("error") && !acquired.contains_key("held_us"));
    assert!(acquired["took_us"].parse::<u64>().is_ok());
    assert_eq!(lost["outcome"], "lost");
    assert!(lost["error"].contains("report") && lost["held_us"].parse::<u64>().is_ok());
    assert_eq!(refused["outcome"], "failed");
}

/// Takes more than five seconds, because the wait is logged after that time.
#[test]
fn a_long_wait_for_the_migrations_of_another_instance_names_its_session() {
    const OWN: Own = Own(&[("1_users", Step::Sql("CREATE TABLE users ()"))]);
    let database = installed();
    let mut holder = database.connect();
    run(
        &mut holder,
        "SELECT pg_advisory_lock(resource_control.lock_key('diesel_interlock migrations'))",
    );
    let pid = number(&mut holder, "pg_backend_pid()");
    let collected = Collect::default();
    let waiting = thread::spawn({
        let (collected, mut conn) = (collected.clone(), database.connect());
        move || collected.during(|| migrations::run_pending(&mut conn, OWN))
    });
    let logged_wait = || {
        let events = collected.0.lock().unwrap();
        let of_wait = events
            .iter()
            .find(|(_, event)| event["outcome"] == "waiting");
        of_wait.map(|(level, event)| (*level, event["holder"].clone()))
    };
    eventually("the wait is logged", || logged_wait().is_some());
    assert_eq!(logged_wait(), Some((Level::WARN, format!("{pid}"))));
    drop(holder);
    assert_eq!(waiting.join().unwrap().unwrap(), ["1"]);
}
