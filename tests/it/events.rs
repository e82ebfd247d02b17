//! What the feature `tracing` tells.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, Once};
use std::time::Duration;

use diesel::RunQueryDsl;
use diesel::connection::SimpleConnection;
use diesel_interlock::error::Misplaced;
use diesel_interlock::{
    Admission, AdvisoryLock, CheckAll, Error, LockKey, Quota, RateLimit, Semaphore, Throttle, sync,
    sync_intervals,
};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use workbench::Database;

use crate::semaphores;
use crate::support::{Expect, Observer, assert_matches, assert_pool_whole, eventually, is_granted};
use crate::throttles::{self, Resource};

const LOCK: AdvisoryLock = AdvisoryLock::named("events");
const GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));

type Fields = BTreeMap<&'static str, String>;

thread_local! {
    /// The events of this thread, while they are collected.
    static COLLECTED: RefCell<Option<Vec<Fields>>> = const { RefCell::new(None) };

    /// The spans of this thread.
    static SPANS: RefCell<Vec<Fields>> = const { RefCell::new(Vec::new()) };

    /// Whether the subscriber panics at each event of this thread that tells of a connection given up.
    static PANICS: Cell<bool> = const { Cell::new(false) };
}

/// The events of all threads.
static TOLD_ANYWHERE: Mutex<Vec<Fields>> = Mutex::new(Vec::new());

/// One for the whole process: those that come and go with a test disable each other's spans.
struct Collector;

struct Visitor(Fields);

impl Visit for Visitor {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_new_span(&self, span: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let mut visitor = Visitor(Fields::new());
        span.record(&mut visitor);
        SPANS.with_borrow_mut(|spans| spans.push(visitor.0));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        if event.metadata().target() != "diesel_interlock" {
            return;
        }
        let mut visitor = Visitor(Fields::new());
        event.record(&mut visitor);
        let mut fields = visitor.0;
        if *event.metadata().level() == Level::WARN {
            fields.insert("warning", String::new());
        }
        if let Some(span) = context.event_span(event) {
            fields.insert("span", span.name().to_owned());
        }
        TOLD_ANYWHERE.lock().unwrap().push(fields.clone());
        COLLECTED
            .with_borrow_mut(|collected| collected.iter_mut().for_each(|c| c.push(fields.clone())));
        if PANICS.get() && fields["operation"] == "discard" {
            panic!("in the subscriber");
        }
    }
}

/// What is told on this thread while `work` runs.
fn told(work: impl FnOnce()) -> Vec<Fields> {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let subscriber = tracing_subscriber::registry().with(Collector);
        tracing::subscriber::set_global_default(subscriber).unwrap();
    });
    COLLECTED.set(Some(Vec::new()));
    work();
    COLLECTED.take().unwrap()
}

fn brief(events: &[Fields]) -> Vec<String> {
    let brief = |event: &Fields| {
        let warning = if event.contains_key("warning") {
            " !"
        } else {
            ""
        };
        format!("{} {}{warning}", event["operation"], event["outcome"])
    };
    events.iter().map(brief).collect()
}

#[test]
fn a_lock_logs_its_acquisition_its_refusal_and_its_release() {
    let database = Database::new();
    let pool = database.pool(2);
    let events = told(|| {
        let guard = LOCK.try_acquire(&pool).unwrap().expect_acquired();
        assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
        std::thread::sleep(Duration::from_millis(3));
        drop(guard);
    });
    assert_eq!(
        brief(&events),
        ["acquire acquired", "acquire busy", "release released"]
    );
    for event in &events {
        assert_eq!(event["key"], LOCK.key().to_string());
        assert!(!event.contains_key("service"));
    }
    assert_eq!(events[0]["span"], "acquire");
    assert!(events[0]["waited_ms"].parse::<u64>().is_ok());
    assert!(events[2]["held_ms"].parse::<u64>().unwrap() >= 3);
}

#[test]
fn a_lost_lock_and_a_discarded_connection_are_warnings() {
    let database = Database::new();
    let pool = database.pool(1);
    let events = told(|| {
        let guard = LOCK.acquire(&pool).unwrap();
        Observer::of(&database).kill(guard.backend_pid());
        drop(guard);
    });
    assert_eq!(
        brief(&events),
        ["acquire acquired", "release lost !", "discard discarded !"]
    );
    // libpq's message has several lines.
    let error = &events[1]["error"];
    assert!(error.contains(": "), "{events:?}");
    assert!(!error.contains('\n'), "{error:?}");
}

#[test]
fn an_error_is_a_warning_with_its_causes() {
    let database = throttles::database();
    let conn = &mut database.connect();
    let events = told(|| {
        assert_matches!(
            LOCK.acquire_xact(conn),
            Err(Error::Misplaced(Misplaced::XactLockOutsideTransaction))
        );
    });
    assert_eq!(brief(&events), ["acquire error !"]);
    assert_eq!(
        events[0]["error"],
        Error::Misplaced(Misplaced::XactLockOutsideTransaction).to_string()
    );
}

#[test]
fn a_throttle_logs_its_decision() {
    let database = throttles::database();
    let conn = &mut database.connect();
    let import = Throttle::of(Resource::Import).key(7);
    let events = told(|| {
        assert!(is_granted(conn, &import, "me"));
        assert!(!is_granted(conn, &import, "me"));
    });
    assert_eq!(brief(&events), ["attempt granted", "attempt denied"]);
    assert_eq!(events[1]["key"], "7");
    assert!(events[1].contains_key("resource") && events[1].contains_key("retry_after_ms"));
}

/// A changed declaration has no effect by itself.
#[test]
fn an_interval_that_differs_from_the_declared_one_is_a_warning() {
    let database = throttles::database();
    let conn = &mut database.connect();
    assert_eq!(told(|| drop(sync::<Resource>(conn).unwrap())), []);
    conn.batch_execute(
        "UPDATE resource_control.throttled_resource SET throttle_interval = '1 minute' \
         WHERE resource_id = 'cache rebuild'",
    )
    .unwrap();
    let events = told(|| assert_eq!(sync::<Resource>(conn).unwrap().different.len(), 1));
    assert_eq!(brief(&events), ["sync different !"]);
    let told_of = ["resource", "declared_ms", "in_database_ms"].map(|field| &*events[0][field]);
    assert_eq!(told_of, ["cache rebuild", "15000", "60000"]);

    let overwriting = || assert_eq!(sync_intervals::<Resource>(conn).unwrap().different.len(), 1);
    assert_eq!(told(overwriting), []);
    assert_eq!(told(|| drop(sync::<Resource>(conn).unwrap())), []);
}

#[test]
fn a_semaphore_logs_claims_releases_and_timeouts() {
    let database = semaphores::database();
    let pool = database.pool(1);
    let events = told(|| {
        let mut permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let Admission::Full(_) = GEOCODER.try_acquire(&pool).unwrap() else {
            panic!("two permits of one");
        };
        permit.renew().unwrap();
        permit.release().unwrap();
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        semaphores::expire(&mut database.connect(), "geocoder");
        drop(permit);
        let permit = GEOCODER.try_acquire(&pool).unwrap().expect_acquired();
        let busy = pool.get().unwrap();
        drop(permit);
        drop(busy);
    });
    assert_eq!(
        brief(&events),
        [
            "acquire acquired",
            "acquire busy",
            "renew renewed",
            "release released",
            "acquire acquired",
            "release timed_out !",
            "acquire acquired",
            "release deferred",
        ]
    );
    assert!(events.iter().all(|event| event["service"] == "geocoder"));
    for event in &events {
        let is_busy = event["outcome"] == "busy";
        assert_eq!(event.contains_key("retry_after_ms"), is_busy, "{event:?}");
    }
    let ids: Vec<_> = events.iter().map(|event| event.get("id")).collect();
    assert_eq!(ids[1], None);
    for (acquired, ended) in [(0, 2), (0, 3), (4, 5), (6, 7)] {
        assert!(
            ids[acquired].is_some() && ids[acquired] == ids[ended],
            "{ids:?}"
        );
    }
    // Not through the pool, whose only connection it waits for.
    let conn = &mut database.connect();
    eventually("the deferred release is delivered", || {
        use diesel::QueryDsl;
        use diesel_interlock::monitor;
        use diesel_interlock::schema::resource_control::service_request;
        let in_flight = service_request::table.filter(monitor::in_flight()).count();
        in_flight.get_result(conn) == Ok(0)
    });
}

#[test]
fn every_acquisition_of_a_slot_logs_the_id_of_its_request() {
    let database = semaphores::database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let mut ids = Vec::new();
    let events = told(|| {
        let permit = GEOCODER.acquire(&pool).unwrap();
        ids.push(permit.fencing_token());
        permit.release().unwrap();
        let waited = GEOCODER.acquire_timeout(&pool, Duration::from_secs(9));
        let permit = waited.unwrap().expect_acquired();
        ids.push(permit.fencing_token());
        permit.release().unwrap();
        ids.push(GEOCODER.claim_on(conn).unwrap().expect_acquired().id);
    });
    let acquired = events
        .iter()
        .filter(|event| event["operation"] == "acquire");
    let told: Vec<i64> = acquired.map(|event| event["id"].parse().unwrap()).collect();
    assert_eq!(told, ids);
}

const API: RateLimit = RateLimit::named("api", Quota::per_hour(100));
const LOGIN: RateLimit = RateLimit::named("login", Quota::per_hour(1));

#[test]
fn a_check_of_several_limits_names_the_one_that_refused() {
    let database = semaphores::database();
    let (pool, conn) = (database.pool(1), &mut database.connect());
    let same_key = RateLimit::named("login", Quota::per_hour(2));
    let events = told(|| {
        let allowed = RateLimit::check_all_on(conn, &[&API, &LOGIN]).unwrap();
        assert_matches!(allowed, CheckAll::Allowed(_));
        for limits in [[&API, &LOGIN], [&LOGIN, &API]] {
            for limited in [
                RateLimit::check_all_on(conn, &limits),
                RateLimit::check_all(&pool, &limits),
            ] {
                assert_matches!(limited, Ok(CheckAll::Limited { .. }));
            }
        }
        for invalid in [LOGIN.key(""), LOGIN.cost(0), LOGIN.cost(2)] {
            RateLimit::check_all_on(conn, &[&API, &invalid]).unwrap_err();
            RateLimit::check_all(&pool, &[&API, &invalid]).unwrap_err();
        }
        RateLimit::check_all_on(conn, &[&API, &LOGIN, &same_key]).unwrap_err();
    });
    let limits: Vec<_> = events.iter().map(|event| event["limit"].as_str()).collect();
    assert_eq!(limits[0], "api");
    assert_eq!(limits[1..], ["login"; 11]);
}

#[test]
fn a_long_text_is_cut() {
    let database = throttles::database();
    let conn = &mut database.connect();
    let [short, long] = [1000, 5000].map(|length| "ü".repeat(length));
    for (text, shown) in [(&short, short.clone()), (&long, format!("{short}…"))] {
        SPANS.take();
        let events = told(|| {
            let import = Throttle::of(Resource::Import).key(text);
            drop(import.details("me").attempt_on(conn));
            let minute = Duration::from_secs(60);
            drop(Semaphore::new(text, 1, minute).claim_on(conn));
            drop(RateLimit::new(text, Quota::per_hour(1)).check_on(conn));
        });
        for fields in [events, SPANS.take()] {
            let told: Vec<_> = fields
                .iter()
                .zip(["key", "service", "limit"])
                .map(|(fields, field)| fields[field].as_str())
                .collect();
            assert_eq!(told, [shown.as_str(); 3]);
        }
    }
}

/// The connection decides which number is locked.
#[test]
#[cfg(feature = "testing")]
fn the_events_of_a_lock_show_the_number_that_is_locked() {
    use diesel::Connection;
    use diesel::r2d2::Pool;
    use diesel_interlock::testing::KeyPrefix;

    let database = Database::new();
    let prefix = KeyPrefix::new("a test");
    let pool = Pool::builder()
        .max_size(2)
        .connection_customizer(Box::new(prefix.clone()))
        .build(database.manager())
        .unwrap();
    let conn = &mut database.connect();
    prefix.carry_on(conn);
    let short = Duration::from_millis(20);
    let events = told(|| {
        let guard = LOCK.acquire(&pool).unwrap();
        assert!(LOCK.try_acquire(&pool).unwrap().is_busy());
        assert!(LOCK.acquire_timeout(&pool, short).unwrap().is_busy());
        assert!(LOCK.try_acquire_on(conn).unwrap().is_busy());
        conn.transaction(|conn| {
            assert!(LOCK.try_acquire_xact(conn)?.is_busy());
            LOCK.acquire_on(conn).map(drop).unwrap_err();
            Ok::<_, Error>(())
        })
        .unwrap();
        guard.release().unwrap();
        conn.transaction(|conn| LOCK.acquire_xact(conn)).unwrap();
        drop(LOCK.acquire_on(conn).unwrap());
    });
    let _prefix = prefix.enter();
    for event in &events {
        assert_eq!(event["key"], LOCK.key().to_string(), "{event:?}");
    }
    assert_eq!(events.len(), 10);
}

/// That one of the threads tells this.
#[track_caller]
fn eventually_told(operation: &str, outcome: &str, field: &str, value: &str) {
    eventually("a thread tells of it", || {
        TOLD_ANYWHERE.lock().unwrap().iter().any(|event| {
            event["operation"] == operation
                && event["outcome"] == outcome
                && event.get(field).is_some_and(|told| told == value)
        })
    });
}

#[test]
fn a_watch_logs_a_lock_that_is_gone() {
    let database = Database::new();
    let pool = database.pool(2);
    let lock = AdvisoryLock::new(LockKey::pair(4242, -1));
    told(|| {
        let mut guard = lock.acquire(&pool).unwrap();
        let _watch = guard.watch(&pool, Duration::from_millis(10)).unwrap();
        Observer::of(&database).kill(guard.backend_pid());
        eventually_told("watch", "lost", "key", &lock.key().to_string());
    });
}

#[test]
fn a_watch_logs_nothing_about_a_lock_that_its_guard_releases() {
    let database = Database::new();
    let pool = database.pool(2);
    let lock = AdvisoryLock::new(LockKey::pair(4242, -2));
    let events = told(|| {
        let mut guard = lock.acquire(&pool).unwrap();
        let watch = guard.watch(&pool, Duration::from_millis(10)).unwrap();
        guard.release().unwrap();
        let asked = watch.last_confirmed();
        // Time enough for several questions.
        eventually("some time has passed", || {
            watch.last_confirmed() > asked + Duration::from_millis(100)
        });
    });
    assert_eq!(brief(&events), ["acquire acquired", "release released"]);
    let told = TOLD_ANYWHERE.lock().unwrap();
    let of_the_watch = |event: &&Fields| {
        event["operation"] == "watch" && event.get("key") == Some(&lock.key().to_string())
    };
    assert_eq!(told.iter().find(of_the_watch), None);
}

#[test]
fn a_late_release_that_came_too_late_is_logged() {
    let database = semaphores::database();
    let pool = database.pool(1);
    let conn = &mut database.connect();
    conn.batch_execute("ALTER TABLE resource_control.service_request ALTER id RESTART 424242")
        .unwrap();
    told(|| {
        let brief = Semaphore::named("geocoder", 1, Duration::from_millis(20));
        let permit = brief.try_acquire(&pool).unwrap().expect_acquired();
        let _only = pool.get().unwrap();
        drop(permit);
        eventually_told("release", "timed_out", "id", "424242");
    });
}

#[test]
fn a_subscriber_that_panics_keeps_no_connection_from_being_given_up() {
    use diesel::connection::{AnsiTransactionManager, TransactionManager};
    let database = Database::new();
    let pool = database.pool(2);
    let mut observer = Observer::of(&database);
    let events = told(|| {
        PANICS.set(true);
        for while_unwinding in [false, true] {
            let mut guard = LOCK.acquire(&pool).unwrap();
            let pid = guard.backend_pid();
            guard.conn().batch_execute("BEGIN").unwrap();
            if while_unwinding {
                let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                    let _guard = guard;
                    panic!("in the protected work");
                }));
                assert!(caught.is_err());
            } else {
                drop(guard);
            }
            observer.assert_ended(pid);
        }

        let conn = &mut database.connect();
        let mut guard = LOCK.acquire_on(conn).unwrap();
        AnsiTransactionManager::begin_transaction(guard.conn()).unwrap();
        guard.conn().batch_execute("SELECT 1/0").unwrap_err();
        drop(guard);
        assert!(AnsiTransactionManager::is_broken_transaction_manager(conn));
        PANICS.set(false);
    });
    let discarded = events
        .iter()
        .filter(|event| event["operation"] == "discard");
    assert_eq!(discarded.count(), 3);
    assert_pool_whole(&pool, &database);
}
