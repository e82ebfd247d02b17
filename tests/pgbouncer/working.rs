//! In transaction mode, everything but session locks works, although each statement may run on another session.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use diesel_interlock::schedule::{RunDue, every};
use diesel_interlock::{Error, Quota, migrations};
use workbench::{Database, PgBouncer, PoolMode};

use crate::{number, pool};

const HOUR: Duration = Duration::from_secs(3600);
/// Timeout of a permit, which is renewed every four seconds.
const TIMEOUT: Duration = Duration::from_secs(12);
const RENEWED: &str = "(SELECT count(*) FROM resource_control.service_request
    WHERE service = 'import' AND expires_at > created_at + interval '13 s')";

/// Uses each primitive of a half from eight threads, over a pool of four connections and a pooler with two sessions.
macro_rules! everything_but_session_locks {
    ($($half:ident)::+, $database:expr, $pool:expr, $wait:path, $work:expr, $once:expr) => {{
        use $($half)::+::{RateLimit, Schedule, Semaphore, Throttle};
        static REBUILD: Throttle = Throttle::named("rebuild", HOUR);
        static API: RateLimit = RateLimit::named("api", Quota::per_day(5));
        static GEOCODER: Semaphore = Semaphore::named("geocoder", 2, HOUR);
        static IMPORT: Semaphore = Semaphore::named("import", 1, TIMEOUT).keep_alive();
        static CLEAN: Schedule = Schedule::named("clean");

        let pool = $pool;
        $wait(migrations::install(&pool)).unwrap();
        let [granted, allowed, inside] = [(); 3].map(|()| AtomicUsize::new(0));
        let kept = $wait(IMPORT.try_acquire(&pool)).unwrap().admitted().unwrap();
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..10 {
                        let decision = $wait(REBUILD.attempt(&pool)).unwrap();
                        granted.fetch_add(usize::from(decision.is_granted()), Ordering::SeqCst);
                        let check = $wait(API.key(7).check(&pool)).unwrap();
                        allowed.fetch_add(usize::from(check.is_allowed()), Ordering::SeqCst);
                        let permit = $wait(GEOCODER.acquire(&pool)).unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        $wait(permit.release()).unwrap();
                        assert!($wait(IMPORT.try_acquire(&pool)).unwrap().is_full());
                    }
                });
            }
        });
        assert_eq!(granted.into_inner(), 1);
        assert_eq!(allowed.into_inner(), 5);
        let look = || $wait(CLEAN.run_due(&pool, every(Duration::from_micros(1)), $work)).unwrap();
        assert!(matches!(look(), RunDue::Later(_)), "it is first seen");
        assert_eq!(look(), RunDue::Ran);
        assert!($once(&pool).unwrap().is_first());
        assert!(!$once(&pool).unwrap().is_first());
        let observer = &mut $database.connect();
        while number(observer, RENEWED) == 0 {
            assert!(!$wait(kept.wait_for_loss(Duration::from_millis(10))));
        }
        $wait(kept.release()).unwrap();
        assert!($wait(IMPORT.try_acquire(&pool)).unwrap().is_admitted());
    }};
}

#[test]
fn the_blocking_half() {
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    everything_but_session_locks!(
        diesel_interlock,
        database,
        pool(&pooler, 4),
        std::convert::identity,
        |_| Ok::<_, Error>(()),
        |pool: &diesel_interlock::PgPool| {
            let conn = &mut pool.get().unwrap();
            diesel_interlock::Once::named("charge").run(conn, |_| Ok::<_, Error>("charged"))
        }
    );
}

/// Its statements are always prepared, so it needs a pooler that supports them.
#[cfg(feature = "deadpool")]
#[test]
fn the_asynchronous_half() {
    if !crate::follows_prepared_statements() {
        return;
    }
    let database = Database::new();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 2);
    everything_but_session_locks!(
        diesel_interlock::deadpool,
        database,
        pooler.deadpool(4),
        workbench::block_on,
        |_| async { Ok::<_, Error>(()) },
        |pool: &diesel_interlock::deadpool::PgPool| workbench::block_on(async {
            let conn = &mut pool.get().await.unwrap();
            let once = diesel_interlock::deadpool::Once::named("charge");
            once.run(conn, async |_| Ok::<_, Error>("charged")).await
        })
    );
}
