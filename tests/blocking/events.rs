//! Each operation tells one event.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::subscriber::with_default;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::half::{AdvisoryLock, Fence, Quota, RateLimit, Semaphore, Throttle, make_pool, pool};
use crate::support::{Observer, installed};

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
            self.0
                .lock()
                .unwrap()
                .push((*event.metadata().level(), fields));
        }
    }
}

/// What operations of this thread tell.
fn events(work: impl FnOnce()) -> Vec<(Level, Fields)> {
    let collected = Collect::default();
    with_default(tracing_subscriber::registry().with(collected.clone()), work);
    std::mem::take(&mut *collected.0.lock().unwrap())
}

/// `primitive name operation: outcome` of each.
fn told(work: impl FnOnce()) -> Vec<String> {
    let line = |(_, event): &(Level, Fields)| {
        format!(
            "{} {} {}: {}",
            event["primitive"], event["name"], event["operation"], event["outcome"]
        )
    };
    events(work).iter().map(line).collect()
}

#[test]
fn an_operation_tells_what_it_came_to() {
    let database = installed();
    let pool = pool(&database, 2);
    let lock = AdvisoryLock::named("report");
    assert_eq!(
        told(|| {
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
        told(|| {
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
    let semaphore = Semaphore::named("s", 1, Duration::from_secs(60));
    assert_eq!(
        told(|| {
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
fn a_release_that_fails_is_told() {
    let database = installed();
    let pool = make_pool(&database.url(), 1, Duration::from_millis(50));
    let semaphore = Semaphore::named("s", 1, Duration::from_secs(60));
    let open = || pool.get_timeout(Duration::from_secs(60)).unwrap();
    let mut other = Some(open());
    drop(other.take());
    assert_eq!(
        told(|| {
            let permit = semaphore.acquire(&pool).unwrap();
            other = Some(open());
            permit.release().unwrap_err();
        }),
        [
            "semaphore s acquire: admitted",
            "semaphore s release: failed"
        ]
    );
}

#[test]
fn what_needs_attention_is_a_warning_with_its_error() {
    let database = installed();
    let pool = pool(&database, 2);
    let lock = AdvisoryLock::named("report");
    let told = events(|| {
        let guard = lock.acquire(&pool).unwrap();
        Observer::of(&database).kill(guard.backend_pid());
        guard.release().unwrap_err();
        let fence = Fence::named("f");
        fence.pass(&mut pool.get().unwrap(), 1).unwrap_err();
    });
    let [(first, acquired), (second, lost), (third, refused)] = &told[..] else {
        panic!("{told:?}")
    };
    assert_eq!(
        [*first, *second, *third],
        [Level::DEBUG, Level::WARN, Level::WARN]
    );
    assert!(!acquired.contains_key("error") && !acquired.contains_key("held_us"));
    assert!(acquired["took_us"].parse::<u64>().is_ok());
    assert_eq!(lost["outcome"], "lost");
    assert!(lost["error"].contains("report") && lost["held_us"].parse::<u64>().is_ok());
    assert_eq!(refused["outcome"], "failed");
}
